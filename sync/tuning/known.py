"""The machine of a training, as far as it is known: its profile, and how it has changed since then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gckernels.method import Method

from ..profiling.ranks import Ranks
from .agreeing import Failure
from .link import measured_bit_per_s, with_link
from .measuring import Measured, measured_profile
from .speed import measured_codec_speed, with_codec_speed

if TYPE_CHECKING:  # it needs NumPy
    from ..planner.machine import Machine


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

    def __init__(self, ranks: Ranks, methods: Sequence[Method]) -> None:
        self._ranks, self._methods = ranks, tuple(methods)
        self.since = Since()
        self.machine: Machine | Failure
        self._is_new = False
        self._measure()

    def look(self) -> None:
        """Bring it up to date, before plans are made: measure the network and one codec, unless the profile is new.
        Takes less than half a second."""
        if self._is_new:
            self._is_new = False
        elif not isinstance(self.machine, Failure):
            self.since = Since(measured_bit_per_s(self._ranks), measured_codec_speed(self._ranks, self.machine))

    def look_again(self) -> None:
        """Measure a profile if that has failed before."""
        if isinstance(self.machine, Failure):
            self._measure()

    def _measure(self) -> None:
        found = measured_profile(self._ranks.group, self._ranks.device, self._methods)
        self.machine = found.profile if isinstance(found, Measured) else found
        self._is_new = isinstance(found, Measured) and found.is_new
