"""Launches: the buckets of gradients in which a plan is executed, and when each is complete."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from gckernels.sync.plans.buckets import BUCKET_NBYTES, cut_buckets
from gckernels.sync.plans.grouping import MessageSpec, PlacedUnit, group_units, whole_bucket
from gckernels.sync.plans.plan import Frontend, Plan, PlanError, UnitPlan
from gckernels.sync.programs.named import ALLREDUCE
from gckernels.sync.programs.steps import Collective, Program
from gckernels.sync.traces.model_trace import ModelTrace
from gckernels.sync.traces.traced_tensors import TracedTensor

FIRST_BUCKET_NBYTES = 1 << 20
"""The size of DDP's first bucket."""
_STEADY = 1 << 40  # a step after the last milestone of all compressors


@dataclass(frozen=True)
class BucketLaunch:
    """A bucket that is launched as soon as it is complete and all launches before it are launched."""

    units: tuple[PlacedUnit, ...]  # its units, in the order of its memory
    numel: int  # the number of its elements, in real numbers
    dtype: torch.dtype  # the dtype of its elements, which are real
    ready_s: float  # seconds from the start of backward until it is launched, if nothing delays backward


def launches_of(plan: Plan, trace: ModelTrace, frontend: Frontend) -> tuple[BucketLaunch, ...]:
    """The launches of a training step, in order.

    With DDP and FSDP2 they are the buckets of the trace. If it has none, they are cut as DDP cuts them after its first
    step: in the order in which gradients are ready, the first one complete with 1 MiB, all others with 25 MiB. A bare
    module has the launches of the plan, or else buckets of at most 25 MiB, from the last unit of the plan to the first.

    Args:
        plan: the plan, which names each tensor of the trace.
        frontend: what executes the plan.

    Raises:
        PlanError: the plan does not fit the trace, or merges parameters for DDP or FSDP2.
    """
    tensors = trace.by_name
    units = _units_by_tensor(plan, tensors)
    launches: list[BucketLaunch] = []
    ready_s = 0.0
    for placed, dtype in _module(plan, tensors) if frontend.plans_launches else _buckets(units, trace, tensors):
        ready_s = max([ready_s, *(tensors[name].ready_s for unit in placed for name in unit.plan.parameters)])
        launches.append(BucketLaunch(placed, placed[-1].stop, dtype.to_real(), ready_s))
    return tuple(launches)


def messages_of(launch: BucketLaunch, plan: Plan, frontend: Frontend) -> tuple[MessageSpec, ...]:
    """The messages of a launch, in the order of their submission, after the last milestone of all compressors.

    DDP averages whole buckets without a hook if the plan compresses nothing, and so does FSDP2 with replicas. Without
    them it reduces them to shards, which is no message.
    """
    if has_no_hook(plan, frontend):
        return () if frontend.gathers else (whole_bucket(launch.units, launch.numel),)
    units = launch.units
    if frontend.gathers:
        units = tuple(replace(unit, plan=unit.plan.sent_to_shards(plan.span)) for unit in units)
    if any(len(unit.plan.compressor.schedule) > 1 for unit in units):
        units = tuple(replace(unit, plan=unit.plan.at_step(_STEADY)) for unit in units)
    return group_units(units, plan.channels)


def phases_of(programs: Iterable[Program]) -> int:
    """The number of collectives of the longest program that is not in place; 1 if there is none."""
    encoded = {id(program): program for program in programs if program != ALLREDUCE}
    return max((sum(isinstance(step, Collective) for step in each) for each in encoded.values()), default=1)


def has_no_hook(plan: Plan, frontend: Frontend) -> bool:
    """Whether DDP or FSDP2 averages all gradients itself, because the plan compresses nothing."""
    return not frontend.plans_launches and not plan.compresses


def _units_by_tensor(plan: Plan, tensors: Mapping[str, TracedTensor]) -> dict[str, list[UnitPlan]]:
    """The units of each tensor in the order of its memory.

    Raises:
        PlanError: the plan does not fit the tensors.
    """
    units: dict[str, list[UnitPlan]] = {}
    for unit in plan.units:
        for name in unit.parameters:
            units.setdefault(name, []).append(unit)
    wrong = [f"{name}: not in the plan" for name in tensors if name not in units]
    wrong += [f"{name}: not in the trace" for name in units if name not in tensors]
    for name, each in units.items():
        first = each[0]
        if name == first.parameter and not wrong:
            planned, traced = first.numel, tensors[name].numel
            if len(each) > 1:
                each.sort(key=lambda unit: unit.start or 0)
                planned = sum(unit.numel for unit in each)
            if first.also:
                traced = sum(tensors[other].numel for other in first.parameters)
            if planned != traced:
                wrong.append(f"{name}: {planned} elements in the plan, {traced} in the trace")
    if wrong:
        raise PlanError("plan does not fit the trace:\n  " + "\n  ".join(wrong))
    return units


def _module(plan: Plan, tensors: Mapping[str, TracedTensor]) -> list[tuple[tuple[PlacedUnit, ...], torch.dtype]]:
    dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    return [(bucket.units, bucket.dtype) for bucket in cut_buckets(plan, dtypes, BUCKET_NBYTES)]


def _buckets(
    units: dict[str, list[UnitPlan]], trace: ModelTrace, tensors: Mapping[str, TracedTensor]
) -> list[tuple[tuple[PlacedUnit, ...], torch.dtype]]:
    if merged := [unit.key for each in units.values() for unit in each if unit.also]:
        raise PlanError(
            f"plan merges parameters, which DDP's buckets may part; bare modules can have them: {', '.join(merged)}"
        )
    buckets = trace.buckets or _cut_as_ddp(trace.tensors)
    if sorted(name for bucket in buckets for name in bucket) != sorted(tensors):
        raise PlanError("plan cannot be launched: the buckets of the trace do not have each of its tensors once")
    launches = []
    for bucket in buckets:
        placed, first = [], 0
        for name in bucket:
            placed += [PlacedUnit(unit, first + (unit.start or 0)) for unit in units[name]]
            first += tensors[name].numel
        launches.append((tuple(placed), tensors[bucket[0]].dtype))
    return launches


def _cut_as_ddp(tensors: Sequence[TracedTensor]) -> tuple[tuple[str, ...], ...]:
    """DDP's buckets. A bucket has tensors of one dtype, and is complete when it has reached its size."""
    buckets: list[tuple[str, ...]] = []
    gathered: dict[torch.dtype, tuple[int, list[str]]] = {}
    limits: dict[torch.dtype, int] = {}
    for tensor in sorted(tensors, key=lambda each: each.ready_s):
        real = tensor.dtype.to_real()
        nbytes, names = gathered.pop(tensor.dtype, (0, []))
        nbytes += tensor.numel * real.itemsize
        names.append(tensor.name)
        if nbytes >= limits.get(tensor.dtype, FIRST_BUCKET_NBYTES):
            limits[tensor.dtype] = BUCKET_NBYTES
            buckets.append(tuple(names))
        else:
            gathered[tensor.dtype] = (nbytes, names)
    return (*buckets, *(tuple(names) for _, names in gathered.values()))
