"""Plans with which a saved job can go on, on another number of ranks, too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from ..plans.plan import Plan, PlanError, UnitPlan
from ..programs.named import default_program


def resumable(saved: Plan, parameters: Mapping[str, torch.nn.Parameter], world_size: int) -> Plan:
    """The saved plan; if it does not work on this number of ranks, its units with default programs.

    Units and compressors are those of the saved plan in any case, so that residuals can be taken over.

    Args:
        saved: the plan of a saved job.
        parameters: the parameters of the model, by name.
        world_size: the number of ranks.

    Raises:
        PlanError: the units do not fit the model.
    """
    try:
        saved.check(parameters.items(), world_size)
    except PlanError:
        anew = replace(saved.with_units(_with_default_program(unit, world_size) for unit in saved.units), topology=None)
        anew.check(parameters.items(), world_size)
        return anew
    return saved


def _with_default_program(unit: UnitPlan, world_size: int) -> UnitPlan:
    """The unit with the default program, with which it also shares messages."""
    if unit.in_place:
        return unit
    return replace(unit, program=default_program(unit.compressor, world_size), root=0)
