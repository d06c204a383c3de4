"""Plans as JSON: round trips, fingerprints, and records that are refused."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gckernels import COMPRESSORS, BlockQuant, Cast16, EFSignSGD, Identity
from gckernels.sync import Frontend, Plan, PlanError, Topology, UnitPlan
from gckernels.sync.programs import ALLGATHER, ALLREDUCE, ALLTOALL, ENCODED_ALLREDUCE
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


def test_a_plan_says_how_parameters_are_gathered():
    plain = Plan((UNIT,), frontend=Frontend.FSDP)
    plan = dataclasses.replace(plain, weights=BlockQuant())
    assert "weights" not in plain.to_json()
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.fingerprint() != plain.fingerprint() and plan.compresses
    assert plan.for_frontend(Frontend.DDP).weights is None
    for frontend, weights, message in (
        (Frontend.HSDP, BlockQuant(), "weights must be None unless frontend is Frontend.FSDP"),
        (Frontend.FSDP, EFSignSGD(), "weights must be None, BlockQuant, Cast16 or Identity, got EFSignSGD"),
    ):
        with pytest.raises(PlanError, match=message):
            Plan((UNIT,), frontend=frontend, weights=weights)
    with pytest.raises(PlanError, match="record: weights"):
        Plan.from_json(plan.to_json() | {"weights": {"name": "Nothing"}})


@pytest.mark.parametrize("record", [None, [], "plan", {}, {"format": "gckernels.plan"}])
def test_what_is_not_a_plan(record):
    with pytest.raises(PlanError, match=r"record must be an object with format, version, got .*; save it again"):
        Plan.from_json(record)


@pytest.mark.parametrize(
    "change", [{"format": "gckernels.profile"}, {"version": 3}, {"version": "1"}, {"version": True}, {"version": 1.0}]
)
def test_another_format_or_version(change):
    with pytest.raises(PlanError, match=r"record: (format must be one of|version must be an integer from 1)"):
        Plan.from_json(a_plan().to_json() | change)


NOTHING: tuple[Any, ...] = (None, {}, -1.5, object)
WRONG: dict[str, tuple[Any, ...]] = {
    "parameter": (*NOTHING, [], 5),
    "numel": (*NOTHING, [], True, "12", -1),
    "compressor": (
        *NOTHING,
        [],
        {"name": "Nothing"},
        {"name": ["BlockQuant"]},
        {"name": "BlockQuant", "bits": 3},
        {"name": "BlockQuant", "depth": 8},
        {"name": "Cast16", "dtype": "float99"},
    ),
    "program": (*NOTHING, "allgather", [{"step": "AllReduce", "level": "far"}]),
    "feedback": (*NOTHING, [], -1, 2),
    "start": (-1, True, "0", [], {}),
    "root": (None, -1, True, "0"),
    "also": (None, "bias", [1], {}),
    "launch": (-1, True, "0"),
    "message": (-1, True, "0"),
    "channel": (-1, True, "0"),
}
"""Values that the fields of a unit cannot have."""


def test_wrong_and_missing_values_are_named():
    for field, values in WRONG.items():
        for value in values:
            record = a_plan().to_json()
            record["units"][2][field] = value
            with pytest.raises(PlanError, match=rf"record: units\[2\]\.{field}\b.*; save it again with Plan.save"):
                Plan.from_json(record)
    for field in ("parameter", "numel", "compressor", "program", "feedback"):
        record = a_plan().to_json()
        del record["units"][1][field]
        with pytest.raises(PlanError, match=rf"record: units\[1\] must be an object with .*, got none with {field};"):
            Plan.from_json(record)
    for units in (None, 5, "units", {"parameter": "weight"}):
        with pytest.raises(PlanError, match="record: units must be a list"):
            Plan.from_json(a_plan().to_json() | {"units": units})
    record = a_plan().to_json()
    del record["units"]
    with pytest.raises(PlanError, match="got none with units"):
        Plan.from_json(record)


def test_empty_programs_are_read_and_refused_by_checks():
    record = a_plan().to_json()
    record["units"][1]["program"] = []
    assert Plan.from_json(record).units[1].program == ()


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
    tuple(UnitPlan(name, 12, method(), ALLREDUCE, feedback=False, start=0) for name, method in COMPRESSORS.items()),
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
    with pytest.raises(PlanError, match="channels must be an integer from 1 to 64"):
        Plan.from_json(a_plan().to_json() | {"channels": channels})
    with pytest.raises(PlanError, match="channels must be an int from 1 to 64"):
        Plan((UNIT,), channels=channels)
