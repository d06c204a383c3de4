"""Machines that override some prices of another one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gckernels.compressor import Compressor

from ...programs.stages import StageKind
from ...programs.steps import Level, Place
from ...programs.topology import Topology
from .machine import Floats, Machine, Overheads, Price, Shared


@dataclass(frozen=True)
class DerivedMachine:
    """A machine that is another one, as a :class:`~gckernels.sync.planner.machines.machine.Machine`; classes below
    change some prices.

    Attributes:
        base: the other machine.
    """

    base: Machine

    @property
    def name(self) -> str:
        return self.base.name

    @property
    def topology(self) -> Topology:
        return self.base.topology

    @property
    def estimated(self) -> bool:
        return self.base.estimated

    @property
    def margin(self) -> float:
        return self.base.margin

    @property
    def computes_on(self) -> Shared:
        return self.base.computes_on

    @property
    def capacities(self) -> Mapping[Shared, float]:
        return self.base.capacities

    @property
    def overheads(self) -> Overheads:
        return self.base.overheads

    @property
    def memory_nbytes(self) -> float | None:
        return self.base.memory_nbytes

    @property
    def shared_by(self) -> Mapping[Shared, int]:
        return self.base.shared_by

    def collective(self, step: str, level: Level, place: Place, wire_nbytes: Floats, from_roots: bool = False) -> Price:
        return self.base.collective(step, level, place, wire_nbytes, from_roots)

    def codec(
        self, work: StageKind, compressor: Compressor, place: Place, units: Floats, elements: Floats, sources: int
    ) -> Price:
        return self.base.codec(work, compressor, place, units, elements, sources)

    def copy(self, resource: Shared, nbytes: Floats) -> Price:
        return self.base.copy(resource, nbytes)
