"""Plans that no search makes: with one compressor for all parameters, and with those of a saved job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from gckernels.codec import GRAD_DTYPES
from gckernels.compressor import Compressor
from gckernels.ops import Identity

from ..programs.model_kinds import kind_of_span
from ..programs.named import default_program, exact_program
from ..programs.spans import MEAN, Span
from ..programs.steps import Program
from ..programs.topology import Topology
from .arguments import Exempt
from .plan import Plan, PlanError, UnitPlan
from .strides import in_reals, memory_shape

EXACT = Identity()


def exempt_vectors(name: str, parameter: torch.nn.Parameter) -> bool:
    """Whether a parameter has fewer than two dimensions, as biases and norms do: the default rule of exemption for all
    compressors but ``Cast16``.

    Vectors are a fraction of a percent of the elements, and cause much of the error when they are compressed.
    """
    return parameter.dim() < 2


def plan_of_parameters(
    parameters: Mapping[str, torch.nn.Parameter],
    compressor: Compressor,
    world_size: int,
    program: Program | None = None,
    exempt: Exempt | None = None,
    topology: Topology | None = None,
    span: Span = MEAN,
    otherwise: Compressor = EXACT,
) -> Plan:
    """The plan of :func:`gckernels.sync.uniform_plan`, which checks the arguments and the result.

    Args:
        parameters: by their plain names, without those that cannot have a gradient.
        compressor: for all parameters that are not exempt.
        world_size: the number of ranks.
        program: ``None`` for that of :func:`~gckernels.sync.programs.default_program`.
        exempt: whether a parameter is sent exactly; ``None`` for :func:`exempt_vectors`, and for no parameter with a
            compressor whose payloads are added.
        topology: the machines and devices that the plan is for, if its program has levels.
        span: the states between which its programs go.
        otherwise: the compressor for parameters that are exempt.
    """
    if exempt is None:
        exempt = (lambda name, parameter: False) if compressor.traits.summable else exempt_vectors
    compressors = {name: otherwise if exempt(name, each) else compressor for name, each in parameters.items()}
    steps = program or default_program(compressor, world_size, span)
    return plan_of_compressors(parameters, compressors, dict.fromkeys(parameters, steps), world_size, topology, span)


def plan_of_compressors(
    parameters: Mapping[str, torch.nn.Parameter],
    compressors: Mapping[str, Compressor],
    programs: Mapping[str, Program],
    world_size: int,
    topology: Topology | None = None,
    span: Span = MEAN,
) -> Plan:
    """The plan in which each parameter has its own compressor and program.

    Args:
        parameters: by their plain names, without those that cannot have a gradient.
        compressors: by the names of their parameters, not fitted to their shapes. Other parameters are sent exactly, in
            the same messages.
        programs: by the names of all parameters. A parameter of a dtype that no compressor takes is averaged in place.
        world_size: the number of ranks.
        topology: the machines and devices that the plan is for, if the program has levels.
        span: the states between which the program goes.
    """
    units = []
    for name, parameter in parameters.items():
        reals = in_reals(parameter)
        encodable = reals.dtype in GRAD_DTYPES
        fitted = compressors[name].fit(memory_shape(reals)) if encodable and name in compressors else EXACT
        steps = programs[name] if encodable else exact_program(span)
        units.append(UnitPlan(name, reals.numel(), fitted, steps, fitted.traits.needs_feedback))
    return Plan(tuple(units), topology, frontend=kind_of_span(span)).spread_roots(world_size)


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
        units = (_with_default_program(unit, world_size, saved.span) for unit in saved.units)
        anew = replace(saved.with_units(units), topology=None)
        anew.check(parameters.items(), world_size)
        return anew
    return saved


def _with_default_program(unit: UnitPlan, world_size: int, span: Span) -> UnitPlan:
    """The unit with the default program, with which it also shares messages."""
    if unit.in_place:
        return unit
    return replace(unit, program=default_program(unit.compressor, world_size, span), root=0)
