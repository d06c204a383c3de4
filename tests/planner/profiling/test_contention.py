"""Losses of a backward: the simulation loses as much as was measured, within limits against other processes."""

from __future__ import annotations

import pytest

from gckernels.planner.profiling.measurements.contention import LARGEST, LEAST, agreed_taken, taken_of
from gckernels.planner.timeline.simulator import Need, SimulatedTask, simulate


@pytest.mark.parametrize("cores", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("lost", [0.6, 0.9])
def test_a_simulated_backward_loses_what_was_measured(cores, lost):
    alone_s, cores_s = 2.0, 1.8 * cores
    taken = taken_of(lost * alone_s, alone_s, cores_s, cores)
    assert LEAST < taken < LARGEST
    backward = Need(0.0, 10.0, {"cores": min(1.0, cores)})
    beside = Need(0.0, alone_s, {"cores": taken * cores_s / alone_s})
    ends = simulate([SimulatedTask(0, backward), SimulatedTask(1, beside)], (1, 1), {"cores": cores}).end_s
    assert ends[0] == pytest.approx(10.0 + lost * alone_s)


def test_rounds_on_a_loaded_machine_agree_and_disturbed_ones_say_nothing():
    """Seven of eight backwards have something beside them, which takes its CPU seconds from them."""
    quiet = [(8.0, 8.0 + 7 * 0.5)] * 4
    assert agreed_taken(quiet, 0.5, 0.5, 1.0) == pytest.approx(1.0)
    once = [*quiet, (8.0, 80.0)]
    assert agreed_taken(once, 0.5, 0.5, 1.0) == pytest.approx(1.0)
    disturbed = [(8.0, 8.5), (8.0, 13.0), (9.0, 10.0), (8.0, 20.0)]
    assert agreed_taken(disturbed, 0.5, 0.5, 1.0) is None


def test_many_rounds_that_vary_say_as_much_as_a_few_that_agree():
    varying = [(8.0, 8.0 + 7 * lost_s) for lost_s in (0.25, 0.45, 0.55, 0.85)]
    assert agreed_taken(varying[:2] + varying[2:], 0.5, 0.5, 1.0) == pytest.approx(1.0)
    wide = [(8.0, 8.0 + 7 * lost_s) for lost_s in (0.15, 0.3, 0.7, 0.9)]
    assert agreed_taken(wide, 0.5, 0.5, 1.0) is None
    assert agreed_taken(wide * 4, 0.5, 0.5, 1.0) == pytest.approx(1.0)


def test_rounds_beyond_a_limit_agree_though_they_lose_different_times():
    crowded = [(8.0, 8.0 + 7 * lost_s) for lost_s in (1.9, 2.2, 3.0, 5.0)]
    assert agreed_taken(crowded, 0.5, 0.5, 0.5) == pytest.approx(LARGEST)
    idle = [(8.0, 8.0 + 7 * lost_s) for lost_s in (-2.0, -1.0, 0.1, 0.2)]
    assert agreed_taken(idle, 0.5, 0.5, 1.0) == LEAST


def test_nothing_is_lost_to_cores_that_are_spare():
    assert taken_of(0.01, 1.0, 0.8, cores=4.0) == 1.0
    assert taken_of(-0.3, 1.0, 0.8, cores=4.0) == 1.0


def test_disturbed_measurements_stay_within_limits():
    assert taken_of(100.0, 1.0, 0.8, cores=1.0) == LARGEST
    assert taken_of(-0.3, 1.0, 0.8, cores=1.0) == LEAST
    assert taken_of(0.1, 1.0, 0.0, cores=1.0) == LARGEST


def test_a_device_loses_time_and_at_most_that_of_what_runs_beside():
    assert taken_of(0.25, 1.0, 0.1, cores=None) == pytest.approx(0.25)
    assert taken_of(3.0, 1.0, 0.1, cores=None) == 1.0
    assert taken_of(-1.0, 1.0, 0.1, cores=None) == 0.0
