"""Plans in which all parameters are treated alike, and what a user may say instead of a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch

from gckernels.compressor import GRAD_DTYPES
from gckernels.method import Method
from gckernels.ops import Identity

from .memory import memory_shape
from .plan import Plan, UnitPlan
from .steps import Program, describe
from .strategies import ALLREDUCE, default_program
from .topology import Topology

Exempt = Callable[[str, torch.nn.Parameter], bool]


def exempt_vectors(name: str, parameter: torch.nn.Parameter) -> bool:
    """The default rule of exemption: parameters with fewer than two dimensions (biases, norms) are sent exactly.

    They are a fraction of a percent of the elements and carry much of the error when compressed.
    """
    return parameter.dim() < 2


def uniform_plan(
    parameters: Iterable[tuple[str, torch.nn.Parameter]],
    compressor: Method,
    world_size: int,
    program: Program | None = None,
    exempt: Exempt = exempt_vectors,
    topology: Topology | None = None,
) -> Plan:
    """The same compressor and program for every parameter, but for those that ``exempt`` names.

    An exempt parameter goes through the same program as the others, so that it travels in the same messages, with
    :class:`~gckernels.Identity` in the place of the compressor, and so does one that the compressor's ``fit`` declines.
    A parameter whose dtype no compressor takes (float64) is reduced as it is.
    """
    program = default_program(compressor, world_size) if program is None else program
    units = []
    for name, parameter in parameters:
        encodable = parameter.dtype in GRAD_DTYPES
        fitted = encodable and not exempt(name, parameter)
        chosen = compressor.fit(memory_shape(parameter)) if fitted else Identity()
        steps = program if encodable else ALLREDUCE
        units.append(UnitPlan(name, parameter.numel(), chosen, steps, chosen.needs_feedback))
    return Plan(tuple(units), topology)


def chosen_plan(
    what: str,
    parameters: Mapping[str, torch.nn.Parameter],
    compressor_or_plan: object,
    world_size: int,
    program: Program | None,
    exempt: Exempt,
    topology: Topology | None,
) -> tuple[Plan, str]:
    """The plan that the arguments of ``what`` mean, checked, and what to call it in a message to other ranks.

    Raises:
        TypeError, ValueError, PlanError: an argument is not valid.
    """
    if isinstance(compressor_or_plan, Method):
        plan = uniform_plan(parameters.items(), compressor_or_plan, world_size, program, exempt, topology)
        programs = sorted({describe(unit.program) for unit in plan.units})
        summary = f"{compressor_or_plan} through {' and '.join(programs)}"
    elif isinstance(compressor_or_plan, Plan):
        if program is not None or exempt is not exempt_vectors or topology is not None:
            raise ValueError(f"{what}: program, exempt and topology belong to a compressor; a plan has its own")
        plan, summary = compressor_or_plan, "a plan"
    else:
        given = type(compressor_or_plan).__name__
        raise TypeError(f"{what}: compressor_or_plan must be a Compressor or a Plan, got {given}")
    plan.check(parameters.items(), world_size)
    return plan, summary
