"""Measurement of collectives: curves of seconds over bytes, and the share of a link that one collective can use."""

from __future__ import annotations

import itertools
import random
import statistics
import threading
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from ..messages.exchanges import Exchange
from ..planner.machines.curves import CollectiveCurve
from ..programs.lanes import IN_FLIGHT
from ..programs.rules import Site
from ..programs.steps import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Collective,
    Gather,
    Hop,
    Level,
    Place,
    Reduce,
    ReduceScatter,
)
from ..programs.topology import Topology
from ..resources.communicators import Communicators
from .fits import Point, curve_of, typical
from .session import Session
from .trains import LONG_CALL_S, LONG_TRAIN, TRAIN, calls_of, train, wire_nbytes

BY_USE = (AllReduce, AllGather, AllToAll, Hop, ReduceScatter, Broadcast, Gather, Reduce)
"""The collectives, those of common programs first."""

_SHARING_TURNS = 5  # pairs of trains of a size
_SHARE_OF_LONGEST = 16  # a call may take this part of a curve's time: two trains of such calls take half of it
_TURNS, _CLOSE = 3, 1.03  # turns in which a size is measured until two of its trains agree


def levels_of(topology: Topology) -> tuple[Level, ...]:
    """The levels that differ: all three on several machines with several devices, otherwise one."""
    if topology.machines > 1 and topology.devices > 1:
        return Level.FLAT, Level.INTRA, Level.INTER
    return (Level.FLAT,)


def connect(session: Session) -> Communicators:
    """Links of every level and place, with two channels. Collective."""
    places = (Place.DEVICE, Place.HOST) if session.places.apart else (Place.DEVICE,)
    sites = [Site(0, level, place, exchanges=True) for level in levels_of(session.topology) for place in places]
    return Communicators(session.ranks.group, session.places, session.topology, sites, channels=2)


# -------------------------------------------------------------------- curves


def measure_curve(
    session: Session, communicators: Communicators, step: Collective, place: Place, curve_s: float
) -> CollectiveCurve | None:
    """The curve of a collective; ``None`` if the budget does not allow one size. Collective.

    Sizes grow by factors of two until a call takes too long. Then all of them take turns while the time of the curve
    lasts, so that a process beside the ranks disturbs few trains of each size. The slowest rank counts.

    Args:
        session: the measurement.
        communicators: the links.
        step: the collective.
        place: the memory of the data.
        curve_s: seconds that its sizes share; twice as many while its trains disagree.
    """
    extent, budget = session.extent, session.budget
    sizes = _Sizes(session, communicators, step, place, curve_s)
    longest_s = min(extent.longest_s, curve_s / _SHARE_OF_LONGEST)
    nbytes = extent.least_nbytes
    while nbytes <= extent.largest_nbytes and 2 * sizes.last_s < longest_s:
        if not budget.allows(2 * LONG_TRAIN * sizes.last_s):
            session.left_out.append(f"{type(step).__name__} {step.level.value} from {nbytes} bytes: no time")
            break
        sizes.begin(nbytes)
        nbytes *= 2
    for turn in range(extent.trains):
        if sizes.spent_s > 2 * curve_s or not budget.allows(curve_s / 4):
            break
        if not sizes.measure_in_turn(turn):
            break
    points = sizes.points()
    return CollectiveCurve(type(step).__name__, step.level, place, curve_of(points)) if points else None


