"""Failures of a tuning: it is tried again, later each time, and people are warned once of each cause."""

from __future__ import annotations

import logging
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from gckernels.sync.tuning import retries, uniform_candidates
from gckernels.sync.tuning.retries import Allowance, Retries
from gckernels.sync.tuning.trials.rules import STEPS
from gckernels.sync.tuning.watching import watching
from gckernels.sync.tuning.watching.monitor import Window
from models import build
from ranks import run_ranks, values_of
from tunings import PLAIN, policy_of, proposal_of, scripted, train, tuned_handle

SPECS = {"four": "BlockQuant(bits=4)", "eight": "BlockQuant"}
SOON = 7
"""Steps from a failure to the first new attempt in these tests."""


def test_attempts_become_rarer_and_causes_are_known_without_their_numbers():
    failures = Retries(Allowance(1000))
    for step, due in ((10, 1010), (1010, 3010), (3010, 7010)):
        failures = failures.after(step, f"no time after {step / 3:.2f} s")
        assert failures.due == due
    assert failures.is_known("no time after 1,000 s") and not failures.is_known("no compiler")
    assert failures.settled().due is None and failures.settled().after(7010, "x").due == 15010


def test_old_failures_are_forgotten():
    assert Retries(Allowance(1000)).after(0, "x").settled().after(4000, "x").due == 5000


def fails_at_first(front: str, failures: int) -> Any:
    """The plans of a training in which some attempts of tuning fail, and its decisions."""
    module, handles, calls = build("Mlp"), [], []

    def proposal(*_: object) -> Any:
        calls.append(0)
        if len(calls) <= failures:
            raise ValueError(f"no plan after {len(calls)} s")
        return proposal_of(module, SPECS)

    with (
        scripted(module, SPECS, {PLAIN: 1.0, "four": 0.5, "eight": 0.7}, handles),
        mock.patch.object(retries, "AGAIN_STEPS", SOON),
        mock.patch.object(uniform_candidates, "candidates", proposal),
    ):
        model, handle = tuned_handle(front, module)
        handles.append(handle)
        policies = train(model, module, range(2 * STEPS + 10 * SOON), lambda _: policy_of(handle))
    decisions = [(each.step, each.level, each.text) for each in handle.decisions]
    handle.close()
    return policies, decisions


@pytest.mark.parametrize("front", ["ddp", pytest.param("module", marks=pytest.mark.slow)])
def test_a_tuning_that_failed_is_tried_again_with_one_warning(front):
    first, second = values_of(run_ranks(2, fails_at_first, front, 2))
    assert first == second
    policies, decisions = first
    assert {*policies[: decisions[1][0]]} == {PLAIN} and policies[-1] == "four"
    assert [level for _, level, _ in decisions] == [logging.WARNING, logging.INFO, logging.INFO]
    assert f"next attempt in {SOON} steps" in decisions[0][2] and f"in {2 * SOON} steps" in decisions[1][2]
    assert decisions[1][0] - decisions[0][0] >= SOON and "chosen" in decisions[2][2]


def refused_in_a_comparison(refused: str) -> Any:
    """The plans of a training whose steps change, while a rank refuses one of the plans that are compared then; and its
    decisions."""
    module, handles, times = build("Mlp"), [], {PLAIN: 1.0, "four": 0.5, "eight": 0.7}

    class ScriptedMonitor:
        def __init__(self, *_: object) -> None:
            self._steps = 0

        def step_ended(self) -> Window | None:
            self._steps += 1
            return None if self._steps % 5 else Window(25, (times[policy_of(handles[0])],) * 25)

    with (
        scripted(module, SPECS, times, handles),
        mock.patch.object(watching, "Monitor", ScriptedMonitor),
        mock.patch.object(retries, "AGAIN_STEPS", SOON),
    ):
        model, handle = tuned_handle("ddp", module)
        handles.append(handle)
        check = handle._changes.checked

        def refuses(plan: Any) -> Any:
            is_refused = plan.prediction is not None and plan.prediction.policy == refused
            if is_refused and handle.steps >= STEPS and dist.get_rank() == 1:
                raise ValueError("no plan")
            return check(plan)

        def look(step: int) -> str:
            if step == STEPS:
                times.update({PLAIN: 9.0, "four": 2.0, "eight": 1.5})
                handle._changes.checked = refuses
            return policy_of(handle)

        policies = train(model, module, range(2 * STEPS), look)
    decisions = [(each.step, each.text) for each in handle.decisions]
    handle.close()
    return policies, decisions


def test_a_plan_that_cannot_come_back_is_tried_again_later():
    """The plan that was compared goes on until then."""
    first, second = values_of(run_ranks(2, refused_in_a_comparison, "four"))
    assert first == second
    policies, decisions = first
    failed_at, text = next(each for each in decisions if "next attempt" in each[1])
    assert "no plan (rank 1)" in text and "the plan that runs now" in text and f"in {SOON} steps" in text
    assert {*policies[failed_at : failed_at + SOON]} == {"eight"}
    assert "four" not in policies[failed_at:] and PLAIN in policies[failed_at + SOON :], "then plans are tried anew"


def test_a_plan_that_is_refused_in_a_comparison_is_left_out():
    first, second = values_of(run_ranks(2, refused_in_a_comparison, "eight"))
    assert first == second
    policies, (_, (_, text)) = first
    assert {*policies[STEPS:]} == {"four"}, "the plan from before goes on, and is not left again"
    assert "a comparison of plans failed" in text and "no plan (rank 1)" in text
