"""Whole plans: what the times of every launch depend on besides its own messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ...plans.plan import UnitPlan
from ...programs.named import ALLREDUCE
from ...programs.steps import Collective
from ...traces.model_trace import ModelTrace
from ..machines.machine import Machine, Shared
from .loads import Loads, busiest_rank, computing_of, total, unevenness


class Whole(NamedTuple):
    """The properties of a whole plan on which the times of its launches depend.

    Attributes:
        without_hook: whether DDP averages all gradients itself.
        phases: the number of collectives of the longest program.
        rank: the rank of the timeline; ``None`` if it does not matter.
        uneven: how uneven the work of links is, as :func:`~.loads.unevenness` says.
    """

    without_hook: bool
    phases: int
    rank: int | None
    uneven: Mapping[Shared, float]

    @staticmethod
    def of(without_hook: bool, phases: int, loads: Iterable[Loads], trace: ModelTrace, machine: Machine) -> Whole:
        """The properties of a plan.

        Args:
            without_hook: as said.
            phases: the number of collectives of the longest program that is not in place; 0 if there is none.
            loads: the loads of all messages, in any parts.
            trace, machine: the trace and the machine that it is predicted for.
        """
        everything = total([computing_of(trace, machine), *loads])
        return Whole(without_hook, max(phases, 1), busiest_rank(everything, machine), unevenness(everything))


def phases_of_units(units: Iterable[UnitPlan]) -> int:
    """The number of collectives of the longest program of some units that is not in place; 0 if there is none."""
    programs = {id(unit.program): unit.program for unit in units}
    sizes = (sum(isinstance(step, Collective) for step in each) for each in programs.values() if each != ALLREDUCE)
    return max(sizes, default=0)
