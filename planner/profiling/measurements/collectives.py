"""The collectives that are measured, in trains, their links, and the share of a link that one of them can use.

A train is the engine's own calls, one after the other without a pause. In a training step messages follow each other,
and a collective that starts behind another one takes another time than one alone. So some calls follow each other, two
of them on their way at a time as on a lane. Six of them count, or two long ones. The first two do not: they find the
link idle. The last one does not either. It is on its way while those that count end, as the third one is when the
second ends: so as much is sent as they send. The number of those that count is even, because two that share a link end
together.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import torch

from gckernels.devices import is_accelerator, new_stream, on_stream
from gckernels.sync.communication.communicators import Communicators
from gckernels.sync.communication.links import RankConnections
from gckernels.sync.messages.collectives import bind_collective
from gckernels.sync.messages.message import DenseMessage
from gckernels.sync.programs.lanes import IN_FLIGHT
from gckernels.sync.programs.rules import START, Site
from gckernels.sync.programs.sizes import wire_ratio
from gckernels.sync.programs.steps import (
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
from gckernels.sync.programs.topology import Topology
from gckernels.sync.resources.stage import Issue, Wait

from ...machines.curves import CollectiveCurve
from .session import Session, Stopwatch

BY_USE = (AllReduce, AllGather, AllToAll, Hop, ReduceScatter, Broadcast, Gather, Reduce)
"""The collectives, those of common programs first."""

TRAIN, LONG_TRAIN = 9, 5
"""The calls of a train, and those of a train of long calls: three more than count."""
LONG_CALL_S = 0.02
"""Calls that take longer have shorter trains."""

_ALIGN = 16
_MAX_ROOTS = 8
_SHARING_TURNS = 5  # pairs of trains of a size


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


def measure_sharing(session: Session, communicators: Communicators, curve: CollectiveCurve) -> float:
    """The share of a link that one collective can use, found by running two at once on two channels. Collective.

    If two trains at once end after twice the time of one, the share is 1; if they end with it, it is one half. Whole
    trains count, because connections seldom get equal parts of a link: where one is served first, the calls of neither
    seem to be slow. The sizes are the two largest ones whose calls are not long, so that there is time for some trains.

    Args:
        session: the measurement.
        communicators: links with two channels.
        curve: the curve of an all-gather.
    """
    ranks, device = session.ranks, session.places.memory(curve.place)
    known = list(zip(curve.curve.nbytes, curve.curve.wall_s, strict=True))
    shares = []
    for wire, _ in [each for each in known if each[1] < LONG_CALL_S][-2:] or known[:1]:
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


def _at_once(channels: Collection[Sequence[Issue]], device: torch.device, length: int) -> list[float]:
    """Seconds of a train on each channel when all have one at the same time."""

    def run(calls: Sequence[Issue]) -> float:
        context: Any = nullcontext()
        if is_accelerator(device):
            context = on_stream(new_stream(device))
        with context:
            return train(calls, device, length)[2]

    with ThreadPoolExecutor(len(channels)) as pool:
        return list(pool.map(run, channels))


# -------------------------------------------------------------------- trains


def calls_of(step: Collective, nbytes: int, communicators: Communicators, place: Place, channel: int) -> list[Issue]:
    """Calls of a collective with ``nbytes`` bytes of data on every rank, to be issued in turns.

    Consecutive calls have different buffers, like those of different messages, and different roots.
    """
    link = communicators.link(0, step.level, channel, place)
    if isinstance(step, AllReduce) and step.level == Level.FLAT and place == Place.DEVICE and channel == 0:
        return [_average(nbytes, communicators) for _ in range(IN_FLIGHT)]
    has_root = isinstance(step, Broadcast | Gather | Reduce)
    roots = range(min(link.ranks, _MAX_ROOTS)) if has_root else [0] * IN_FLIGHT
    return [_bound(step, nbytes, link, communicators, place, root) for root in roots]


def _average(nbytes: int, communicators: Communicators) -> Issue:
    """The call by which plain gradients are averaged."""
    grad = communicators.places.zeros((nbytes // 4,), torch.float32, Place.DEVICE)
    (stage,) = DenseMessage(grad, (), communicators).stages
    begin = stage.begin
    assert begin is not None

    def issue() -> Wait:
        return begin().wait

    return issue


def _bound(
    step: Collective, nbytes: int, link: RankConnections, communicators: Communicators, place: Place, root: int
) -> Issue:
    places = communicators.places
    chunk = max(nbytes // link.ranks // _ALIGN, 1) * _ALIGN
    match step:
        case ReduceScatter():
            sent = places.zeros((1, link.ranks, chunk // 4), torch.float32, place)
        case Reduce():
            sent = places.zeros((1, 1, nbytes // 4), torch.float32, place)
        case AllToAll():
            sent = places.zeros((1, link.ranks, chunk), torch.uint8, place)
        case _:
            sent = places.zeros((1, 1, nbytes), torch.uint8, place)

    def new(shape: Sequence[int]) -> torch.Tensor:
        return places.zeros(shape, sent.dtype, place)

    return bind_collective(step, sent, link, root, closes=False, dtype=torch.float32, new=new)[1]


def wire_nbytes(step: Collective, nbytes: int, topology: Topology) -> float:
    """The bytes that a rank sends in a call with ``nbytes`` bytes of data."""
    ranks = topology.size(step.level)
    chunk = max(nbytes // ranks // _ALIGN, 1) * _ALIGN
    before = ranks * chunk if isinstance(step, AllToAll | ReduceScatter) else nbytes
    after = chunk if isinstance(step, ReduceScatter) else nbytes
    return wire_ratio(step, START, topology).nbytes(before, after)


def train(calls: Sequence[Issue], device: torch.device, length: int = TRAIN) -> tuple[float, float, float]:
    """Seconds and CPU seconds of a call in a train of ``length`` calls, and seconds of the whole train."""
    watch = Stopwatch(device)
    waits: deque[Wait] = deque()
    watch.mark()
    for index in range(length):
        if len(waits) == IN_FLIGHT:
            waits.popleft()()
            watch.mark()
        waits.append(calls[index % len(calls)]())
    for wait in waits:
        wait()
        watch.mark()
    seconds, cores_s = watch.seconds(), watch.cores_s() / length
    return (seconds[-2] - seconds[IN_FLIGHT]) / (length - IN_FLIGHT - 1), cores_s, seconds[-1]
