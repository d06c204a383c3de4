"""Whole plans: what the times of every launch depend on besides its own messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ..plans.plan import Attached, Plan, UnitPlan
from ..programs.named import ALLREDUCE
from ..programs.steps import Broadcast, Collective, Gather, Reduce
from .launches import has_no_hook


class Whole(NamedTuple):
    """The properties of a whole plan on which the times of its launches depend.

    Attributes:
        without_hook: whether DDP averages all gradients itself.
        phases: the number of collectives of the longest program.
        rank: the rank of the timeline; ``None`` if it does not matter.
    """

    without_hook: bool
    phases: int
    rank: int | None


def whole_of(plan: Plan, attached: Attached) -> Whole:
    """The properties of a plan."""
    phases = max(phases_of_units(plan.units), 1)
    return Whole(has_no_hook(plan, attached), phases, busiest(root_loads(plan.units)))


def root_loads(units: Iterable[UnitPlan]) -> Counter[int]:
    """The elements of which each rank is the root, of units whose programs have roots."""
    load: Counter[int] = Counter()
    rooted: dict[int, bool] = {}  # programs by identity: to compare those of all units takes long
    for unit in units:
        if id(unit.program) not in rooted:
            rooted[id(unit.program)] = any(isinstance(step, Gather | Reduce | Broadcast) for step in unit.program)
        if rooted[id(unit.program)]:
            load[unit.root] += unit.numel
    return load


def busiest(load: Mapping[int, int]) -> int | None:
    """The rank with the largest load, the first of equals; ``None`` if there is none."""
    return max(load, key=lambda rank: (load[rank], -rank), default=None)


def phases_of_units(units: Iterable[UnitPlan]) -> int:
    """The number of collectives of the longest program of some units that is not in place; 0 if there is none."""
    programs = {id(unit.program): unit.program for unit in units}
    sizes = (sum(isinstance(step, Collective) for step in each) for each in programs.values() if each != ALLREDUCE)
    return max(sizes, default=0)
