"""Plans: uniform ones, parts, roots, and errors for a model that does not fit."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gckernels import BlockQuant, Cast16, Identity, PowerSGD, sync
from gckernels.sync import Plan, PlanError, Topology, UnitPlan, exempt_vectors
from gckernels.sync.programs import ALLGATHER, ALLREDUCE, ALLTOALL, HIERARCHICAL, PARAMETER_SERVER, AllReduce, Encode


def parameters(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[tuple[str, nn.Parameter]]:
    return [(f"p{index}", nn.Parameter(torch.zeros(shape, dtype=dtype))) for index, shape in enumerate(shapes)]


# -------------------------------------------------------------------- uniform plans


def test_a_uniform_plan_names_every_parameter_in_order():
    plan = sync.uniform_plan(parameters((3, 4), (4,), (), (2, 0)), BlockQuant(), world_size=2)
    assert [(unit.parameter, unit.numel) for unit in plan.units] == [("p0", 12), ("p1", 4), ("p2", 1), ("p3", 0)]
    assert [unit.compressor for unit in plan.units] == [BlockQuant(), Identity(), Identity(), BlockQuant()]
    assert [unit.feedback for unit in plan.units] == [True, False, False, True]
    assert {unit.program for unit in plan.units} == {ALLGATHER}


def test_a_uniform_plan_with_a_program_and_a_rule_of_its_own():
    plan = sync.uniform_plan(
        parameters((3, 4), (4,)), Cast16(), program=ALLTOALL, exempt=lambda name, parameter: name == "p0", world_size=4
    )
    assert [unit.compressor for unit in plan.units] == [Identity(), Cast16()]
    assert {unit.program for unit in plan.units} == {ALLTOALL}


@pytest.mark.parametrize("program", [None, ALLTOALL])
def test_a_uniform_plan_leaves_gradients_that_no_compressor_takes_as_they_are(program):
    model = [*parameters((3, 4)), ("double", nn.Parameter(torch.zeros(5, 5, dtype=torch.float64)))]
    plan = sync.uniform_plan(model, BlockQuant(), program=program, world_size=3)
    assert plan.units == (
        UnitPlan("p0", 12, BlockQuant(), ALLTOALL, True),
        UnitPlan("double", 25, Identity(), ALLREDUCE, False),
    )
    plan.check(model, 3)


def test_vectors_are_exempt():
    exempt = [exempt_vectors(name, parameter) for name, parameter in parameters((), (5,), (1, 1), (2, 3, 4))]
    assert exempt == [True, True, False, False]


def unit(index: int, numel: int = 0, **changes) -> UnitPlan:
    return dataclasses.replace(UnitPlan(f"p{index}", numel, BlockQuant(), ALLGATHER, True), **changes)


# -------------------------------------------------------------------- parts, roots, plans that fit in part


@given(
    numels=st.lists(st.integers(0, 5000), max_size=6),
    max_numel=st.integers(16, 3000),
    world_size=st.integers(1, 5),
    program=st.sampled_from([ALLTOALL, PARAMETER_SERVER]),
)
def test_parts_are_all_of_it(numels, max_numel, world_size, program):
    model = parameters(*((numel, 1) for numel in numels))
    plan = sync.uniform_plan(model, BlockQuant(), program=program, world_size=world_size).parted(max_numel)
    plan = plan.spread_roots(world_size)
    plan.check(model, world_size)  # the parts have no gaps and no overlaps
    assert all(unit.numel <= max_numel for unit in plan.units)
    assert len({unit.key for unit in plan.units}) == len(plan.units)
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    load = [sum(unit.numel for unit in plan.units if unit.root == rank) for rank in range(world_size)]
    if program == ALLTOALL:
        assert load[0] == sum(numels)
    else:
        assert max(load) - min(load) <= max((unit.numel for unit in plan.units), default=0)


def test_what_has_no_parts():
    model = parameters((100, 100), (100, 100))
    plan = sync.uniform_plan(model, PowerSGD(), world_size=2)
    assert plan.parted(1000) == plan
    merged = Plan((UnitPlan("p0", 20_000, BlockQuant(), ALLGATHER, True, also=("p1",)),))
    assert merged.parted(1000) == merged
    merged.check(model, 2)
    for wrong in (15, 16.0, None):
        with pytest.raises(ValueError, match="max_numel must be an int from 16 up"):
            plan.parted(wrong)


@pytest.mark.parametrize(
    ("units", "message"),
    [
        (
            [{"start": 0, "numel": 6}, {"start": 7, "numel": 5}],
            "p0: its parts leave a gap, or overlap, between 6 and 7",
        ),
        ([{"start": 0, "numel": 6}, {"start": 5, "numel": 7}], "between 5 and 6"),
        ([{"start": 0, "numel": 6}, {"start": 6, "numel": 5}], "p0: its parts have 11 elements, the model's has 12"),
        ([{"start": 0, "numel": 6}, {"numel": 6}], "p0: in the plan 2 times"),
        ([{"numel": 12, "root": 2}], "p0: root must be a rank from 0 to 1, got 2"),
        ([{"numel": 16, "also": ("p1",)}, {"parameter": "p1", "numel": 4}], "p1: in the plan 2 times"),
        ([{"numel": 17, "also": ("p1",)}], "p0: 17 elements in the plan, 16 in the model"),
        ([{"numel": 16, "also": ("p9",)}], "p9: not a parameter of the model"),
        ([{"numel": 12, "program": HIERARCHICAL}], "p0: program ReduceScatter.* the plan has no topology"),
        ([{"start": 0, "numel": 12, "compressor": PowerSGD(rows=3)}], "PowerSGD takes whole parameters"),
    ],
)
def test_units_that_do_not_fit(units, message):
    planned = [unit(0, **{"numel": 12} | changes) for changes in units]
    plan = Plan(tuple(planned))
    with pytest.raises(PlanError, match=message):
        plan.check(parameters((3, 4), (4,)), 2)


def test_a_plan_is_for_its_topology():
    plan = sync.uniform_plan(
        parameters((3, 4)), BlockQuant(), program=HIERARCHICAL, topology=Topology(2, 2), world_size=4
    )
    plan.check(parameters((3, 4)), 4)
    assert Plan.from_json(plan.to_json()) == plan
    with pytest.raises(PlanError, match=r"plan is for Topology\(machines=2, devices=2\), here are 6 ranks"):
        plan.check(parameters((3, 4)), 6)


def test_a_plan_that_fits_in_part():
    """Parameters that differ from the plan are averaged exactly, and the changes are listed."""
    model = parameters((3, 4), (4,), (32, 1), (5,))
    plan = Plan((unit(0, 12), unit(1, 5), unit(7, 3), unit(2, 16, start=0), unit(2, 15, start=16)))
    fitted, changes = plan.fitted(model)
    fitted.check(model, 2)
    assert fitted.units[0] == plan.units[0]
    assert {unit.key: unit.program for unit in fitted.units[1:]} == dict.fromkeys(["p1", "p2", "p3"], ALLREDUCE)
    assert changes == [
        "p1: 5 elements in the plan, 4 in the model",
        "p7: not a parameter of the model that needs a gradient",
        "p2[0:16]: its parts have 31 elements, the model's has 32",
        "p2[16:31]: its parts have 31 elements, the model's has 32",
        "p1: averaged exactly",
        "p2: averaged exactly",
        "p3: averaged exactly",
    ]
    assert fitted.fitted(model) == (fitted, [])


# -------------------------------------------------------------------- Plan.check


def test_a_plan_that_fits():
    Plan((unit(0, 12), unit(1, 4))).check(parameters((3, 4), (4,)), 2)
    Plan((unit(1, 4), unit(0, 12))).check(parameters((3, 4), (4,)), 2)  # the order of the model does not matter
    Plan(()).check([], 2)


def test_check_lists_everything_that_is_wrong():
    plan = Plan(
        (
            unit(0, 12),
            unit(0, 12),
            unit(1, 5),
            unit(2, 6, program=(Encode(), AllReduce(), Encode())),
            unit(9, 1),
        )
    )
    with pytest.raises(PlanError) as caught:
        plan.check(parameters((3, 4), (4,), (6,), (8,)), 2)
    lines = str(caught.value).splitlines()
    assert lines[0] == "plan does not fit the model:"
    assert sorted(line.split(":")[0].strip() for line in lines[1:]) == ["p0", "p1", "p2", "p3", "p9"]
    text = str(caught.value)
    for output in (
        "p0: in the plan 2 times",
        "p1: 5 elements in the plan, 4 in the model",
        "p3: not in the plan",
        "p9: not a parameter of the model",
        "p2: program Encode AllReduce Encode: step 1, AllReduce: payloads of BlockQuant cannot be added",
    ):
        assert output in text


def test_a_gradient_that_no_compressor_takes():
    with pytest.raises(PlanError, match=r"p0: .*float64"):
        Plan((unit(0, 12),)).check(parameters((3, 4), dtype=torch.float64), 2)
    dense = Plan((unit(0, 12, program=ALLREDUCE),))
    dense.check(parameters((3, 4), dtype=torch.float64), 2)  # an exact unit may have any dtype


def test_by_default_vectors_are_exact_except_for_casts():
    named = [("bias", torch.nn.Parameter(torch.zeros(5))), ("weight", torch.nn.Parameter(torch.zeros(3, 4)))]
    names = {
        spec: [unit.compressor.name for unit in sync.uniform_plan(named, spec, world_size=2).units]
        for spec in ("BlockQuant", "Cast16")
    }
    assert names == {"BlockQuant": ["Identity", "BlockQuant"], "Cast16": ["Cast16", "Cast16"]}
    assert (
        sync.uniform_plan(named, "Cast16", exempt=exempt_vectors, world_size=2).units[0].compressor.name == "Identity"
    )
