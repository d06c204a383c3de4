"""Machines that lack some prices, and say so by prices that nobody pays.

A profile that was measured in little time lacks some collectives. A policy that asks for one of them fails, although it
has other options. With these prices it does not, and the options lose.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from gckernels.method import Method

from ...programs.stages import StageKind
from ...programs.steps import Level, Place
from ..machine import Floats, MachineError, Price, Shared
from .derived import DerivedMachine

UNAFFORDABLE_S = 3600.0
"""The price of a stage whose price is missing, in seconds."""
_COPY_NBYTES_PER_S = 5e9  # where copies were not measured; it is the same for all plans


@dataclass(frozen=True)
class WithoutGaps(DerivedMachine):
    """A machine with a price for everything, as a :class:`~gckernels.sync.planner.machine.Machine`.

    All-reduces over all ranks have no other price than that of ``base``, because every plan is compared with them.

    Attributes:
        base: the machine, some of whose prices may be missing.
        asked: called whenever a price is asked for, which is every few milliseconds while a plan is searched.
    """

    asked: Callable[[], None] = field(default=lambda: None, repr=False, compare=False)

    def collective(self, step: str, level: Level, place: Place, wire_nbytes: Floats) -> Price:
        self.asked()
        try:
            return self.base.collective(step, level, place, wire_nbytes)
        except MachineError:
            if step == "AllReduce" and level == Level.FLAT:
                raise
            return Price(np.full_like(wire_nbytes, UNAFFORDABLE_S))

    def codec(
        self, work: StageKind, compressor: Method, place: Place, units: Floats, elements: Floats, sources: int
    ) -> Price:
        self.asked()
        try:
            return self.base.codec(work, compressor, place, units, elements, sources)
        except MachineError:
            return Price(np.full_like(elements, UNAFFORDABLE_S))

    def copy(self, resource: Shared, nbytes: Floats) -> Price:
        self.asked()
        try:
            return self.base.copy(resource, nbytes)
        except MachineError:
            return Price(nbytes / _COPY_NBYTES_PER_S, {resource: nbytes / _COPY_NBYTES_PER_S})
