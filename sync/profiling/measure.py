"""The measurement of a profile: its parts, the most informative ones first."""

from __future__ import annotations

import datetime
import json
import platform
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

import gckernels
from gckernels.compressor import Compressor

from ..communication.collectives import exchange_text
from ..communication.cores import Cores, running_s
from ..communication.ranks import Budget, Clock, Ranks, TimedRanks
from ..planner.machines.files import profile_from_json, profile_to_json
from ..planner.machines.machine import Shared
from ..planner.machines.profile import Profile, Stamp
from ..programs.steps import AllGather, AllReduce, AllToAll, Place
from ..programs.topology import Topology
from ..resources.memory_spaces import Places
from .measurements.collective_trains import doubt_slow
from .measurements.collectives import BY_USE, connect, levels_of
from .measurements.memory import Arena, far_nbytes, rank_nbytes
from .measurements.session import MeasurementExtent, Session
from .parts import BETWEEN, BOTH_ENDS, Parts

_FIRST, _SECOND = (AllReduce, AllGather), (AllToAll,)
_USUAL = 8
"""Compressors that are measured between collectives. More of them come when nothing else is left but adding."""


def measure_profile(
    group: dist.ProcessGroup,
    device: torch.device,
    topology: Topology,
    compressors: Sequence[Compressor],
    seconds: float,
    extent: MeasurementExtent | None = None,
    progress: Callable[[float, str], object] = lambda share, name: None,
    clock: Clock = time.monotonic,
) -> Profile:
    """A new profile, the same on all ranks. Collective.

    Args:
        group: all ranks.
        device: the device of the gradients.
        topology: topology of the ranks.
        compressors: the compressors to measure, before they are fitted to a shape.
        seconds: the budget.
        extent: how much is measured; by default as much as the budget suggests.
        progress: called with the share of the budget that is spent, and the name of the part that begins.
        clock: returns seconds.
    """
    untimed = Ranks(group, device)
    budget = Budget(seconds, untimed, clock)
    ranks = TimedRanks(group, device, lambda: budget.is_over)
    cores = Cores.of(group, device)
    session = Session(
        ranks,
        budget,
        Places.of(device),
        topology,
        extent or MeasurementExtent.of(seconds),
        progress,
        lambda: running_s() * cores.slowdown,
    )
    hosts = tuple(exchange_text(group, device, platform.node()))
    memory_nbytes = -untimed.slowest([-rank_nbytes(device, hosts.count(platform.node()))])[0]  # the least
    communicators = connect(session)
    found = Parts(session, communicators, cores.least)
    try:
        _measure(found, compressors)
    finally:
        communicators.close()
    stamp = Stamp(
        hosts=hosts,
        device=device_name(device),
        backend=dist.get_backend(group),
        torch=torch.__version__,
        gckernels=gckernels.__version__,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        seconds=round(budget.spent_s, 1),
    )
    profile = Profile(
        name=f"{topology.machines} x {topology.devices} ranks on {hosts[0]}, {stamp.backend}",
        topology=topology,
        computes_on=Shared.DEVICE if session.places.apart else Shared.CORES,
        cores=cores.least,
        overheads=found.overheads,
        collectives=tuple(found.collectives),
        codecs=tuple(found.codecs),
        copies=tuple(found.copies),
        sharing=found.sharing,
        taken=found.taken,
        left_out=tuple(session.left_out),
        stamp=stamp,
        memory_nbytes=memory_nbytes,
    )
    return _of_first(ranks, profile)


def device_name(device: torch.device) -> str:
    """The name of a device, for people and for finding profiles."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"


def _of_first(ranks: Ranks, profile: Profile) -> Profile:
    """The profile of rank 0, whose clock has decided what to leave out."""
    return profile_from_json(json.loads(ranks.first_text(json.dumps(profile_to_json(profile)))))


def _measure(parts: Parts, compressors: Sequence[Compressor]) -> None:
    """Measure everything in the order of its use, as long as the budget allows.

    Prices that most plans need are measured twice, with other measurements in between. The slow-down of backward comes
    after all prices that every plan needs: without it, plans are predicted to be too fast by a part of what they hide,
    but without the price of a compressor its plans are compared by chance. Adding comes last: few plans add, and
    without its price those of decoding and encoding say much the same.
    """
    session = parts.session
    extent, levels = session.extent, levels_of(session.topology)
    parts.measure_overheads()
    parts.measure_collectives([kind(levels[0]) for kind in _FIRST])  # most plans
    most = max(extent.elements + tuple(elements for _, elements in extent.many))
    arena = Arena(session.places.device, most, far_nbytes(session.places.device, extent.far_caches))
    parts.measure_copies(arena)  # short, and every plan needs their price
    usual, more = compressors[:_USUAL], compressors[_USUAL:]
    half = -(-len(usual) // 2)
    parts.measure_codecs(arena, usual[:half], BOTH_ENDS)
    parts.measure_collectives([kind(levels[0]) for kind in _SECOND])
    parts.measure_codecs(arena, usual[half:], BOTH_ENDS)
    parts.measure_again()
    parts.measure_beside_collectives()
    parts.measure_beside_codecs(arena)
    parts.measure_sharing(levels[:1])
    parts.measure_collectives([kind(level) for level in levels[1:] for kind in _FIRST + _SECOND])
    parts.measure_sharing(levels[1:])
    parts.measure_again()
    parts.measure_collectives([kind(level) for kind in BY_USE if kind not in _FIRST + _SECOND for level in levels])
    recoding, adding = BETWEEN
    parts.measure_codecs(arena, usual, recoding)
    if session.places.apart:
        parts.measure_collectives([kind(level) for kind in BY_USE for level in levels], Place.HOST)
        on_host_arena = Arena(session.places.host, most, far_nbytes(session.places.host, extent.far_caches))
        for works in (BOTH_ENDS, *BETWEEN):
            parts.measure_codecs(on_host_arena, usual, works, Place.HOST)
    doubt_slow(parts.trains)
    parts.measure_again()
    session.left_out += [f"{each} at another moment: no time" for each in parts.trains if each.moments == 1]
    for method in more:
        parts.measure_whole_codec(arena, method)
    parts.measure_codecs(arena, usual, adding)
