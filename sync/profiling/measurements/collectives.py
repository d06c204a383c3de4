"""The collectives that are measured, their links, and the share of a link that one of them can use."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import torch

from ...communication.communicators import Communicators
from ...planner.machines.curves import CollectiveCurve
from ...programs.lanes import IN_FLIGHT
from ...programs.rules import Site
from ...programs.steps import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Gather,
    Hop,
    Level,
    Place,
    Reduce,
    ReduceScatter,
)
from ...programs.topology import Topology
from ...resources.stage import Issue
from .session import Session
from .trains import LONG_CALL_S, TRAIN, calls_of, train

BY_USE = (AllReduce, AllGather, AllToAll, Hop, ReduceScatter, Broadcast, Gather, Reduce)
"""The collectives, those of common programs first."""

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
        on_stream: Any = nullcontext()
        if device.type == "cuda":
            on_stream = torch.cuda.stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
        with on_stream:
            return train(calls, device, length)[2]

    with ThreadPoolExecutor(len(channels)) as pool:
        return list(pool.map(run, channels))
