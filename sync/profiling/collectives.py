"""Measurement of collectives: the engine's own calls, in trains without a pause.

In a training step messages follow each other, and a collective that starts behind another one takes another time than
one alone. So eight calls follow each other, two of them on their way at a time as on a lane. The first two do not
count: they find the link idle. The number of those that count is even, because two that share a link end together.
"""

from __future__ import annotations

import statistics
import threading
from collections import deque
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from ..messages.collectives import bind_hop, bind_payload_collective, bind_raw_collective
from ..messages.exchanges import Exchange
from ..messages.message import DenseMessage, Wait
from ..planner.machines.curves import CollectiveCurve
from ..programs.lanes import IN_FLIGHT
from ..programs.rules import Flow, Site
from ..programs.sizes import wire_ratio
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
from ..resources.links import Link
from .fits import Point, curve_of, middle_mean
from .session import Session
from .stopwatch import Stopwatch

TRAIN, COUNTED = 8, 8 - IN_FLIGHT
BY_USE = (AllReduce, AllGather, AllToAll, Hop, ReduceScatter, Broadcast, Gather, Reduce)
"""The collectives, those of common programs first."""

_ALIGN = 16
_MAX_ROOTS = 8
_SHORT_S, _LONG_S = 0.05, 0.5  # trains that are shorter are measured many times, and longer ones once


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


# -------------------------------------------------------------------- calls


def calls_of(step: Collective, nbytes: int, communicators: Communicators, place: Place, channel: int) -> list[Exchange]:
    """Calls of a collective with ``nbytes`` bytes of data on every rank, to be issued in turns.

    Consecutive calls have different buffers, like those of different messages, and different roots.
    """
    link = communicators.link(0, step.level, channel, place)
    if isinstance(step, AllReduce) and step.level == Level.FLAT and place == Place.DEVICE and channel == 0:
        return [_average(nbytes, communicators) for _ in range(IN_FLIGHT)]
    has_root = isinstance(step, Broadcast | Gather | Reduce)
    roots = range(min(link.ranks, _MAX_ROOTS)) if has_root else [0] * IN_FLIGHT
    return [_bound(step, nbytes, link, communicators, place, root) for root in roots]


