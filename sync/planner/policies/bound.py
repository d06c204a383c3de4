"""The policy ``bound``: the best plan if codecs took no time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from gckernels.method import Method

from ...plans.plan import Plan
from ...programs.stages import StageKind
from ...programs.steps import Level, Place
from ...programs.topology import Topology
from ..machine import Floats, Machine, Overheads, Price, Shared
from ..problem import Problem
from .auto import auto


def bound(problem: Problem) -> Plan:
    """The plan of ``auto`` for the problem of :func:`free_problem`."""
    return auto(free_problem(problem))


def free_problem(problem: Problem) -> Problem:
    """The problem on a machine whose codecs take no time. No plan on the real machine should be faster than on it."""
    return replace(problem, pricer=problem.pricer.on(FreeCodecs(problem.machine)))


@dataclass(frozen=True)
class FreeCodecs:
    """A machine whose codecs take no time.

    Attributes:
        machine: the machine with all other prices.
    """

    machine: Machine

    @property
    def name(self) -> str:
        return f"{self.machine.name}, codecs for nothing"

    @property
    def topology(self) -> Topology:
        return self.machine.topology

    @property
    def estimated(self) -> bool:
        return self.machine.estimated

    @property
    def margin(self) -> float:
        return 0.0

    @property
    def computes_on(self) -> Shared:
        return self.machine.computes_on

    @property
    def capacities(self) -> Mapping[Shared, float]:
        return self.machine.capacities

    @property
    def overheads(self) -> Overheads:
        return self.machine.overheads

    def collective(self, step: str, level: Level, place: Place, wire_nbytes: Floats) -> Price:
        return self.machine.collective(step, level, place, wire_nbytes)

    def codec(
        self, work: StageKind, compressor: Method, place: Place, units: Floats, elements: Floats, sources: int
    ) -> Price:
        return Price(np.zeros_like(elements))

    def copy(self, resource: Shared, nbytes: Floats) -> Price:
        return self.machine.copy(resource, nbytes)
