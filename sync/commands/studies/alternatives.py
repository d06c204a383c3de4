"""Alternatives: the same plan with some units sent in another way, and how long its step would take."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from gckernels.codec import Codec
from gckernels.compressor import Compressor
from gckernels.ops import Identity

from ...accuracy.accuracy import error_on, fitted, unfitted
from ...planner.drafts.problem import Problem
from ...planner.machines.machine import MachineError
from ...planner.timeline.timeline import timeline
from ...plans.names import program_name, short_spec
from ...plans.plan import Plan, PlanError, UnitPlan
from ...programs.named import ALLREDUCE, PROGRAMS, default_program, ring
from ...programs.sizes import sizes_of
from ...programs.steps import Program, ProgramError

MAX_RING = 8  # a ring of more ranks has more hops than a message has lanes


@dataclass(frozen=True)
class UnitAlternative:
    """Another way to send some units.

    Attributes:
        compressor: the spec of the compressor, or ``"exactly"``.
        program: the name of the program.
        step_s: how long the step would take.
        change_s: how much longer that is than with the plan.
        allowed: whether the rule of accuracy allows it.
        error: the largest relative error of the units' gradients, or ``None`` if it is not known.
    """

    compressor: str
    program: str
    step_s: float
    change_s: float
    allowed: bool
    error: float | None


def alternatives(
    problem: Problem, plan: Plan, keys: Collection[str], also: Sequence[Compressor] = ()
) -> Iterator[UnitAlternative]:
    """Other ways to send some units of a plan: exactly, with other compressors, through other programs.

    Args:
        problem: the problem, whose allowed compressors are tried.
        plan: the plan.
        keys: the names of the units.
        also: more compressors to try, whether they are allowed or not.
    """
    units = [unit for unit in plan.units if unit.key in keys]
    now_s = timeline(plan, problem.trace, problem.pricer, problem.frontend).step_s
    trial = partial(_tried, problem, plan, now_s)
    used = {unit.compressor for unit in units if not isinstance(unit.compressor, Identity)}
    if any(not unit.in_place for unit in units):
        yield from trial([_exactly(unit) for unit in units], "exactly")
    for compressor in _candidates(problem, units, also):
        changed = [_with_compressor(problem, unit, compressor) for unit in units]
        found = [unit for unit in changed if unit is not None]
        if found and {unit.compressor for unit in found} != used:
            yield from trial(found, short_spec(compressor))
    compressed = [unit for unit in units if unit.compressor in used]
    for program in _programs(problem.topology.world_size):
        if any(unit.program != program for unit in compressed):
            names = "+".join(dict.fromkeys(short_spec(unit.compressor) for unit in compressed))
            yield from trial([replace(unit, program=program) for unit in compressed], names)


def _candidates(problem: Problem, units: Collection[UnitPlan], also: Sequence[Compressor]) -> list[Compressor]:
    """The compressors that at least one of the units may use, and others."""
    allowed = [unfitted(each) for unit in units for each in problem.allowed.get(unit.parameter, ())]
    return list(dict.fromkeys([*allowed, *also]))


def _programs(world_size: int) -> list[Program]:
    rings = [ring(world_size)] if 1 < world_size <= MAX_RING else []
    return [program for program in PROGRAMS.values() if program != ALLREDUCE] + rings


def _tried(
    problem: Problem, plan: Plan, now_s: float, changed: Sequence[UnitPlan], compressor: str
) -> Iterator[UnitAlternative]:
    """The alternative in which the units of a plan with the same keys are changed, if it is valid."""
    by_key = {unit.key: unit for unit in changed}
    units = tuple(by_key.get(unit.key, unit) for unit in plan.units)
    try:
        for unit in changed:
            dtype = problem.trace.tensors[_number(problem, unit.parameter)].dtype
            sizes_of(unit.program, unit.numel, dtype, unit.compressor, problem.topology)
        other = replace(plan, units=units, topology=problem.topology)
        step_s = timeline(other, problem.trace, problem.pricer, problem.frontend).step_s
    except (PlanError, ProgramError, MachineError):
        return
    compressed = [unit for unit in changed if not isinstance(unit.compressor, Identity)]
    allowed = all(problem.may_use(_number(problem, unit.parameter), unfitted(unit.compressor)) for unit in compressed)
    program = program_name(changed[0].program, problem.topology.world_size)
    error = _error(problem, compressed) if compressed else 0.0
    yield UnitAlternative(compressor, program, step_s, step_s - now_s, allowed, error)


def _exactly(unit: UnitPlan) -> UnitPlan:
    """The unit, averaged in place."""
    return replace(unit, compressor=Identity(), program=ALLREDUCE, feedback=False, message=None, channel=None)


def _with_compressor(problem: Problem, unit: UnitPlan, compressor: Compressor) -> UnitPlan | None:
    """The unit with another compressor, in its program if that is valid; ``None`` if the unit cannot have it."""
    number = _number(problem, unit.parameter)
    if not problem.encodable(number):
        return None
    traced = problem.trace.tensors[number]
    fit = fitted(compressor, traced)
    if fit is None or (unit.start is not None and not isinstance(fit, Codec)):
        return None
    usual = default_program(fit, problem.topology.world_size)
    for program in (usual if unit.in_place else unit.program, usual):
        try:
            sizes_of(program, unit.numel, traced.dtype, fit, problem.topology)
        except ProgramError:
            continue
        changed = replace(unit, compressor=fit, program=program, feedback=fit.traits.needs_feedback)
        return changed if isinstance(fit, Codec) else replace(changed, message=None, channel=None)
    return None


def _number(problem: Problem, parameter: str) -> int:
    return next(index for index, tensor in enumerate(problem.trace.tensors) if tensor.name == parameter)


def _error(problem: Problem, units: Collection[UnitPlan]) -> float | None:
    """The largest error of the gradients of units with their compressors; ``None`` if one is not known."""
    tensors = {tensor.name: tensor for tensor in problem.trace.tensors}
    found = [error_on(tensors[unit.parameter], unit.compressor) for unit in units]
    return None if None in found else max(error.value for error in found if error is not None)