def _average(nbytes: int, communicators: Communicators) -> Exchange:
    """The call by which plain gradients are averaged."""
    grad = communicators.places.zeros((nbytes // 4,), torch.float32, Place.DEVICE)
    (stage,) = DenseMessage(grad, (), communicators).stages
    begin = stage.begin
    assert begin is not None

    def issue() -> Wait:
        return begin().wait

    return issue


def _bound(
    step: Collective, nbytes: int, link: Link, communicators: Communicators, place: Place, root: int
) -> Exchange:
    places = communicators.places
    chunk = max(nbytes // link.ranks // _ALIGN, 1) * _ALIGN
    match step:
        case ReduceScatter():
            vector = places.zeros((link.ranks, chunk // 4), torch.float32, place)
            return bind_raw_collective(step, vector, link, root)[1]
        case Reduce():
            return bind_raw_collective(step, places.zeros((nbytes // 4,), torch.float32, place), link, root)[1]
        case Hop():
            return bind_hop(places.zeros((1, 1, nbytes), torch.uint8, place), link)[1]
        case AllToAll():
            buffer = places.zeros((1, link.ranks, chunk), torch.uint8, place)
        case _:
            buffer = places.zeros((1, 1, nbytes), torch.uint8, place)
    return bind_payload_collective(step, buffer, link, root, closes=False, dtype=torch.float32)[1]


def wire_nbytes(step: Collective, nbytes: int, topology: Topology) -> float:
    """The bytes that a rank sends in a call with ``nbytes`` bytes of data."""
    ranks = topology.size(step.level)
    chunk = max(nbytes // ranks // _ALIGN, 1) * _ALIGN
    before = ranks * chunk if isinstance(step, AllToAll | ReduceScatter) else nbytes
    after = chunk if isinstance(step, ReduceScatter) else nbytes
    return wire_ratio(step, Flow(), topology).nbytes(before, after)


def train(calls: Sequence[Exchange], device: torch.device) -> tuple[float, float, float]:
    """Seconds and CPU seconds of a call in a train, and seconds of the whole train."""
    watch = Stopwatch(device)
    waits: deque[Wait] = deque()
    watch.mark()
    for index in range(TRAIN):
        if len(waits) == IN_FLIGHT:
            waits.popleft()()
            watch.mark()
        waits.append(calls[index % len(calls)]())
    for wait in waits:
        wait()
        watch.mark()
    seconds, cores_s = watch.seconds(), watch.cores_s() / TRAIN
    return (seconds[-1] - seconds[-1 - COUNTED]) / COUNTED, cores_s, seconds[-1]


# -------------------------------------------------------------------- curves


def measure_curve(
    session: Session, communicators: Communicators, step: Collective, place: Place
) -> CollectiveCurve | None:
    """The curve of a collective; ``None`` if the budget does not allow one size. Collective.

    Sizes grow by factors of two until a call takes too long. Short trains take turns many times, because their times
    vary most. The slowest rank counts.
    """
    extent, device, budget = session.extent, session.places.memory(place), session.budget
    found: dict[int, list[tuple[float, float]]] = {}

    def measure(nbytes: int, calls: Sequence[Exchange]) -> float:
        """Measure a train; returns its seconds."""
        session.ranks.meet()
        wall_s, cores_s, whole_s = session.ranks.slowest(train(calls, device))
        found.setdefault(nbytes, []).append((wall_s, cores_s))
        return whole_s

    longest_s = min(extent.longest_s, budget.seconds / (20 * TRAIN))
    nbytes, last_s = extent.least_nbytes, 0.0
    short: dict[int, list[Exchange]] = {}
    while nbytes <= extent.largest_nbytes and last_s < TRAIN * longest_s:
        if not budget.allows(2 * last_s):
            session.left_out.append(f"{type(step).__name__} {step.level.value} from {nbytes} bytes: no time")
            break
        calls = calls_of(step, nbytes, communicators, place, 0)
        last_s = measure(nbytes, calls)
        if last_s < _SHORT_S:
            short[nbytes] = calls
        elif last_s < _LONG_S:
            measure(nbytes, calls), measure(nbytes, calls)
        nbytes *= 2
    for _ in range(extent.trains):
        if not budget.allows(sum(TRAIN * found[each][0][0] for each in short)):
            break
        for each, calls in short.items():
            measure(each, calls)
    points = [
        Point(wire_nbytes(step, each, session.topology), *map(middle_mean, zip(*rounds, strict=True)))
        for each, rounds in found.items()
    ]
    return CollectiveCurve(type(step).__name__, step.level, place, curve_of(points)) if points else None


def measure_sharing(session: Session, communicators: Communicators, curve: CollectiveCurve, sizes: int = 3) -> float:
    """The share of a link that one collective can use: two at once on two channels tell it. Collective.

    If each of two takes twice as long as one, the share is 1; if none is slowed down, it is one half.

    Args:
        session: the measurement.
        communicators: links with two channels.
        curve: the curve of an all-gather.
        sizes: number of sizes, the largest ones that were measured except the last.
    """
    device, ranks = session.places.memory(curve.place), session.topology.size(curve.level)
    shares = []
    for wire in curve.curve.nbytes[-1 - sizes : -1] or curve.curve.nbytes:
        nbytes = int(wire) // (ranks - 1)
        channels = [calls_of(AllGather(curve.level), nbytes, communicators, curve.place, each) for each in (0, 1)]
        session.ranks.meet()
        one_s = session.ranks.slowest(train(channels[0], device))[0]
        session.ranks.meet()
        two_s = session.ranks.slowest([statistics.mean(_at_once(channels, device))])[0]
        shares.append(min(max(two_s / (2 * one_s), 0.5), 1.0))
    return max(shares)  # a pause makes a share look smaller


def _at_once(channels: Collection[Sequence[Exchange]], device: torch.device) -> list[float]:
    """Seconds of a call on each channel when all have trains at the same time."""
    seconds: list[float] = []

    def run(calls: Sequence[Exchange]) -> None:
        on_stream: Any = nullcontext()
        if device.type == "cuda":
            on_stream = torch.cuda.stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
        with on_stream:
            seconds.append(train(calls, device)[0])

    threads = [threading.Thread(target=run, args=(calls,)) for calls in channels]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return seconds
