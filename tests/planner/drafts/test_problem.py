"""Problems refuse what no plan could be made for; drafts become plans that programs and buckets allow."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import gckernels
from gckernels.planner.choice import POLICIES, choose
from gckernels.planner.drafts.drafts import MessageDraft, Option, draft_of_launches, plan_of, usual_launches
from gckernels.sync.accuracy.accuracy import allowed_compressors
from gckernels.sync.plans.plan import Frontend
from gckernels.sync.programs import ALLGATHER, ALLREDUCE, Place
from gckernels.sync.traces.model_trace import ModelTrace
from gckernels.sync.traces.traced_tensors import TracedTensor
from planning import problem_of

SIGN = gckernels.EFSignSGD()
MIXED = tuple(TracedTensor(f"t{at}", 64, 0.0, dtype=each) for at, each in enumerate((torch.float32, torch.bfloat16)))


def traced(*numels: int, buckets: tuple[tuple[str, ...], ...] = ()) -> ModelTrace:
    tensors = tuple(TracedTensor(f"t{index}", numel, 0.001 * index) for index, numel in enumerate(numels))
    return ModelTrace("m", tensors, backward_s=0.001 * len(numels), buckets=buckets)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"trace": ModelTrace("m", (), 0.0)}, ValueError, "no tensors"),
        ({"trace": traced(4, 4)}, ValueError, "no buckets"),
        ({"trace": traced(4, 4, buckets=(("t0",),))}, ValueError, "each of its tensors once"),
        (
            {"trace": ModelTrace("m", MIXED, 0.0, buckets=(("t0", "t1"),))},
            ValueError,
            "'t0' has .* bfloat16 and float32",
        ),
        ({"allowed": {"other": (SIGN,)}}, ValueError, "'other'"),
        ({"places": (Place.HOST,)}, ValueError, "places"),
        ({"frontend": "ddp"}, TypeError, "frontend"),
    ],
)
def test_arguments_that_are_not_valid_are_named(change, error, text):
    problem = problem_of(traced(64, 64, buckets=(("t0", "t1"),)), Frontend.DDP, (SIGN,))
    with pytest.raises(error, match=text):
        replace(problem, **change)


def test_a_tensor_that_may_not_use_the_compressor_travels_in_the_same_program():
    problem = replace(problem_of(traced(64, 8), Frontend.MODULE), allowed={"t0": (SIGN,)})
    plan = plan_of(problem, ((MessageDraft((0, 1), Option(ALLGATHER, SIGN)),),))
    units = {unit.parameter: unit for unit in plan.units}
    assert units["t0"].compressor == SIGN and units["t0"].feedback
    assert units["t1"].compressor == gckernels.Identity() and not units["t1"].feedback
    assert {unit.program for unit in plan.units} == {ALLGATHER}


def test_a_low_rank_method_is_one_compressor_for_matrices_of_all_shapes():
    """The rule of accuracy fits it to each shape."""
    tensors = tuple(TracedTensor(f"t{rows}", 40 * rows, 0.0, (rows, 40)) for rows in (64, 96, 160))
    method, trace = gckernels.PowerSGD(rank=2), ModelTrace("m", tensors, 0.01)
    problem = replace(problem_of(trace, Frontend.MODULE), allowed=allowed_compressors(trace, [method]))
    assert problem.compressors == (method,) and problem.users[method] == {0, 1, 2}
    for plan in (POLICIES["all"](problem), choose(problem, "all:PowerSGD(rank=2)").plan):
        assert {unit.compressor for unit in plan.units} == {method.fit(tensor.shape) for tensor in tensors}


def test_a_tensor_that_cannot_be_encoded_is_averaged_in_place():
    trace = ModelTrace("m", (TracedTensor("t0", 64, 0.0, dtype=torch.float64),), 0.0)
    problem = problem_of(trace, Frontend.MODULE, (SIGN,))
    (unit,) = plan_of(problem, draft_of_launches([[0]], Option(ALLGATHER, SIGN))).units
    assert unit.program == ALLREDUCE and unit.compressor == gckernels.Identity()


def test_parts_cover_a_large_tensor_and_leave_a_small_one_whole():
    problem = problem_of(traced(100_000, 1000), Frontend.MODULE, (SIGN,))
    plan = plan_of(problem, draft_of_launches([[0, 1]], Option(ALLGATHER, SIGN, parts=4)))
    large = sorted((unit.start, unit.numel) for unit in plan.units if unit.parameter == "t0")
    assert [start for start, _ in large] == [0, 25008, 50016, 75024] and sum(numel for _, numel in large) == 100_000
    assert [unit.start for unit in plan.units if unit.parameter == "t1"] == [None]


@pytest.mark.parametrize("draft", [((0,),), ((0,), (1,), (1,)), ((1,), (0,))])
def test_a_draft_has_each_tensor_once_in_the_launches_that_are_given(draft):
    problem = problem_of(traced(64, 64, buckets=(("t0",), ("t1",))), Frontend.DDP)
    with pytest.raises(ValueError, match="draft"):
        plan_of(problem, draft_of_launches(draft, Option()))


def test_launches_of_a_module_are_of_one_dtype_and_size():
    tensors = [TracedTensor(f"t{index}", 100, 0.0) for index in range(5)]
    tensors.append(TracedTensor("half", 100, 0.0, dtype=torch.bfloat16))
    problem = problem_of(ModelTrace("m", tuple(tensors), 0.0), Frontend.MODULE)
    assert usual_launches(problem, 800) == ((0, 1), (2, 3), (4,), (5,))


def test_none_averages_everything_in_place():
    plan = POLICIES["none"](problem_of(traced(64, 64), Frontend.MODULE, (SIGN,)))
    assert all(unit.in_place for unit in plan.units) and [unit.parameter for unit in plan.units] == ["t1", "t0"]
