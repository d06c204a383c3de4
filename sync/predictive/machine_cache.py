"""The machine of a training, as far as it is known: its profile, and how it has changed since then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from gckernels.compressor import Compressor

from ..communication.agreement import Failure
from ..communication.ranks import Ranks
from ..planner.machines.machine import Machine
from .bandwidth_probe import measured_bit_per_s, with_link
from .codec_probe import measured_codec_speed, with_codec_speed
from .measuring import Measured, apart, measured_profile


@dataclass(frozen=True)
class Since:
    """The changes of a machine since its profile was measured.

    Attributes:
        bit_per_s: the rate of its network; ``None`` if not measured.
        codec_speed: how many times as fast its codecs are; ``None`` if not measured.
    """

    bit_per_s: float | None = None
    codec_speed: float | None = None

    def applied(self, machine: Machine) -> Machine:
        """The machine as it is now; unchanged where it is about the same."""
        return with_codec_speed(with_link(machine, self.bit_per_s), self.codec_speed)


class KnownMachine:
    """The machine of a training. Every rank makes one, and calls its methods, at the same points; all are collective.

    Args:
        ranks: all ranks.
        methods: the compressors that may be tried.

    Attributes:
        machine: the profile, the same on all ranks, or why there is none.
        since: its changes since the profile was measured.
    """

    def __init__(self, ranks: Ranks, methods: Sequence[Compressor]) -> None:
        self._ranks, self._methods = ranks, tuple(methods)
        self.since = Since()
        self.machine: Machine | Failure
        self._is_new = False
        self._measure()

    def look(self) -> Machine | Failure:
        """The machine, brought up to date before plans are made: the network and one codec are measured, unless the
        profile is new. Takes less than half a second. If that fails, the changes are those of before."""
        machine, is_new = self.machine, self._is_new
        self._is_new = False
        if is_new or isinstance(machine, Failure):
            return machine
        since = apart(self._ranks.group, self._ranks.device, lambda own: self._measured_since(own, machine))
        if isinstance(since, Failure):
            return since
        self.since = since
        return machine

    def look_again(self) -> None:
        """Measure a profile if that has failed before."""
        if isinstance(self.machine, Failure):
            self._measure()

    def _measured_since(self, own: dist.ProcessGroup, machine: Machine) -> Since:
        ranks = Ranks(own, self._ranks.device)
        return Since(measured_bit_per_s(ranks), measured_codec_speed(ranks, machine))

    def _measure(self) -> None:
        found = measured_profile(self._ranks.group, self._ranks.device, self._methods)
        self.machine = found.profile if isinstance(found, Measured) else found
        self._is_new = isinstance(found, Measured) and found.is_new
