"""A tuned training that changes: links become slower, compression no longer pays, errors leave their class."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import pytest

from gckernels.sync.accuracy.accuracy import Accuracy
from gckernels.sync.frontends.ddp.reducer import comm_hook
from gckernels.sync.tuning.trials.rules import STEPS
from gckernels.sync.tuning.watching import monitor, watching
from gckernels.sync.tuning.watching.monitor import Monitor, Window
from gckernels.sync.tuning.watching.pace import WINDOW
from models import build
from ranks import run_ranks, values_of
from tunings import PLAIN, policy_of, scripted, train, tuned_handle
from workloads import digest_of

SPECS = {"four": "BlockQuant(bits=4)", "eight": "BlockQuant"}
EVERY = 5
"""Steps between two windows in these tests."""


def changed(front: str, before: dict[str, float], after: dict[str, float], steps: int, **options: Any) -> Any:
    """The plans of a training whose steps take other times from the end of its trials on, and what it has decided."""
    module, handles, step_s = build("Mlp"), [], dict(before)

    class ScriptedMonitor:
        """Windows of the scripted times."""

        def __init__(self, *_: object) -> None:
            self._steps = 0

        def step_ended(self) -> Window | None:
            self._steps += 1
            return None if self._steps % EVERY else Window(WINDOW, (step_s[policy_of(handles[0])],) * WINDOW)

    with (
        scripted(module, SPECS, step_s, handles),
        mock.patch.object(watching, "Monitor", ScriptedMonitor),
    ):
        model, handle = tuned_handle(front, module, **options)
        handles.append(handle)

        def look(step: int) -> tuple[str, str]:
            if step == STEPS:
                step_s.update(after)
            return policy_of(handle), digest_of(parameter.grad for parameter in module.parameters())

        seen = train(model, module, range(steps), look)
    hooked = front == "ddp" and comm_hook(model) is not None
    result = seen, [each.text for each in handle.decisions], hooked
    handle.close()
    return result


@pytest.mark.parametrize("front", [pytest.param("ddp", marks=pytest.mark.slow), "module"])
def test_a_slower_network_lets_another_plan_follow(front):
    times = {PLAIN: 1.0, "four": 0.9, "eight": 0.5}, {PLAIN: 9.0, "four": 2.0, "eight": 4.0}
    ranks = values_of(run_ranks(2, changed, front, *times, 2 * STEPS + 20))
    assert ranks[0] == ranks[1]
    steps, texts, _ = ranks[0]
    policies = [policy for policy, _ in steps]
    assert policies[STEPS] == "eight" and policies[-1] == "four"
    assert ["was usual" in text for text in texts] == [False, True]


def test_plain_steps_that_become_slower_let_another_plan_follow():
    times = {PLAIN: 1.0, "four": 1.2, "eight": 1.3}, {PLAIN: 1.4, "four": 0.9, "eight": 1.3}
    ((steps, texts, hooked), _) = values_of(run_ranks(2, changed, "ddp", *times, 2 * STEPS + 40))
    assert steps[STEPS][0] == PLAIN and steps[-1][0] == "four" and hooked
    assert "(+40 %)" in texts[1]


def test_compression_that_no_longer_pays_gives_way_to_plain_steps():
    times = {PLAIN: 1.0, "four": 0.6, "eight": 1.1}, {PLAIN: 0.3, "four": 0.4, "eight": 0.5}
    ((steps, texts, hooked), _) = values_of(run_ranks(2, changed, "ddp", *times, 4 * STEPS))
    assert steps[STEPS][0] == "four" and steps[-1][0] == PLAIN and not hooked  # a plain step shows DDP's buckets
    assert "none" in texts[1].partition("chosen")[2] and len(texts) == 2


def test_a_milder_plan_is_found_although_plain_steps_are_known_to_be_better():
    times = {PLAIN: 1.0, "four": 0.6, "eight": 1.2}, {PLAIN: 2.0, "four": 1.9, "eight": 1.0}
    ((steps, texts, _), _) = values_of(run_ranks(2, changed, "module", *times, 9 * STEPS))
    assert steps[STEPS][0] == "four" and steps[-1][0] == "eight"
    assert "plans were compared again" in texts[-1]


def test_without_replanning_nothing_is_watched():
    times = {PLAIN: 1.0, "four": 0.9, "eight": 0.5}, {PLAIN: 0.1, "eight": 9.0}
    ((steps, texts, _), _) = values_of(run_ranks(2, unwatched, *times))
    assert steps[-1][0] == "eight" and len(texts) == 1


def unwatched(before: dict[str, float], after: dict[str, float]) -> Any:
    return changed("ddp", before, after, STEPS + 30, replan=False)


# -------------------------------------------------------------------- errors


def refined(front: str) -> Any:
    """The compressors of a training in which the errors of 4-bit blocks count as too large."""
    module, handles = build("Mlp"), []
    step_s = {PLAIN: 1.0, "four": 0.5, "eight": 0.7}
    with (
        scripted(module, SPECS, step_s, handles),
        mock.patch.object(watching, "Monitor", functools.partial(Monitor, window=EVERY)),
        mock.patch.object(monitor, "READ_EVERY", 1),
        mock.patch.object(Accuracy, "limit_of", lambda *_: 0.05),
    ):
        model, handle = tuned_handle(front, module, accuracy=list(SPECS.values()))
        handles.append(handle)

        def look(step: int) -> tuple[list[str], str]:
            units = [str(unit.compressor) for unit in handle.plan.units]
            return units, digest_of(parameter.grad for parameter in module.parameters())

        seen = train(model, module, range(STEPS + 10 * EVERY), look)
    result = seen, [each.text for each in handle.decisions], handle.stats().get("error")
    handle.close()
    return result


@pytest.mark.host_only("windows of steps end later on a device")
@pytest.mark.parametrize("front", ["ddp", pytest.param("module", marks=pytest.mark.slow)])
def test_units_whose_errors_are_too_large_get_a_finer_compressor(front):
    ranks = values_of(run_ranks(2, refined, front))
    assert [(seen, texts) for seen, texts, _ in ranks[:1]] == [(seen, texts) for seen, texts, _ in ranks[1:]]
    seen, texts, error = ranks[0]
    assert "(four)" in texts[0], "the winner of the trials"
    assert not any("bits=4" in name for name in seen[-1][0]) and any("bits=8" in name for name in seen[-1][0])
    assert any("0.05 are allowed" in text for text in texts)
    assert error is not None and error < 0.05
