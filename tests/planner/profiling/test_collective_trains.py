"""Trains of collectives at several moments, of which some are disturbed, on a simulated link."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gckernels.planner.profiling.measurements import collective_trains
from gckernels.planner.profiling.measurements.collective_trains import CollectiveTrains
from gckernels.planner.profiling.measurements.collectives import LONG_CALL_S, LONG_TRAIN
from gckernels.planner.profiling.measurements.session import MeasurementExtent
from gckernels.sync import Topology
from gckernels.sync.programs import AllReduce, Broadcast, Place
from gckernels.sync.programs.steps import Collective

LATENCY_S, NBYTES_PER_S = 2e-4, 25e6
MI = 1 << 20
AVERAGE = AllReduce()


class Link:
    """A link on which trains take the time of a clock that only they advance.

    Attributes:
        now_s: the time.
        until_s: when the time is spent.
        slow: from when until when everything takes twice as long.
        left_out: what was not measured.
        begun_s: when the first train of each size began.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, until_s: float, slow: tuple[float, float]) -> None:
        self.now_s, self.until_s, self.slow = 0.0, until_s, slow
        self.left_out: list[str] = []
        self.begun_s: dict[int, float] = {}
        monkeypatch.setattr(collective_trains, "calls_of", lambda step, nbytes, *_: nbytes)
        monkeypatch.setattr(collective_trains, "train", self._train)

    def trains(self, step: Collective = AVERAGE) -> CollectiveTrains:
        """The trains of a collective between two ranks that sends the bytes of its data."""
        session: Any = SimpleNamespace(
            extent=MeasurementExtent(),
            left_s=lambda: max(self.until_s - self.now_s, 0.0),
            ranks=SimpleNamespace(meet=lambda: None, slowest=list),
            places=SimpleNamespace(memory=lambda place: None),
            topology=Topology(2),
            left_out=self.left_out,
        )
        return CollectiveTrains(session, Any, step, Place.DEVICE, 2.5)

    def _train(self, nbytes: int, device: object, length: int) -> tuple[float, float, float]:
        self.begun_s.setdefault(nbytes, self.now_s)
        call_s = (LATENCY_S + nbytes / NBYTES_PER_S) * (2.0 if self.slow[0] <= self.now_s < self.slow[1] else 1.0)
        self.now_s += length * call_s
        return call_s, call_s / 10, length * call_s

    def in_two_modes(self, nbytes: int, device: object, length: int) -> tuple[float, float, float]:
        """A train that takes the time of a quiet link, or twice as long, in turn."""
        self.slow = (0.0, self.slow[1] + 99.0) if not self.slow[1] else (0.0, 0.0)
        return self._train(nbytes, device, length)


def with_disturbed_end(monkeypatch: pytest.MonkeyPatch) -> Link:
    """A link that is slow for the first train of the largest size alone."""
    quiet = Link(monkeypatch, 60.0, (0.0, 0.0))
    quiet.trains().begin()
    last_s = quiet.begun_s[2 * MI]
    return Link(monkeypatch, 60.0, (last_s - 1e-3, last_s + 1e-3))


def seconds_of(nbytes: float) -> float:
    return LATENCY_S + nbytes / NBYTES_PER_S


def test_a_quiet_link_needs_two_moments(monkeypatch):
    link = Link(monkeypatch, 60.0, (0.0, 0.0))
    trains = link.trains()
    trains.begin()
    assert trains.disputed and link.now_s < 2.0
    trains.again()
    assert not trains.disputed and link.now_s < 3.5
    curve = trains.curve.curve
    assert curve.error == pytest.approx(0.0, abs=1e-9) and len(curve.nbytes) > 10
    assert float(curve.wall(np.array([32.0 * MI]))[0]) == pytest.approx(seconds_of(32 * MI))


@pytest.mark.parametrize("slow", [(0.8, 5.0), (0.0, 5.0), (5.5, 99.0)])
def test_a_moment_that_is_disturbed_for_a_while_does_not_count(monkeypatch, slow):
    """All trains of the large sizes agree with each other, although they take twice as long."""
    link = Link(monkeypatch, 60.0, slow)
    trains = link.trains()
    trains.begin()
    link.now_s = max(link.now_s, 5.5)
    trains.again()
    curve = trains.curve.curve
    assert float(curve.wall(np.array([32.0 * MI]))[0]) == pytest.approx(seconds_of(32 * MI), rel=1e-6)


def test_sizes_of_which_two_moments_disagree_are_measured_at_a_third_one(monkeypatch):
    link = with_disturbed_end(monkeypatch)
    trains = link.trains()
    trains.begin()
    trains.again()
    disputed = trains.disputed
    assert disputed == [2 * MI]
    before_s = link.now_s
    trains.again()
    assert not trains.disputed
    assert link.now_s - before_s == pytest.approx(LONG_TRAIN * seconds_of(2 * MI))


def test_a_disturbed_last_size_without_another_moment_is_refused(monkeypatch):
    link = with_disturbed_end(monkeypatch)
    trains = link.trains()
    trains.begin()
    error = trains.curve.curve.error
    assert error is not None and error > 0.2


def test_every_size_is_measured_at_every_moment_that_has_begun(monkeypatch):
    """However little time is left when it begins."""
    link = Link(monkeypatch, 60.0, (0.0, 0.0))
    trains = link.trains()
    trains.begin()
    link.until_s = link.now_s
    before_s = link.now_s
    trains.again()
    assert not trains.disputed and link.now_s - before_s < 1.0
    assert trains.curve.curve.error == pytest.approx(0.0, abs=1e-9)


def test_a_curve_that_has_hardly_begun_is_left_out(monkeypatch):
    """A straight line through one size would give a price for the whole network."""
    link = Link(monkeypatch, 0.003, (0.0, 0.0))
    trains = link.trains()
    trains.begin()
    assert trains.curve is None
    assert link.left_out == ["AllReduce flat: no time"]
    link = Link(monkeypatch, 0.3, (0.0, 0.0))
    trains = link.trains()
    trains.begin()
    assert trains.curve is not None
    assert any("AllReduce flat from" in each for each in link.left_out)


def test_calls_with_roots_are_short_and_averaged_over_trains(monkeypatch):
    """Each train takes the shorter or the longer of two times by chance."""
    link = Link(monkeypatch, 60.0, (0.0, 0.0))
    monkeypatch.setattr(collective_trains, "train", lambda *given: link.in_two_modes(*given))
    trains = link.trains(Broadcast())
    trains.begin()
    trains.again()
    curve = trains.curve.curve
    assert curve.wall_s[-1] < LONG_CALL_S
    assert curve.error is not None and curve.error < 0.2
    expected = [1.5 * seconds_of(2 * nbytes) for nbytes in curve.nbytes]  # half of the data is on the wire of a rank
    assert list(curve.wall_s) == pytest.approx(expected, rel=0.2)