class _Sizes:
    """The trains of a collective, by the size of its calls; the same on all ranks.

    Args:
        session: the measurement.
        communicators: the links.
        step: the collective.
        place: the memory of the data.
        curve_s: the seconds that they share.

    Attributes:
        last_s: seconds of a call of the last size that was begun.
    """

    def __init__(
        self, session: Session, communicators: Communicators, step: Collective, place: Place, curve_s: float
    ) -> None:
        self._session, self._communicators, self._step, self._place = session, communicators, step, place
        self._curve_s = curve_s
        self._found: dict[int, list[tuple[float, float]]] = {}
        self._calls: dict[int, list[Exchange]] = {}
        self._spent_s: dict[int, float] = {}
        self.last_s = 0.0

    def begin(self, nbytes: int) -> None:
        """Measure the first train of a size. Its first calls find new buffers and connections."""
        calls = calls_of(self._step, nbytes, self._communicators, self._place, 0)
        length = TRAIN if 2 * self.last_s < LONG_CALL_S else LONG_TRAIN
        self._measure(nbytes, calls, length)
        self.last_s = self._found[nbytes][-1][0]
        if self.last_s < LONG_CALL_S:
            self._calls[nbytes] = calls

    def measure_in_turn(self, turn: int) -> bool:
        """Measure another train of every size that has time left, or of which the trains so far disagree. Small sizes
        vary most, and get most trains. Returns whether there was such a size."""
        share_s = self._curve_s / len(self._found)
        chosen = [
            nbytes
            for nbytes, trains in self._found.items()
            if self._spent_s[nbytes] < share_s or (turn < _TURNS and not _agree([wall_s for wall_s, _ in trains]))
        ]
        random.Random(turn).shuffle(chosen)  # the same on all ranks
        for nbytes in chosen:
            if (calls := self._calls.get(nbytes)) is not None:
                self._measure(nbytes, calls, TRAIN)
            else:
                calls = calls_of(self._step, nbytes, self._communicators, self._place, 0)
                self._measure(nbytes, calls, LONG_TRAIN)
        return bool(chosen)

    @property
    def spent_s(self) -> float:
        """Seconds of all trains."""
        return sum(self._spent_s.values())

    def points(self) -> list[Point]:
        """The typical cost of a call of each size."""
        topology = self._session.topology
        return [
            Point(wire_nbytes(self._step, nbytes, topology), *map(typical, zip(*trains, strict=True)))
            for nbytes, trains in self._found.items()
        ]

    def _measure(self, nbytes: int, calls: Sequence[Exchange], length: int) -> None:
        ranks = self._session.ranks
        ranks.meet()
        wall_s, cores_s, whole_s = ranks.slowest(train(calls, self._session.places.memory(self._place), length))
        self._found.setdefault(nbytes, []).append((wall_s, cores_s))
        self._spent_s[nbytes] = self._spent_s.get(nbytes, 0.0) + whole_s


def _agree(seconds: Sequence[float]) -> bool:
    """Whether two of the times differ by a few percent at most."""
    ordered = sorted(seconds)
    return any(other <= _CLOSE * one for one, other in itertools.pairwise(ordered))


def measure_sharing(session: Session, communicators: Communicators, curve: CollectiveCurve) -> float:
    """The share of a link that one collective can use: two at once on two channels tell it. Collective.

    If two trains at once end after twice the time of one, the share is 1; if they end with it, it is one half. Whole
    trains count, because connections seldom get equal parts of a link: where one is served first, the calls of neither
    seem to be slow. The sizes are the two largest ones whose calls are not long, so that there is time for some trains.

    Args:
        session: the measurement.
        communicators: links with two channels.
        curve: the curve of an all-gather.
    """
    ranks, device = session.ranks, session.places.memory(curve.place)
    shares = []
    for wire, _ in _sharing_sizes(curve):
        nbytes = int(wire) // (session.topology.size(curve.level) - 1)
        channels = [calls_of(AllGather(curve.level), nbytes, communicators, curve.place, each) for each in (0, 1)]
        ranks.meet()
        _at_once(channels, device, IN_FLIGHT)  # buffers and connections are new
        for _ in range(_SHARING_TURNS):
            ranks.meet()
            (one_s,) = ranks.slowest([train(channels[0], device)[2]])
            ranks.meet()
            (two_s,) = ranks.slowest([max(_at_once(channels, device, TRAIN))])
            shares.append(min(max(two_s / (2 * one_s), 0.5), 1.0))
    return statistics.median(shares)


def sharing_s(curve: CollectiveCurve) -> float:
    """The seconds that :func:`measure_sharing` is expected to take."""
    return sum((3 * TRAIN * _SHARING_TURNS + 2 * IN_FLIGHT) * wall_s for _, wall_s in _sharing_sizes(curve))


def _sharing_sizes(curve: CollectiveCurve) -> list[tuple[float, float]]:
    """Bytes and seconds of the calls that share a link."""
    known = list(zip(curve.curve.nbytes, curve.curve.wall_s, strict=True))
    return [each for each in known if each[1] < LONG_CALL_S][-2:] or known[:1]


def _at_once(channels: Collection[Sequence[Exchange]], device: torch.device, length: int) -> list[float]:
    """Seconds of a train on each channel when all have one at the same time."""
    seconds: list[float] = []

    def run(calls: Sequence[Exchange]) -> None:
        on_stream: Any = nullcontext()
        if device.type == "cuda":
            on_stream = torch.cuda.stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
        with on_stream:
            seconds.append(train(calls, device, length)[2])

    threads = [threading.Thread(target=run, args=(calls,)) for calls in channels]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return seconds
