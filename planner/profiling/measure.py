"""The measurement of a profile: the function that users call checks what it is given, and measures."""

from __future__ import annotations

import datetime
import json
import math
import platform
import time
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist

import gckernels
from gckernels.compressor import Compressor
from gckernels.devices import is_accelerator, name_of
from gckernels.sync.accuracy.accuracy import candidates_by_default
from gckernels.sync.communication.agreement import agreed
from gckernels.sync.communication.collectives import device_of_group, exchange_text
from gckernels.sync.communication.cores import Cores, running_s
from gckernels.sync.communication.ranks import Ranks
from gckernels.sync.plans.arguments import as_method, as_topology
from gckernels.sync.programs.topology import Topology
from gckernels.sync.resources.memory_spaces import Places

from ..machines.files import profile_from_json
from ..machines.machine import Shared
from ..machines.profile import Profile, Stamp
from .measurements.collectives import connect
from .measurements.memory import rank_nbytes
from .measurements.overheads import load_ddp
from .measurements.session import MeasurementExtent, Session
from .parts import Parts

USUAL_COMPRESSORS = (
    "Identity",
    "BlockQuant(bits=4)",
    "BlockQuant",
    "Cast16",
    "EFSignSGD",
    "PowerSGD",
    "ChunkTopK",
    "TopK",
    "BlockFP8",
    "LinearQuant",
)
"""The first compressors of a profile that names none, in the order of their measurement. All others follow."""


def profile(
    seconds: float = 60.0,
    compressors: Iterable[Compressor | str] | None = None,
    process_group: dist.ProcessGroup | None = None,
    topology: Topology | tuple[int, int] | None = None,
    progress: Callable[[float, str], object] = lambda share, name: None,
) -> Profile:
    """A measured profile of these ranks, the same on all of them. Every rank calls this with the same arguments.

    The most informative parts come first. When the seconds are spent, the rest is left out, and ``left_out`` says what.
    Nothing else should run meanwhile.

    Args:
        seconds: the time that the measurement may take, from 1 up. It may end a little later.
        compressors: compressors such as ``EFSignSGD()``, or their specs such as ``"BlockQuant(bits=4)"``; by default
            all, the usual ones first. ``Identity`` is measured in any case, because vectors are sent exactly.
        process_group: the ranks; by default all.
        topology: the machines and the devices of each, or a pair ``(machines, devices)``. By default every rank counts
            as a machine, as in plans.
        progress: called on every rank with the share of the time that is spent and the name of the part that begins.

    Returns:
        The profile, a machine for the planner. Measurements that disagree with themselves are in ``bad``.

    Raises:
        RuntimeError: ``torch.distributed`` is not initialised, or the ranks have different arguments.
        TypeError, ValueError: an argument is wrong, or there is only one rank.
    """
    if not dist.is_initialized():
        raise RuntimeError("profile: torch.distributed is not initialised; call init_process_group first")
    group = process_group or dist.distributed_c10d._get_default_group()
    device = device_of_group(group)

    def check() -> tuple[tuple[list[Compressor], Topology], Sequence[str]]:
        methods = _methods(compressors)
        chosen = _topology(topology, dist.get_world_size(group))
        if not isinstance(seconds, int | float) or not math.isfinite(seconds) or seconds < 1:
            raise ValueError(f"profile: seconds must be a number from 1 up, got {seconds!r}")
        return (methods, chosen), [f"{seconds} s, {chosen}", *map(str, methods)]

    methods, chosen = agreed("profile", group, device, check)
    return measure_profile(group, device, chosen, methods, seconds, MeasurementExtent.of(seconds), progress)


def measure_profile(
    group: dist.ProcessGroup,
    device: torch.device,
    topology: Topology,
    compressors: Sequence[Compressor],
    seconds: float,
    extent: MeasurementExtent,
    progress: Callable[[float, str], object],
    now: Callable[[], float] = time.monotonic,
) -> Profile:
    """A new profile, the same on all ranks. Collective.

    Args:
        group: all ranks.
        device: the device of the gradients.
        topology: topology of the ranks.
        compressors: the compressors to measure, before they are fitted to a shape.
        seconds, progress: as for :func:`profile`.
        extent: how much is measured.
        now: returns the seconds of a clock.
    """
    cores, ranks = Cores.of(group, device), Ranks(group, device)
    load_ddp(group, device)
    hosts = tuple(exchange_text(group, device, platform.node()))
    memory_nbytes = -ranks.slowest([-rank_nbytes(device, hosts.count(platform.node()))])[0]  # the least
    session = Session(
        ranks, seconds, Places.of(device), topology, extent, progress, lambda: running_s() * cores.slowdown, now
    )
    communicators = connect(session)
    found = Parts(session, communicators, cores.least)
    try:
        found.measure(compressors)
    finally:
        communicators.close()
    stamp = Stamp(
        hosts=hosts,
        device=name_of(device) if is_accelerator(device) else f"cpu, {torch.get_num_threads()} threads",
        backend=dist.get_backend(group),
        torch=torch.__version__,
        gckernels=gckernels.__version__,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        seconds=round(session.spent_s, 1),
    )
    made = Profile(
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
        left_out=tuple(dict.fromkeys(session.left_out)),
        stamp=stamp,
        memory_nbytes=memory_nbytes,
    )
    return profile_from_json(json.loads(ranks.first_text(json.dumps(made.to_json()))))  # the profile of rank 0


def _methods(given: Iterable[Compressor | str] | None) -> list[Compressor]:
    """The compressors to measure, each once, ``Identity`` first because every plan needs it."""
    if isinstance(given, str | Compressor):
        given = [given]
    chosen = (*USUAL_COMPRESSORS, *candidates_by_default()) if given is None else given
    methods = [as_method("profile: compressors", each) for each in chosen]
    return list(dict.fromkeys([gckernels.Identity(), *methods]))


def _topology(given: Topology | tuple[int, int] | None, world_size: int) -> Topology:
    chosen = as_topology("profile", given) or Topology(world_size)
    if world_size < 2:
        raise ValueError("profile: one rank has nobody to communicate with; start at least two, with torchrun")
    if chosen.world_size != world_size:
        raise ValueError(f"profile: topology is for {chosen.world_size} ranks, here are {world_size}")
    return chosen
