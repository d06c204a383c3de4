"""A machine that yields to the training before every price."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from gckernels.compressor import Compressor

from ..planner.machines.derived import DerivedMachine
from ..planner.machines.machine import Floats, Price, Shared
from ..programs.stages import StageKind
from ..programs.steps import Level, Place


@dataclass(frozen=True)
class RestingMachine(DerivedMachine):
    """A machine with the prices of another one, which calls a function before each of them.

    A search asks for prices every few milliseconds.

    Attributes:
        rest: called whenever a price is asked for.
    """

    rest: Callable[[], None] = field(repr=False, compare=False)

    def collective(self, step: str, level: Level, place: Place, wire_nbytes: Floats, from_roots: bool = False) -> Price:
        self.rest()
        return self.base.collective(step, level, place, wire_nbytes, from_roots)

    def codec(
        self, work: StageKind, compressor: Compressor, place: Place, units: Floats, elements: Floats, sources: int
    ) -> Price:
        self.rest()
        return self.base.codec(work, compressor, place, units, elements, sources)

    def copy(self, resource: Shared, nbytes: Floats) -> Price:
        self.rest()
        return self.base.copy(resource, nbytes)
