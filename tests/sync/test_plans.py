"""Plans: JSON, fingerprints, what does not fit a model."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from ranks import run_ranks, values_of
from torch import nn

from gckernels import BlockQuant, Cast16, EFSignSGD, Identity
from gckernels.sync import (
    ALLGATHER,
    ALLREDUCE,
    ALLTOALL,
    ENCODED_ALLREDUCE,
    AllReduce,
    Encode,
    Plan,
    PlanError,
    UnitPlan,
    exempt_vectors,
    uniform_plan,
)

UNIT = UnitPlan("weight", 12, BlockQuant(bits=4), ALLGATHER, True)


def a_plan() -> Plan:
    return Plan(
        (
            UNIT,
            UnitPlan("bias", 3, Identity(), ALLREDUCE, False),
            UnitPlan("other", 7, Cast16(torch.float16), ENCODED_ALLREDUCE, True),
            UnitPlan("Größe", 70_000, EFSignSGD(), ALLTOALL, True),
        )
    )


def fingerprint_here() -> str:
    return a_plan().fingerprint()


def parameters(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[tuple[str, nn.Parameter]]:
    return [(f"p{index}", nn.Parameter(torch.zeros(shape, dtype=dtype))) for index, shape in enumerate(shapes)]


# -------------------------------------------------------------------- JSON and fingerprints


def test_json_round_trip():
    plan = a_plan()
    read = Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert read == plan
    assert read.fingerprint() == plan.fingerprint()
    assert Plan.from_json(Plan(()).to_json()) == Plan(())


@pytest.mark.parametrize(
    "other",
    [
        dataclasses.replace(UNIT, parameter="weights"),
        dataclasses.replace(UNIT, numel=13),
        dataclasses.replace(UNIT, compressor=BlockQuant(bits=8)),
        dataclasses.replace(UNIT, compressor=BlockQuant(bits=4, block=512)),
        dataclasses.replace(UNIT, compressor=BlockQuant(bits=4, scale_dtype=torch.bfloat16)),
        dataclasses.replace(UNIT, compressor=EFSignSGD()),
        dataclasses.replace(UNIT, program=ALLTOALL),
        dataclasses.replace(UNIT, feedback=False),
    ],
)
def test_the_fingerprint_changes_with_every_setting(other):
    assert Plan((other,)).fingerprint() != Plan((UNIT,)).fingerprint()
    assert Plan.from_json(Plan((other,)).to_json()) == Plan((other,))


def test_the_fingerprint_changes_with_the_units_and_their_order():
    first, second = UNIT, dataclasses.replace(UNIT, parameter="second")
    plans = [Plan(()), Plan((first,)), Plan((first, second)), Plan((second, first))]
    assert len({plan.fingerprint() for plan in plans}) == len(plans)


def test_the_fingerprint_is_the_same_in_every_process():
    # the processes have different hash seeds
    found = values_of(run_ranks(2, fingerprint_here))
    assert {*found, fingerprint_here()} == {found[0]}
    assert len(found[0]) == 64


@pytest.mark.parametrize("record", [None, [], "plan", {}, {"format": "gckernels.plan"}])
def test_what_is_not_a_plan(record):
    with pytest.raises(PlanError, match=r"expected format 'gckernels\.plan', version 1"):
        Plan.from_json(record)


@pytest.mark.parametrize("change", [{"format": "gckernels.profile"}, {"version": 2}, {"version": "1"}])
def test_another_format_or_version(change):
    with pytest.raises(PlanError, match="expected format"):
        Plan.from_json(a_plan().to_json() | change)


@pytest.mark.parametrize("units", [None, 5, "units", {"parameter": "weight"}])
def test_units_are_a_list(units):
    with pytest.raises(PlanError, match="units"):
        Plan.from_json(a_plan().to_json() | {"units": units})


def test_a_plan_without_units_is_not_one():
    record = a_plan().to_json()
    del record["units"]
    with pytest.raises(PlanError, match="units"):
        Plan.from_json(record)


@pytest.mark.parametrize("field", ["parameter", "numel", "compressor", "program", "feedback"])
@pytest.mark.parametrize("value", ["missing", None, [], {}, -1.5, object])
def test_a_malformed_unit_is_named(field, value):
    record = a_plan().to_json()
    if value == "missing":
        del record["units"][1][field]
    else:
        record["units"][1][field] = value
    if (field, value) == ("program", []):
        assert Plan.from_json(record).units[1].program == ()  # well formed; check() refuses it
        return
    with pytest.raises(PlanError, match="unit 1 is not valid"):
        Plan.from_json(record)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("numel", True),
        ("numel", "12"),
        ("feedback", 1),
        ("compressor", {"name": "Nothing"}),
        ("compressor", {"name": ["BlockQuant"]}),
        ("compressor", {"name": "BlockQuant", "bits": 3}),
        ("compressor", {"name": "BlockQuant", "depth": 8}),
        ("compressor", {"name": "Cast16", "dtype": "float99"}),
        ("program", [{"step": "AllReduce", "level": "far"}]),
        ("program", "allgather"),
    ],
)
def test_a_wrong_value_is_named(field, value):
    record = a_plan().to_json()
    record["units"][2][field] = value
    with pytest.raises(PlanError, match="unit 2 is not valid"):
        Plan.from_json(record)


# -------------------------------------------------------------------- uniform plans


def test_a_uniform_plan_names_every_parameter_in_order():
    plan = uniform_plan(parameters((3, 4), (4,), (), (2, 0)), BlockQuant(), 2)
    assert [(unit.parameter, unit.numel) for unit in plan.units] == [("p0", 12), ("p1", 4), ("p2", 1), ("p3", 0)]
    assert [unit.compressor for unit in plan.units] == [BlockQuant(), Identity(), Identity(), BlockQuant()]
    assert [unit.feedback for unit in plan.units] == [True, False, False, True]
    assert {unit.program for unit in plan.units} == {ALLGATHER}


def test_a_uniform_plan_with_a_program_and_a_rule_of_its_own():
    plan = uniform_plan(parameters((3, 4), (4,)), Cast16(), 4, ALLTOALL, lambda name, parameter: name == "p0")
    assert [unit.compressor for unit in plan.units] == [Identity(), Cast16()]
    assert {unit.program for unit in plan.units} == {ALLTOALL}


@pytest.mark.parametrize("program", [None, ALLTOALL])
def test_a_uniform_plan_leaves_gradients_that_no_compressor_takes_as_they_are(program):
    model = [*parameters((3, 4)), ("double", nn.Parameter(torch.zeros(5, 5, dtype=torch.float64)))]
    plan = uniform_plan(model, BlockQuant(), 3, program)
    assert plan.units == (
        UnitPlan("p0", 12, BlockQuant(), ALLTOALL, True),
        UnitPlan("double", 25, Identity(), ALLREDUCE, False),
    )
    plan.check(model, 3)


def test_vectors_are_exempt():
    exempt = [exempt_vectors(name, parameter) for name, parameter in parameters((), (5,), (1, 1), (2, 3, 4))]
    assert exempt == [True, True, False, False]


# -------------------------------------------------------------------- check


def unit(index: int, numel: int, **changes) -> UnitPlan:
    return dataclasses.replace(UnitPlan(f"p{index}", numel, BlockQuant(), ALLGATHER, True), **changes)


def test_a_plan_that_fits():
    Plan((unit(0, 12), unit(1, 4))).check(parameters((3, 4), (4,)), 2)
    Plan((unit(1, 4), unit(0, 12))).check(parameters((3, 4), (4,)), 2)  # the order is not the model's: no matter
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
    for said in (
        "p0: in the plan 2 times",
        "p1: 5 elements in the plan, 4 in the model",
        "p3: not in the plan",
        "p9: not a parameter of the model",
        "p2: program Encode AllReduce Encode: step 1, AllReduce: payloads of BlockQuant cannot be added",
    ):
        assert said in text


def test_a_gradient_that_no_compressor_takes():
    with pytest.raises(PlanError, match=r"p0: .*float64"):
        Plan((unit(0, 12),)).check(parameters((3, 4), dtype=torch.float64), 2)
    dense = Plan((unit(0, 12, program=ALLREDUCE),))
    dense.check(parameters((3, 4), dtype=torch.float64), 2)  # is averaged as it is
