"""Plans: JSON, fingerprints, and errors for a model that does not fit."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gckernels import METHODS, BlockQuant, Cast16, EFSignSGD, Identity, PowerSGD, sync
from gckernels.sync import (
    ALLGATHER,
    ALLREDUCE,
    ALLTOALL,
    ENCODED_ALLREDUCE,
    HIERARCHICAL,
    PARAMETER_SERVER,
    AllReduce,
    Encode,
    Plan,
    PlanError,
    Topology,
    UnitPlan,
    exempt_vectors,
    parted,
    spread_roots,
)
from ranks import run_ranks, values_of

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
        dataclasses.replace(UNIT, start=0),
        dataclasses.replace(UNIT, root=1),
        dataclasses.replace(UNIT, also=("bias",)),
    ],
)
def test_the_fingerprint_changes_with_every_setting(other):
    assert Plan((other,)).fingerprint() != Plan((UNIT,)).fingerprint()
    assert Plan.from_json(Plan((other,)).to_json()) == Plan((other,))


def test_the_fingerprint_changes_with_the_units_and_their_order():
    first, second = UNIT, dataclasses.replace(UNIT, parameter="second")
    plans = [Plan(()), Plan((first,)), Plan((first, second)), Plan((second, first))]
    plans += [Plan((first,), channels=2), Plan((first,), Topology(2, 2)), Plan((first,), Topology(4))]
    assert len({plan.fingerprint() for plan in plans}) == len(plans)


def test_the_fingerprint_is_the_same_in_every_process():
    # the processes have different hash seeds
    found = values_of(run_ranks(2, fingerprint_here))
    assert {*found, fingerprint_here()} == {found[0]}
    assert len(found[0]) == 64


@pytest.mark.parametrize("record", [None, [], "plan", {}, {"format": "gckernels.plan"}])
def test_what_is_not_a_plan(record):
    with pytest.raises(PlanError, match=r"expected format 'gckernels\.plan', version 1 or 2"):
        Plan.from_json(record)


@pytest.mark.parametrize(
    "change", [{"format": "gckernels.profile"}, {"version": 3}, {"version": "1"}, {"version": True}, {"version": 1.0}]
)
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
        assert Plan.from_json(record).units[1].program == ()  # well-formed JSON, refused by check()
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


def _numbers(record: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths to all numbers in a JSON record."""
    if isinstance(record, dict | list):
        for key, value in record.items() if isinstance(record, dict) else enumerate(record):
            yield from _numbers(value, (*path, key))
    elif type(record) in (int, float):
        yield path


def _with(record: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy of the record with another value at ``path``."""
    if not path:
        return value
    first, *rest = path
    changed = copy.copy(record)
    changed[first] = _with(record[first], tuple(rest), value)
    return changed


def _nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


EVERY_METHOD = Plan(
    tuple(UnitPlan(name, 12, method(), ALLREDUCE, feedback=False, start=0) for name, method in METHODS.items()),
    Topology(2, 2),
)


def test_numbers_are_neither_booleans_nor_anything_else():
    record = EVERY_METHOD.to_json()
    paths = list(_numbers(record))
    assert {"version", "channels", "machines", "numel", "start", "root", "bits", "rank", "ratio"} <= {
        p[-1] for p in paths
    }
    for path in paths:
        for value in (True, "1", [1], _nested(5000), {"a": _nested(40)}):
            with pytest.raises(PlanError):
                Plan.from_json(_with(record, path, value))


@pytest.mark.parametrize("place", ["format", "units", "topology", "more"])
def test_what_is_nested_too_deep_is_refused(place):
    for value in (_nested(5000), {"a": _nested(5000)}):
        with pytest.raises(PlanError, match="levels of nested lists and objects"):
            Plan.from_json(a_plan().to_json() | {place: value})


@pytest.mark.parametrize("channels", [0, -1, 65, 10**9, 10**30, True, 1.0, "1", None])
def test_channels_are_few(channels):
    with pytest.raises(PlanError, match="channels must be an int from 1 to 64"):
        Plan.from_json(a_plan().to_json() | {"channels": channels})
    with pytest.raises(PlanError, match="channels must be an int from 1 to 64"):
        Plan((UNIT,), channels=channels)


# -------------------------------------------------------------------- uniform plans


def test_a_uniform_plan_names_every_parameter_in_order():
    plan = sync.plan(parameters((3, 4), (4,), (), (2, 0)), BlockQuant(), world_size=2)
    assert [(unit.parameter, unit.numel) for unit in plan.units] == [("p0", 12), ("p1", 4), ("p2", 1), ("p3", 0)]
    assert [unit.compressor for unit in plan.units] == [BlockQuant(), Identity(), Identity(), BlockQuant()]
    assert [unit.feedback for unit in plan.units] == [True, False, False, True]
    assert {unit.program for unit in plan.units} == {ALLGATHER}


def test_a_uniform_plan_with_a_program_and_a_rule_of_its_own():
    plan = sync.plan(
        parameters((3, 4), (4,)), Cast16(), program=ALLTOALL, exempt=lambda name, parameter: name == "p0", world_size=4
    )
    assert [unit.compressor for unit in plan.units] == [Identity(), Cast16()]
    assert {unit.program for unit in plan.units} == {ALLTOALL}


@pytest.mark.parametrize("program", [None, ALLTOALL])
def test_a_uniform_plan_leaves_gradients_that_no_compressor_takes_as_they_are(program):
    model = [*parameters((3, 4)), ("double", nn.Parameter(torch.zeros(5, 5, dtype=torch.float64)))]
    plan = sync.plan(model, BlockQuant(), program=program, world_size=3)
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
    plan = parted(sync.plan(model, BlockQuant(), program=program, world_size=world_size), max_numel)
    plan = spread_roots(plan, world_size)
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
    plan = sync.plan(model, PowerSGD(), world_size=2)
    assert parted(plan, 1000) == plan
    merged = Plan((UnitPlan("p0", 20_000, BlockQuant(), ALLGATHER, True, also=("p1",)),))
    assert parted(merged, 1000) == merged
    merged.check(model, 2)
    for wrong in (15, 16.0, None):
        with pytest.raises(ValueError, match="max_numel must be an int from 16 up"):
            parted(plan, wrong)


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
    plan = sync.plan(parameters((3, 4)), BlockQuant(), program=HIERARCHICAL, topology=Topology(2, 2), world_size=4)
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
        spec: [unit.compressor.name for unit in sync.plan(named, spec, world_size=2).units]
        for spec in ("BlockQuant", "Cast16")
    }
    assert names == {"BlockQuant": ["Identity", "BlockQuant"], "Cast16": ["Cast16", "Cast16"]}
    assert sync.plan(named, "Cast16", exempt=exempt_vectors, world_size=2).units[0].compressor.name == "Identity"
