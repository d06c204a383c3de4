"""Plans with finer compressors for some units, and the errors for which they got them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import torch

from gckernels.codec import Codec
from gckernels.compressor import Compressor

from ...accuracy.accuracy import AccuracyLike, allowed_compressors, error_on, unfitted
from ...plans.plan import Plan, UnitPlan
from ...programs.named import default_program, exact_program
from ...programs.sizes import sizes_of
from ...programs.spans import Span
from ...programs.steps import Program, ProgramError
from ...programs.topology import Topology
from ...traces.model_trace import ModelTrace
from ...traces.traced_tensors import TracedTensor
from .guard import ANY_ERROR, Fault


def finer(plan: Plan, faults: Iterable[Fault], trace: ModelTrace, accuracy: AccuracyLike, world_size: int) -> Plan:
    """The plan in which faulty units have the next finer compressor that the rule allows, or none at all.

    It is finer than the compressor was in the trace, or than it is now if its error has grown since. A unit keeps its
    program if the compressor can go through it.

    Args:
        faults: the faults of some units.
        trace: the trace of the model, with the errors of compressors.
        accuracy: the rule.
        world_size: the number of ranks.
    """
    tensors = trace.by_name
    allowed = allowed_compressors(trace, accuracy)
    topology = plan.topology or Topology(world_size)
    errors = {fault.key: fault.error if math.isfinite(fault.error) else 0.0 for fault in faults}
    return plan.with_units(
        _finer(unit, errors[unit.key], tensors, allowed, topology, plan.span) if unit.key in errors else unit
        for unit in plan.units
    )


def errors_of(plan: Plan, faults: Iterable[Fault]) -> dict[tuple[str, str], float]:
    """The errors to remember of faulty units, so that no rule with a limit allows their compressors again.

    Args:
        plan: the plan that had the faults.
    """
    return {
        (name, str(unfitted(plan.by_key[fault.key].compressor))): max(fault.error, ANY_ERROR)
        for fault in faults
        for name in plan.by_key[fault.key].parameters
    }


def _finer(
    unit: UnitPlan,
    error: float,
    tensors: Mapping[str, TracedTensor],
    allowed: Mapping[str, tuple[Compressor, ...]],
    topology: Topology,
    span: Span,
) -> UnitPlan:
    """A unit with the next finer compressor, or averaged exactly."""
    mine = [tensors[name] for name in unit.parameters if name in tensors]
    if len(mine) == len(unit.parameters):
        own = unfitted(unit.compressor)
        limit = max(error, *(_error(own, tensor) for tensor in mine))
        choices = {unfitted(method) for method in allowed[unit.parameter]}
        for name in unit.also:
            choices &= {unfitted(method) for method in allowed[name]}
        coded = [method for method in choices if isinstance(method, Codec) and method != own]
        errors = {method: max(_error(method, tensor) for tensor in mine) for method in coded}
        for method in sorted(coded, key=lambda method: (-errors[method], str(method))):
            if errors[method] < limit:
                for program in _programs(unit, method, mine[0].dtype, topology, span):
                    return _coded(unit, method, program)
    return unit.exactly(exact_program(span))


def _error(method: Compressor, tensor: TracedTensor) -> float:
    found = error_on(tensor, method)
    return float("inf") if found is None else found.value


def _programs(unit: UnitPlan, method: Codec, dtype: torch.dtype, topology: Topology, span: Span) -> Iterator[Program]:
    """The programs through which a unit can go with a compressor, its own first."""
    for program in dict.fromkeys((unit.program, default_program(method, topology.world_size, span))):
        try:
            sizes_of(program, unit.numel, dtype, method, topology, span)
        except ProgramError:
            continue
        yield program


def _coded(unit: UnitPlan, method: Codec, program: Program) -> UnitPlan:
    changed = replace(unit, compressor=method, program=program, feedback=method.traits.needs_feedback)
    return changed if program == unit.program else replace(changed, message=None, channel=None)
