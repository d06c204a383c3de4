"""The machine of a training, as far as it is known: its profile, and the rate of its network since then."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gckernels.method import Method

from ..profiling.ranks import Ranks
from .agreeing import Failure
from .link import measured_bit_per_s
from .measuring import Measured, measured_profile

if TYPE_CHECKING:  # it needs NumPy
    from ..planner.machine import Machine


class KnownMachine:
    """The machine of a training. Every rank makes one, and calls its methods, at the same points; all are collective.

    Args:
        ranks: all ranks.
        methods: the compressors that may be tried.

    Attributes:
        machine: the profile, the same on all ranks, or why there is none.
        bit_per_s: the rate of the network, if it has been measured since the profile.
    """

    def __init__(self, ranks: Ranks, methods: Sequence[Method]) -> None:
        importlib.import_module("..planner.choice", __package__)  # a tenth of a second, not in a training step
        self._ranks, self._methods = ranks, tuple(methods)
        self.bit_per_s: float | None = None
        self.machine: Machine | Failure
        self._is_new = False
        self._measure()

    def look(self) -> None:
        """Bring it up to date, before plans are made: measure the network, unless the profile is new. Takes less than
        0.3 s."""
        if self._is_new:
            self._is_new = False
        elif not isinstance(self.machine, Failure):
            self.bit_per_s = measured_bit_per_s(self._ranks)

    def look_again(self) -> None:
        """Measure a profile if that has failed before."""
        if isinstance(self.machine, Failure):
            self._measure()

    def _measure(self) -> None:
        found = measured_profile(self._ranks.group, self._ranks.device, self._methods)
        self.machine = found.profile if isinstance(found, Measured) else found
        self._is_new = isinstance(found, Measured) and found.is_new
