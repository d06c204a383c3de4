"""The function that users call for a profile: checks what it is given, and looks for a profile in the cache."""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

import torch
import torch.distributed as dist

import gckernels
from gckernels.compressor import Compressor
from gckernels.toolkit.host import cache as folder

from ..accuracy.accuracy import candidates_by_default
from ..communication.agreement import agreed
from ..communication.collectives import device_of_group, exchange_text
from ..communication.ranks import Ranks
from ..lab import in_rank
from ..planner.machines.curves import ProfileError
from ..planner.machines.profile import Profile
from ..planner.machines.profile_json import profile_from_json, profile_to_json
from ..plans.arguments import as_method, as_topology
from ..programs.topology import Topology
from . import profile_cache
from .measure import device_name, measure_profile
from .measurements.session import MeasurementExtent

USUAL_COMPRESSORS = (
    "Identity",
    "Cast16",
    "BlockQuant",
    "BlockQuant(bits=4)",
    "EFSignSGD",
    "PowerSGD",
    "ChunkTopK",
    "TopK",
    "BlockFP8",
    "LinearQuant",
)
"""The first compressors of a profile that names none, in the order of their measurement. All others follow."""

Progress = Callable[[float, str], object]


def profile(
    seconds: float = 60.0,
    compressors: Iterable[Compressor | str] | None = None,
    process_group: dist.ProcessGroup | None = None,
    topology: Topology | tuple[int, int] | None = None,
    cache: bool = True,
) -> Profile:
    """A measured profile of these ranks, the same on all of them. Every rank calls this with the same arguments.

    The most informative parts come first. When the seconds are spent, the rest is left out, and ``left_out`` says what.
    Nothing else should run meanwhile.

    A profile is kept in the folder ``$GCKERNELS_CACHE`` (by default ``~/.cache/gckernels``) of rank 0. It is found
    again for the same hosts, devices, backend, versions and topology, unless more seconds or other compressors are
    asked for. One that lacks prices of what plans need, because something else was running, is measured again.
    Links between network namespaces (``gckernels lab``) come and go, so their profiles are not kept.

    Args:
        seconds: the time that the measurement may take, from 1 up. It may end a little later.
        compressors: compressors such as ``EFSignSGD()``, or their specs such as ``"BlockQuant(bits=4)"``; by default
            all, the usual ones first. ``Identity`` is measured in any case, because vectors are sent exactly.
        process_group: the ranks; by default all.
        topology: the machines and the devices of each, or a pair ``(machines, devices)``. By default every rank counts
            as a machine, as in plans.
        cache: whether a kept profile may be returned, and whether this one is kept.

    Returns:
        The profile, a machine for the planner. Measurements that disagree with themselves are in ``refused``.

    Raises:
        RuntimeError: ``torch.distributed`` is not initialised, or the ranks have different arguments.
        TypeError, ValueError: an argument is wrong, or there is only one rank.
    """
    return measured_or_kept(seconds, compressors, process_group, topology, cache)


def measured_or_kept(
    seconds: float = 60.0,
    compressors: Iterable[Compressor | str] | None = None,
    process_group: dist.ProcessGroup | None = None,
    topology: Topology | tuple[int, int] | None = None,
    cache: bool = True,
    progress: Progress = lambda share, name: None,
    extent: MeasurementExtent | None = None,
) -> Profile:
    """The profile that :func:`profile` returns.

    Args:
        seconds, compressors, process_group, topology, cache: as for :func:`profile`.
        progress: called on every rank with the share of the time that is spent and the name of the part that begins.
        extent: how much is measured; by default as much as the seconds suggest.
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
        return (methods, chosen), [f"{seconds} s, {chosen}, cache={cache}", *map(str, methods)]

    methods, chosen = agreed("profile", group, device, check)
    ranks = Ranks(group, device)
    identity = {
        "hosts": exchange_text(group, device, platform.node()),
        "devices": exchange_text(group, device, device_name(device)),
        "networks": exchange_text(group, device, _network()),
        "backend": dist.get_backend(group),
        "versions": [torch.__version__, gckernels.__version__],
        "topology": [chosen.machines, chosen.devices],
    }
    name = f"profiles-{folder.digest(json.dumps(identity, sort_keys=True).encode())}.json"
    specs, keeps = [str(method) for method in methods], cache and not in_rank()
    file = (folder.own_text(name) or "") if keeps and ranks.rank == 0 else ""
    found = ranks.first_text(_complete(profile_cache.find(file, seconds, specs), methods))
    if found:
        return profile_from_json(json.loads(found))
    profile = measure_profile(group, device, chosen, methods, seconds, extent, progress)
    if keeps and ranks.rank == 0 and profile_cache.is_complete(profile, methods):
        folder.keep_source(name, profile_cache.with_profile(file, seconds, specs, profile_to_json(profile)))
    return profile


def _complete(texts: Iterable[str], methods: Sequence[Compressor]) -> str:
    """The first of some profiles, as JSON, that has all prices; an empty text if there is none.

    One that is damaged or of another release has none.
    """
    for text in texts:
        with suppress(ProfileError, ValueError):
            if profile_cache.is_complete(profile_from_json(json.loads(text)), methods):
                return text
    return ""


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


def _network() -> str:
    """The network namespace of this process, which has links of its own."""
    try:
        return str(os.stat("/proc/self/ns/net").st_ino)
    except OSError:  # not Linux
        return ""
