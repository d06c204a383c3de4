"""Failures of a tuning: it is tried again, later each time, and people are warned once of each cause."""

from __future__ import annotations

import logging
from typing import Any
from unittest import mock

import pytest

from gckernels.sync.tuning import progress, uniform_candidates
from gckernels.sync.tuning.progress import Retries
from gckernels.sync.tuning.trials.rules import STEPS
from gckernels.sync.tuning.watching import watching
from gckernels.sync.tuning.watching.drift import Allowance
from gckernels.sync.tuning.watching.monitor import Window
from models import build
from ranks import run_ranks, values_of
from tunings import PLAIN, policy_of, proposal_of, scripted, train, tuned_handle

SPECS = {"four": "BlockQuant(bits=4)", "eight": "BlockQuant"}
SOON = 7
"""Steps from a failure to the first new attempt in these tests."""
SLOWER = {PLAIN: 9.0, "four": 2.0, "eight": 1.5}
"""Steps of a slower link."""


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
        mock.patch.object(progress, "REPLAN_STEPS", SOON),
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


def fails_once_running(fault: str, step_s: dict[str, float]) -> Any:
    """The plans of a training whose steps change, and for which no other plan is found, or may follow, at first.
    Then its decisions, and the steps in which a plan is watched and in which checkpoints have the outcome of trials."""
    module, handles, calls, times = build("Mlp"), [], [], {PLAIN: 1.0, "four": 0.5, "eight": 0.7}
    watched, settled, refusals = [], [], ["plain"]

    class ScriptedMonitor:
        def __init__(self, *_: object) -> None:
            self._steps = 0

        def step_ended(self) -> Window | None:
            self._steps += 1
            watched.append(handles[0].steps)
            return None if self._steps % 5 else Window(100, times[policy_of(handles[0])])

    def proposal(*_: object) -> Any:
        calls.append(0)
        if len(calls) == 2 and fault == "proposal":
            raise ValueError("no plan")
        return proposal_of(module, SPECS)

    with (
        scripted(module, SPECS, times, handles),
        mock.patch.object(uniform_candidates, "candidates", proposal),
        mock.patch.object(watching, "Monitor", ScriptedMonitor),
        mock.patch.object(progress, "REPLAN_STEPS", SOON),
    ):
        model, handle = tuned_handle("ddp", module)
        handles.append(handle)
        check = handle._changes.checked

        def refuses(plan: Any) -> Any:
            if plan.prediction is None and refusals and refusals.pop():
                raise ValueError("no plan")
            return check(plan)

        def look(step: int) -> str:
            if step == STEPS:
                times.update(step_s)
                if fault == "change":
                    handle._changes.checked = refuses
            if '"stage"' in handle.state_dict()["tuning"]:
                settled.append(step)
            return policy_of(handle)

        policies = train(model, module, range(3 * STEPS + 30), look)
    decisions = [(each.step, each.text) for each in handle.decisions]
    handle.close()
    return policies, decisions, watched, settled


def test_when_no_other_plan_is_found_the_plan_from_before_competes_with_plain_steps():
    (policies, decisions, *_), _ = values_of(run_ranks(2, fails_once_running, "proposal", SLOWER))
    texts = [text for _, text in decisions]
    assert "planning anew" in texts[1] and "no plan" in texts[2]
    assert "chosen" in texts[3] and "(four)" in texts[3], "it is still faster than plain steps"
    assert "(eight)" in texts[4] and policies[-1] == "eight", "the next attempt finds a better one"


def test_a_plan_that_cannot_be_left_is_watched_on():
    (policies, decisions, watched, settled), _ = values_of(run_ranks(2, fails_once_running, "change", SLOWER))
    failed_at, text = decisions[2]
    assert "no plan" in text and "the plan that runs now" in text
    attempts = range(failed_at + 1, failed_at + SOON)
    assert {*attempts} <= {*watched}
    assert min(settled) < failed_at and not {*attempts} & {*settled}, "a job that is resumed there tries again, too"
    assert {*policies[STEPS : failed_at + SOON - 1]} == {"four"} and policies[-1] == "eight"
