"""The profile of the machine that a training runs on, from the cache or measured before its first step."""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from gckernels.compressor import Compressor

from ..communication.agreement import Failure, together
from ..communication.groups import NotConnected, Wanted, make_groups
from ..planner.machines.profile import Profile
from ..profiling.measurements.session import KI, MI, MeasurementExtent
from ..profiling.request import measured_or_kept
from ..stats.decisions import LOGGER
from ..tuning.decisions.sentences import profiled, profiles

T = TypeVar("T")

SECONDS = 10.0
"""Time that the measurement of a profile may take."""
SPARE_S = 1.5
"""The share of it for connections, and for the last part of the measurement, which may take longer than expected."""


_OF_GROUPS: weakref.WeakKeyDictionary[dist.ProcessGroup, tuple[frozenset[Compressor], Profile]]
_OF_GROUPS = weakref.WeakKeyDictionary()
"""The last profile of each group, and the compressors it was measured for, because some profiles are too incomplete to
be kept in the cache, and further models of the process need not measure again."""


class ProgressLine:
    """The words of rank 0 while something is measured: a line of the log before and after, and one on its terminal that
    changes. Nothing is said if nothing is measured.

    Args:
        group: all ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._is_first, self._ranks = dist.get_rank(group) == 0, dist.get_world_size(group)
        self._draws = self._is_first and sys.stderr.isatty()
        self._began_s: float | None = None

    def __call__(self, share: float, name: str) -> None:
        """Show the share of the time that is spent, and the name of the part that begins."""
        if self._began_s is None:
            self._began_s = time.perf_counter()
            self._log(profiles(self._ranks, SECONDS))
        if self._draws:
            print(f"\r\033[Kgckernels: measuring this machine {share:4.0%} {name}", end="", file=sys.stderr, flush=True)

    @property
    def has_begun(self) -> bool:
        """Whether anything has been measured."""
        return self._began_s is not None

    def close(self) -> None:
        """End the line, and say how long it took."""
        if self._began_s is None:
            return
        if self._draws:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
        self._log(profiled(self._ranks, time.perf_counter() - self._began_s))

    def _log(self, text: str) -> None:
        if self._is_first:
            LOGGER.info("gckernels: %s", text)


def extent() -> MeasurementExtent:
    """The extent of so short a measurement: enough for predictions that trials then correct."""
    return MeasurementExtent(
        largest_nbytes=4 * MI,
        longest_s=0.05,
        curve_s=0.5,
        rounds=3,
        elements=(4 * KI, 32 * KI, 256 * KI, 2 * MI),
        many=((16, 256 * KI),),
        beside_s=0.1,
    )


@dataclass(frozen=True)
class Measured:
    """A profile of the ranks.

    Attributes:
        profile: the profile.
        is_new: whether it was measured just now; otherwise it was known.
    """

    profile: Profile
    is_new: bool


def measured_profile(
    group: dist.ProcessGroup, device: torch.device, methods: Sequence[Compressor], cache: bool = True
) -> Measured | Failure:
    """A profile of the ranks, the same on all of them. Collective.

    Args:
        group: all ranks.
        device: the device of the gradients.
        methods: the compressors to measure.
        cache: whether a known profile may be returned, of this process or an earlier one.

    Raises:
        RuntimeError: a rank is gone.
    """
    known = _OF_GROUPS.get(group)
    if cache and known is not None and known[0].issuperset(methods):
        return Measured(known[1], is_new=False)
    progress = ProgressLine(group)

    def measure(own: dist.ProcessGroup) -> Measured:
        try:
            found = measured_or_kept(SECONDS - SPARE_S, methods, own, cache=cache, progress=progress, extent=extent())
            return Measured(found, progress.has_begun)
        finally:
            progress.close()

    found = apart(group, device, measure)
    if isinstance(found, Measured):
        _OF_GROUPS[group] = frozenset(methods), found.profile
    return found


def apart(group: dist.ProcessGroup, device: torch.device, measure: Callable[[dist.ProcessGroup], T]) -> T | Failure:
    """The result of a measurement over a group of its own, if it returns on all ranks. Collective.

    A rank on which it raises closes that group, so that the others do not wait for it.

    Args:
        group: all ranks.
        device: a device whose tensors the group can send.
        measure: measures, with the group that it is given.

    Raises:
        RuntimeError: a rank is gone.
    """
    try:
        made = [_copy_of(group, device)]
    except NotConnected as error:
        return Failure(str(error))

    def work() -> T:
        own = made.pop()  # its connections are closed when nothing refers to it any more
        try:
            return measure(own)
        finally:
            dist.destroy_process_group(own)

    return together(group, device, work)


def _copy_of(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """A new group of the same ranks. Collective.

    Raises:
        NotConnected: some rank cannot connect. Every rank raises.
    """
    backend, ranks = group._get_backend(device), dist.get_process_group_ranks(group)
    (copy,) = make_groups(group, device, [Wanted(ranks, "profile", backend.name(), backend.options._timeout)])
    return copy
