"""Times of a trace: medians of the slowest rank, without the time that other programs had the cores."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from gckernels.sync.tracing.combining import RecordingRanks, _source, _times
from gckernels.sync.tracing.watch import NOT_READY, StepTimes, WatchedStep

ALONE = RecordingRanks(None, 1, torch.device("cpu"))


def step(waiting_s: float, ready_s: Sequence[float] = (0.1, 0.3)) -> WatchedStep:
    """A step of forward 0.2 s and optimizer 0.05 s, in each part of which the thread has waited for a core besides."""
    waits = [NOT_READY if each < 0 else waiting_s for each in ready_s]
    elapsed = [NOT_READY if each < 0 else each + waiting_s for each in ready_s]
    return WatchedStep(StepTimes(0.2 + waiting_s, elapsed, 0.05 + waiting_s), StepTimes(waiting_s, waits, waiting_s))


STEPS = [step(0.0), step(0.4), step(0.3), step(0.4), step(0.0)]


def test_time_in_which_other_programs_had_the_cores_is_left_out():
    forward_s, optimizer_s, ready_s, excluded = _times(["a", "b"], STEPS, ALONE, True)
    assert (forward_s, optimizer_s) == pytest.approx((0.2, 0.05))
    assert ready_s == pytest.approx({"a": 0.1, "b": 0.3})
    assert excluded == pytest.approx(3 * 1.1 / (5 * 0.55 + 3 * 1.1))
    assert f"without the {excluded:.0%} of the time" in _source(5, ALONE, excluded)


def test_ranks_without_enough_cores_take_the_time_that_they_take():
    """They wait for each other's cores in every step."""
    forward_s, optimizer_s, ready_s, excluded = _times(["a", "b"], STEPS, ALONE, False)
    assert (forward_s, optimizer_s, excluded) == (pytest.approx(0.5), pytest.approx(0.35), 0.0)
    assert ready_s == pytest.approx({"a": 0.4, "b": 0.6}) and "without" not in _source(5, ALONE, excluded)


def test_gradients_that_a_step_does_not_have_are_not_counted():
    steps = [step(0.4, (0.1, NOT_READY)), step(0.0, (0.1, 0.3)), step(0.2, (0.2, NOT_READY))]
    *_, ready_s, _ = _times(["a", "b"], steps, ALONE, True)
    assert ready_s == pytest.approx({"a": 0.1, "b": 0.3})
    *_, nothing_s, excluded = _times(["a"], [step(0.2, (NOT_READY,))], ALONE, True)
    assert nothing_s == {"a": 0.0} and 0 < excluded < 1
