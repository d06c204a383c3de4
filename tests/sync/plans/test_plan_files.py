"""Plans in files: versions of the format, predictions, and files that are damaged."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gckernels import COMPRESSORS, BlockQuant, EFSignSGD, Identity, sync
from gckernels.sync import Frontend, Plan, PlanError, Prediction, Topology, UnitPlan
from gckernels.sync.plans.json_records import written
from gckernels.sync.plans.prediction import Alternative, Source
from gckernels.sync.programs import ALLGATHER, ALLREDUCE, ALLTOALL

VERSION_1 = """{"format": "gckernels.plan", "version": 1, "topology": {"machines": 2, "devices": 1}, "channels": 2,
"units": [
 {"parameter": "0.weight", "numel": 4096, "compressor": {"name": "BlockQuant", "bits": 4, "block": 256,
  "scale_dtype": "float32"}, "program": [{"step": "Encode", "place": "device"}, {"step": "AllGather", "level": "flat"},
  {"step": "Decode", "place": "device"}], "feedback": true, "start": 0, "root": 0, "also": []},
 {"parameter": "0.bias", "numel": 64, "compressor": {"name": "Identity"},
  "program": [{"step": "AllReduce", "level": "flat"}], "feedback": false, "start": null, "root": 0, "also": []}]}"""
"""A plan as the first version of the format wrote it."""

# -------------------------------------------------------------------- all plans

NUMBERS = st.floats(0, 1e6) | st.integers(0, 2**53)
TEXTS = st.text(max_size=8)
SOURCES = st.builds(Source, TEXTS, TEXTS)
ALTERNATIVES = st.lists(st.builds(Alternative, TEXTS, NUMBERS, NUMBERS), max_size=3).map(tuple)
PREDICTIONS = st.builds(
    Prediction, NUMBERS, NUMBERS, TEXTS, st.booleans(), NUMBERS, SOURCES, SOURCES, NUMBERS, ALTERNATIVES
)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    channels = draw(st.integers(1, 64))
    names = draw(st.lists(TEXTS, max_size=4, unique=True))
    launched = draw(st.booleans())
    units = []
    for index, name in enumerate(names):
        method = COMPRESSORS[draw(st.sampled_from(sorted(COMPRESSORS)))]()
        program = draw(st.sampled_from([ALLREDUCE, ALLGATHER, ALLTOALL, *sync.programs.PROGRAMS.values()]))
        units.append(
            UnitPlan(
                *(name, draw(st.integers(0, 2**40)), method, program, draw(st.booleans())),
                start=draw(st.none() | st.integers(0, 2**40)),
                root=draw(st.integers(0, 7)),
                also=tuple(draw(st.lists(TEXTS.map(lambda text: f"also {text}"), max_size=2))),
                launch=draw(st.integers(0, 9)) if launched else None,
                message=draw(st.none() | st.integers(10 * index, 10 * index + 9)),
                channel=None if program in (ALLREDUCE, sync.programs.POWERSGD) else draw(st.sampled_from([None, 0])),
            )
        )
    frontend = draw(st.sampled_from([None, Frontend.MODULE] if launched else [None, *Frontend]))
    topology = draw(st.none() | st.builds(Topology, st.integers(1, 9), st.integers(1, 9)))
    return Plan(tuple(units), topology, channels, frontend, draw(st.integers(0, 10**9)), draw(st.none() | PREDICTIONS))


@given(plan=plans())
def test_every_plan_goes_to_json_and_back(plan):
    read = Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert read == plan
    assert read.prediction == plan.prediction
    assert read.fingerprint() == plan.fingerprint()
    assert read.lines() == plan.lines()
    without = dataclasses.replace(plan, prediction=None)
    assert without == plan
    assert hash(without) == hash(plan)
    assert (without.fingerprint(), without.lines()) == (plan.fingerprint(), plan.lines())


def test_the_fingerprint_knows_how_a_plan_is_launched():
    unit = UnitPlan("a", 16, BlockQuant(), ALLGATHER, True)
    changes = ({"launch": 0}, {"message": 0}, {"message": 1}, {"channel": 0}, {"channel": 1})
    plans = [Plan((dataclasses.replace(unit, **change),), channels=2) for change in ({}, *changes)]
    plans += [Plan((unit,), channels=2, **change) for change in ({"frontend": Frontend.DDP}, {"start_step": 1})]
    assert len({plan.fingerprint() for plan in plans}) == len(plans) == len({tuple(plan.lines()) for plan in plans})


# -------------------------------------------------------------------- versions


def test_version_1_is_still_read():
    plan = Plan.from_json(json.loads(VERSION_1))
    assert plan == Plan(
        (
            UnitPlan("0.weight", 4096, BlockQuant(bits=4), ALLGATHER, True, start=0),
            UnitPlan("0.bias", 64, Identity(), ALLREDUCE, False),
        ),
        Topology(2),
        channels=2,
    )
    assert (plan.frontend, plan.start_step, plan.prediction, plan.has_launches) == (None, 0, None, False)
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.to_json()["version"] == 2


# -------------------------------------------------------------------- values that are not valid


def record(**changes: Any) -> dict[str, Any]:
    plan = Plan((UnitPlan("a", 16, BlockQuant(), ALLGATHER, True, launch=1, message=2, channel=0),))
    return plan.to_json() | changes


def test_entries_that_no_version_has_are_named():
    with pytest.raises(PlanError, match=r"record must be an object with no other keys than .* one with 'chanels'"):
        Plan.from_json(record(chanels=2))
    wrong = record()
    wrong["units"][0]["lunch"] = 1
    with pytest.raises(PlanError, match=r"units\[0\] must be an object with no other keys than parameter, .*'lunch'"):
        Plan.from_json(wrong)


@pytest.mark.parametrize("name", sorted(COMPRESSORS))
def test_errors_of_compressors_are_short(name):
    fields = [field.name for field in dataclasses.fields(COMPRESSORS[name])]
    wrong = record()
    for value in ({str(each): [] for each in range(1000)}, list(range(1000)), "x" * 5000, 10**5000):
        for field in (*fields, "x" * 5000):
            wrong["units"][0]["compressor"] = {"name": name, field: value}
            with pytest.raises(PlanError) as caught:
                Plan.from_json(wrong)
            assert len(str(caught.value)) < 500, (field, str(value)[:20])


@pytest.mark.parametrize("value", ["DDP", 1, ["ddp"], {}])
def test_the_names_of_ways_to_attach(value):
    with pytest.raises(PlanError, match="frontend must be one of ddp, module, hsdp, fsdp, got"):
        Plan.from_json(record(frontend=value))


GOOD = {
    **{"step_s": 1.5, "none_s": 2, "policy": "auto", "estimated": False, "margin": 0.05, "error": 0},
    **{"machine": {"name": "lab", "fingerprint": "00"}, "trace": {"name": "mlp", "fingerprint": "11"}},
    "alternatives": [{"policy": "none", "step_s": 2.0, "error": 0.0}],
}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ([], " must be an object"),
        ({"step_s": -1}, ".step_s must be a finite number from 0 up, got -1"),
        ({"step_s": float("nan")}, ".step_s must be a finite number"),
        ({"none_s": float("inf")}, ".none_s must be a finite number"),
        ({"none_s": 10**400}, ".none_s must be a finite number"),
        ({"error": True}, ".error must be a finite number"),
        ({"margin": "5 %"}, ".margin must be a finite number"),
        ({"policy": None}, ".policy must be a text, got None"),
        ({"estimated": 0}, ".estimated must be true or false, got 0"),
        ({"machine": "lab"}, ".machine must be an object with name, fingerprint, got 'lab'"),
        ({"machine": {"name": "lab"}}, ".machine must be an object with name, .*, got none with fingerprint"),
        ({"trace": {"name": 1, "fingerprint": ""}}, ".trace.name must be a text, got 1"),
        ({"alternatives": {}}, ".alternatives must be a list"),
        (
            {"alternatives": [GOOD["alternatives"][0], {}]},
            r".alternatives\[1\] must be .*none with policy, step_s",
        ),
        ({"step": 1}, " must be an object with no other keys than .*, got one with 'step'"),
    ],
)
def test_a_prediction_is_checked(change, text):
    assert written(Plan.from_json(record(prediction=GOOD)).prediction) == GOOD
    wrong = GOOD | change if isinstance(change, dict) else change
    with pytest.raises(PlanError, match=f"record: prediction{text}.*; save it again"):
        Plan.from_json(record(prediction=wrong))


def test_a_prediction_has_its_parts():
    source = Source("lab", "00")
    for changes in ({"machine": "lab"}, {"alternatives": []}, {"alternatives": ("none",)}, {"step_s": -1.0}):
        with pytest.raises(PlanError, match=rf"prediction: ({next(iter(changes))} must|some values have wrong)"):
            Prediction(
                **(
                    {"step_s": 1, "none_s": 1, "policy": "", "estimated": True, "margin": 0, "error": 0}
                    | {"machine": source, "trace": source}
                    | changes
                )
            )


# -------------------------------------------------------------------- files


def some_plan() -> Plan:
    parameters = [(f"layer{index}.weight", nn.Parameter(torch.zeros(8, 8))) for index in range(5)]
    return sync.uniform_plan(parameters, EFSignSGD(), world_size=2)


def test_a_plan_in_a_file(tmp_path):
    path = tmp_path / "plan.json"
    for plan in (some_plan(), dataclasses.replace(some_plan(), start_step=3)):
        plan.save(path)
        assert Plan.load(path) == Plan.load(str(path)) == plan
    assert os.listdir(tmp_path) == ["plan.json"]


def test_a_truncated_file_is_refused(tmp_path):
    path = tmp_path / "plan.json"
    some_plan().save(path)
    text = path.read_text()
    for stop in range(0, len(text.rstrip()), 97):
        path.write_text(text[:stop])
        with pytest.raises(PlanError, match=r"plan\.json: no JSON, or cut off, .*; save it again .* gckernels plan"):
            Plan.load(path)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"[" * 100_000, b"1" * 10_000, b'{"format": "gckernels.trace"}'])
def test_what_is_no_plan_at_all(tmp_path, content):
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    with pytest.raises(PlanError, match=r"plan\.json(: no JSON| must be an object with format).*; save it again"):
        Plan.load(path)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError):
        Plan.load(tmp_path / "plan.json")
    with pytest.raises(FileNotFoundError):
        some_plan().save(tmp_path / "folder" / "plan.json")


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_plan_that_cannot_be_written_leaves_the_old_one(tmp_path, call):
    path: Path = tmp_path / "plan.json"
    some_plan().save(path)
    with mock.patch.object(os, call, side_effect=OSError("disk full")), pytest.raises(OSError, match="disk full"):
        dataclasses.replace(some_plan(), start_step=9).save(path)
    assert Plan.load(path) == some_plan()
    assert os.listdir(tmp_path) == ["plan.json"]
