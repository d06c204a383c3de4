"""The launches of a plan: buckets of DDP and of attachments to modules, and when they are complete."""

from __future__ import annotations

import pytest
import torch

from gckernels import from_spec
from gckernels.planner.timeline.launches import BucketLaunch, launches_of, messages_of
from gckernels.sync import Plan, UnitPlan
from gckernels.sync.plans.plan import Frontend, PlanError
from gckernels.sync.programs import PROGRAMS
from gckernels.sync.programs.stages import MessageKind
from gckernels.sync.traces.model_trace import ModelTrace
from gckernels.sync.traces.traced_tensors import TracedTensor
from planning import PLANNED

MI = 1 << 20


def unit(name: str, numel: int, spec: str = "BlockQuant", program: str = "alltoall", **changes) -> UnitPlan:
    return UnitPlan(name, numel, from_spec(spec), PROGRAMS[program], True, **changes)


def trace_of(*numels: int, buckets: tuple[tuple[str, ...], ...] = (), **changes) -> ModelTrace:
    """A trace of tensors ``a``, ``b`` and so on, ready after 1, 2, ... seconds."""
    tensors = tuple(
        TracedTensor(name, numel, float(index), **changes)
        for index, (name, numel) in enumerate(zip("abcdefgh", numels, strict=False), start=1)
    )
    return ModelTrace("model", tensors, float(len(tensors)), buckets=buckets)


def plan_of(trace: ModelTrace, spec: str = "BlockQuant", program: str = "alltoall") -> Plan:
    """Units in the order of the parameters, the reverse of that in which gradients are ready."""
    return Plan(tuple(unit(tensor.name, tensor.numel, spec, program) for tensor in reversed(trace.tensors)))


def shown(launches: tuple[BucketLaunch, ...]) -> list[tuple[str, float]]:
    return [("".join(each.plan.key for each in launch.units), launch.ready_s) for launch in launches]


def test_buckets_of_ddp_lie_as_in_the_trace_and_wait_for_their_last_tensor_and_for_each_other():
    trace = trace_of(10, 20, 30, 40, buckets=(("c", "a"), ("b",), ("d",)))
    first, second, third = launches_of(plan_of(trace), trace, Frontend.DDP)
    assert [(each.plan.key, each.start) for each in first.units] == [("c", 0), ("a", 30)]
    assert (first.numel, first.ready_s, first.dtype) == (40, 3.0, torch.float32)
    assert (second.numel, second.ready_s) == (20, 3.0)  # complete at 2, and launched behind the first one
    assert third.ready_s == 4.0


def test_parts_lie_one_after_the_other():
    trace = trace_of(10, 100, buckets=(("a", "b"),))
    plan = Plan((unit("b", 60, start=40), unit("a", 10), unit("b", 40, start=0)))
    (launch,) = launches_of(plan, trace, Frontend.DDP)
    assert [(each.plan.key, each.start, each.stop) for each in launch.units] == [
        *(("a", 0, 10), ("b[0:40]", 10, 50), ("b[40:100]", 50, 110)),
    ]


def test_without_buckets_they_are_cut_as_ddp_cuts_them():
    """The first is complete with 1 MiB, the others with 25 MiB, after the tensor with which they reach it."""
    trace = trace_of(MI // 8, MI // 8, 6 * MI, MI, MI, 7 * MI)  # in floats: 0.5, 0.5, 24, 4, 4 and 28 MiB
    assert shown(launches_of(plan_of(trace), trace, Frontend.DDP)) == [("ab", 2.0), ("cd", 4.0), ("ef", 6.0)]
    assert shown(launches_of(plan_of(trace_of(3, 4)), trace_of(3, 4), Frontend.DDP)) == [("ab", 2.0)]


def test_a_module_cuts_the_plan_from_its_end():
    trace = trace_of(MI, 5 * MI, 2 * MI)
    assert shown(launches_of(plan_of(trace), trace, Frontend.MODULE)) == [("ab", 2.0), ("c", 3.0)]
    merged = Plan((unit("c", 3 * MI, also=("a",)), unit("b", 5 * MI)))
    assert shown(launches_of(merged, trace, Frontend.MODULE)) == [("b", 2.0), ("c+a", 3.0)]


def test_complex_tensors_are_launched_in_reals():
    trace = trace_of(6, dtype=torch.complex64)
    plan = plan_of(trace, "Identity", "allreduce")
    for frontend in PLANNED:
        (launch,) = launches_of(plan, trace, frontend)
        assert (launch.numel, launch.dtype) == (6, torch.float32)


def test_a_plan_without_compression_has_whole_buckets_only_with_ddp():
    trace = trace_of(10, 20, 30, buckets=(("a", "b", "c"),))
    plan = plan_of(trace, "Identity", "allreduce")
    for frontend in PLANNED:
        (launch,) = launches_of(plan, trace, frontend)
        (message,) = messages_of(launch, plan, frontend)
        assert (message.kind, message.start, message.stop) == (MessageKind.IN_PLACE, 0, 60)
    mixed = Plan((plan.units[0], unit("b", 20), plan.units[2]))
    (launch,) = launches_of(mixed, trace, Frontend.DDP)
    assert [(each.kind, each.keys) for each in messages_of(launch, mixed, Frontend.DDP)] == [
        *((MessageKind.IN_PLACE, ("a",)), (MessageKind.IN_PLACE, ("c",)), (MessageKind.ENCODED, ("b",))),
    ]


def test_messages_have_the_compressors_of_a_long_training():
    trace = trace_of(1000)
    plan = plan_of(trace, "DGC(ratio=0.01, warmup_steps=10)", "allgather")
    (launch,) = launches_of(plan, trace, Frontend.MODULE)
    (message,) = messages_of(launch, plan, Frontend.MODULE)
    compressor = plan.units[0].compressor
    assert len(compressor.schedule) > 1
    assert message.units[0].plan.compressor == compressor.schedule[-1][1]


@pytest.mark.parametrize(
    ("units", "problem"),
    [
        ((), "a: not in the plan"),
        ((("a", 10), ("b", 20), ("z", 1)), "z: not in the trace"),
        ((("a", 10), ("b", 21)), "b: 21 elements in the plan, 20 in the trace"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(units, problem):
    plan = Plan(tuple(unit(name, numel) for name, numel in units))
    for frontend in PLANNED:
        with pytest.raises(PlanError, match=problem):
            launches_of(plan, trace_of(10, 20), frontend)


def test_ddp_refuses_merged_parameters_and_incomplete_buckets():
    trace = trace_of(10, 20, buckets=(("a",),))
    with pytest.raises(PlanError, match="bare modules can have them: a\\+b"):
        launches_of(Plan((unit("a", 30, also=("b",)),)), trace, Frontend.DDP)
    with pytest.raises(PlanError, match="do not have each of its tensors once"):
        launches_of(plan_of(trace), trace, Frontend.DDP)
