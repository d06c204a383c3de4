"""Alternatives: the same plan with some units sent in another way, and how long its step would take."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from gckernels.codec import Codec
from gckernels.compressor import Compressor
from gckernels.ops import Identity
from gckernels.sync.accuracy.accuracy import error_on, fitted, unfitted
from gckernels.sync.plans.names import program_name, short_spec
from gckernels.sync.plans.plan import Plan, PlanError, UnitPlan
from gckernels.sync.programs.named import ALLREDUCE, PROGRAMS, exact_program, ring
from gckernels.sync.programs.sizes import sizes_of
from gckernels.sync.programs.steps import ProgramError

from ...drafts.problem import Problem
from ...machines.machine import MachineError

MAX_RING = 8  # a ring of more ranks has more hops than a message has lanes


@dataclass(frozen=True)
class UnitAlternative:
    """Another way to send some units."""

    compressor: str  # the spec of the compressor, or "exactly"
    program: str  # the name of the program
    step_s: float  # how long the step would take, in seconds
    allowed: bool  # whether the rule of accuracy allows it
    error: float | None  # the largest relative error of the units' gradients, or None if it is not known


def alternatives(
    problem: Problem, plan: Plan, keys: Collection[str], also: Sequence[Compressor] = ()
) -> Iterator[UnitAlternative]:
    """Other ways to send some units of a plan: exactly, with other compressors, through other programs.

    Args:
        problem: the problem, whose allowed compressors are tried.
        keys: the names of the units.
        also: more compressors to try, whether they are allowed or not.
    """
    units = [unit for unit in plan.units if unit.key in keys]
    compressed = [unit for unit in units if not isinstance(unit.compressor, Identity)]
    if any(not unit.in_place for unit in units):
        program = exact_program(problem.frontend.span())  # in place, or FSDP2's reduction to shards
        yield from _tried(problem, plan, [unit.exactly(program) for unit in units], "exactly")
    allowed = [unfitted(each) for unit in units for each in problem.allowed.get(unit.parameter, ())]
    for compressor in dict.fromkeys([*allowed, *also]):
        changed = [_with_compressor(problem, unit, compressor) for unit in units]
        found = [unit for unit in changed if unit is not None]
        if found and {unit.compressor for unit in found} != {unit.compressor for unit in compressed}:
            yield from _tried(problem, plan, found, short_spec(compressor))
    world_size = problem.topology.world_size
    rings = [ring(world_size)] if 1 < world_size <= MAX_RING else []
    for program in [*(each for each in PROGRAMS.values() if each != ALLREDUCE), *rings]:
        if any(unit.program != program for unit in compressed):
            names = "+".join(dict.fromkeys(short_spec(unit.compressor) for unit in compressed))
            yield from _tried(problem, plan, [replace(unit, program=program) for unit in compressed], names)


def _tried(problem: Problem, plan: Plan, changed: Sequence[UnitPlan], compressor: str) -> Iterator[UnitAlternative]:
    """The alternative in which the units of a plan with the same keys are changed, if it is valid."""
    by_key, where = {unit.key: unit for unit in changed}, (problem.topology, problem.frontend.span())
    units = tuple(by_key.get(unit.key, unit) for unit in plan.units)
    try:
        for unit in changed:
            sizes_of(unit.program, unit.numel, problem.trace.by_name[unit.parameter].dtype, unit.compressor, *where)
        other = replace(plan, units=units, topology=problem.topology)
        step_s = problem.timeline(other).step_s
    except (PlanError, ProgramError, MachineError):
        return
    compressed = [unit for unit in changed if not isinstance(unit.compressor, Identity)]
    allowed = all(problem.may_use(problem.numbers[unit.parameter], unfitted(unit.compressor)) for unit in compressed)
    program = program_name(changed[0].program, problem.topology.world_size)
    errors = [error_on(problem.trace.by_name[unit.parameter], unit.compressor) for unit in compressed]
    error = None if None in errors else max((each.value for each in errors if each is not None), default=0.0)
    yield UnitAlternative(compressor, program, step_s, allowed, error)


def _with_compressor(problem: Problem, unit: UnitPlan, compressor: Compressor) -> UnitPlan | None:
    """The unit with another compressor, in its program if that is valid; ``None`` if the unit cannot have it."""
    traced = problem.trace.by_name[unit.parameter]
    fit = fitted(compressor, traced)
    if fit is None or (unit.start is not None and not isinstance(fit, Codec)):
        return None
    usual = problem.default_program(fit)
    for program in (usual if unit.in_place else unit.program, usual):
        try:
            sizes_of(program, unit.numel, traced.dtype, fit, problem.topology, problem.frontend.span())
        except ProgramError:
            continue
        changed = replace(unit, compressor=fit, program=program, feedback=fit.traits.needs_feedback)
        return changed if isinstance(fit, Codec) else replace(changed, message=None, channel=None)
    return None
