"""``gckernels plan`` and ``explain`` for models of FSDP2: from a recorded trace to a plan that ``attach`` takes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from command_files import run_json, run_text, small_trace
from gckernels import sync
from gckernels.sync import Plan, Topology
from gckernels.sync.plans.plan import Frontend
from gckernels.sync.programs.named import SHARDS
from gckernels.sync.traces.model_trace import ModelTrace
from gckernels.sync.traces.traced_tensors import TracedGather
from ranks import run_ranks, values_of
from sharded_models import SETTINGS, adamw, model_of, train

QUICK = ("--policy", "all")


@pytest.fixture
def trace(tmp_path):
    """The path of a trace of two groups, the later one of which is the root."""
    traced = small_trace(buckets=True)
    last, root = traced.buckets
    gathers = (
        TracedGather(root, 0.0, 0.0),
        TracedGather(last, 0.005, 0.005),
        TracedGather(last, 0.01, 0.01),
    )
    path = tmp_path / "sharded.trace.json"
    replace(traced, gathers=gathers).save(path)
    return str(path)


def machine_of(ranks: int, bit_per_s: float = 1e7) -> str:
    """A description of two machines, with slow links between them."""
    path: Any = Path(__file__).parents[3] / "planner/machines/shipped/lab.json"
    record = json.loads(path.read_text())
    record["topology"] = {"machines": 2, "devices": ranks // 2}
    record["links"]["inter"]["bandwidth_bit_per_s"] = bit_per_s
    if ranks > 2:
        record["links"]["intra"] = {**record["links"]["inter"], "bandwidth_bit_per_s": 1e9}
        record["sources"]["links.intra"] = "as a test needs it"

    return json.dumps(record)


@pytest.fixture
def slow(tmp_path):
    """The path of the description of four ranks."""
    path = tmp_path / "machine.json"
    path.write_text(machine_of(4))
    return str(path)


def test_shards_on_all_ranks_are_the_default_of_a_trace_with_gathers(trace, slow, tmp_path, capsys):
    path = tmp_path / "plan.json"
    code, found = run_json(capsys, "plan", trace, slow, "-o", str(path))
    assert code == 0 and found["frontend"] == "fsdp" and found["pays"]
    assert [row["policy"] for row in found["policies"]] == ["none", "all", "threshold", "auto"]
    plan = Plan.load(path)
    assert plan.made_for is Frontend.FSDP and plan.compresses and plan.topology is None
    assert plan.prediction.none_s == found["none_s"] and plan.prediction.step_s == found["step_s"]
    sent = {unit.program for unit in plan.units if unit.parameter.endswith("weight")}
    assert sent == {SHARDS}


def test_encoded_gathers_are_a_part_of_the_gain(trace, slow, capsys):
    """Without compression parameters are gathered as they are."""
    plain = run_json(capsys, "plan", trace, slow, *QUICK)[1]
    encoded = run_json(capsys, "plan", trace, slow, *QUICK, "--weights", "BlockQuant")[1]
    assert encoded["none_s"] == plain["none_s"] and encoded["step_s"] < plain["step_s"]
    assert encoded["weights"] == "BlockQuant" and plain["weights"] is None
    shown = run_text(capsys, "plan", trace, slow, *QUICK, "--weights", "BlockQuant")[1]
    assert "; parameters by BlockQuant." in shown and "Compress with the plan of all: " in shown
    exact = run_json(capsys, "plan", trace, slow, "--accuracy", "exact", "--weights", "BlockQuant")
    assert exact[0] == 0 and exact[1]["compresses"]


def test_replicas_between_machines_send_shards(trace, slow, tmp_path, capsys):
    """A plan names whole parameters, whose shards a machine of 2 devices averages with another one."""
    path = tmp_path / "plan.json"
    code, found = run_json(capsys, "plan", trace, slow, *QUICK, "--frontend", "hsdp", "-o", str(path))
    assert code == 0 and found["topology"] == {"machines": 2, "devices": 1}
    plan = Plan.load(path)
    assert plan.made_for is Frontend.HSDP and plan.topology == Topology(2)
    assert {unit.numel for unit in plan.units} == {512, 512 * 512}
    on_all = run_json(capsys, "plan", trace, slow, *QUICK)[1]
    assert found["none_s"] < on_all["none_s"]  # parameters stay inside a machine


@pytest.mark.parametrize("options", [(), ("--weights", "BlockQuant(bits=4)"), ("--frontend", "hsdp")])
def test_plans_are_explained_and_swept(trace, slow, tmp_path, capsys, options):
    plan, events = str(tmp_path / "plan.json"), tmp_path / "events.json"
    run_json(capsys, "plan", trace, slow, *QUICK, *options, "-o", plan)
    code, shown, notes = run_text(capsys, "explain", trace, slow, plan, "--perfetto", str(events))
    assert code == 0 and "as fast as without compression" in shown and "made from another" not in notes
    assert any(each.get("cat") == "gather" for each in json.loads(events.read_text())["traceEvents"])
    code, found = run_json(
        capsys, "plan", trace, slow, *QUICK, *options, "--sweep", "bandwidth=1gbit,10gbit", "machines=2,4"
    )
    assert code == 0 and len(found["sweeps"]) == 2


@pytest.mark.parametrize(
    ("machine", "options", "problem"),
    [
        (
            "lab",
            ("--frontend", "ddp", "--weights", "BlockQuant"),
            "--weights is for models of --frontend fsdp,",
        ),
        ("lab", ("--frontend", "hsdp", "--weights", "BlockQuant"), "--weights is for models of --frontend fsdp,"),
        ("lab", ("--weights", "EFSignSGD"), "must be None, BlockQuant, Cast16 or Identity, got EFSignSGD"),
        ("lab", ("--policy", "mergecomp"), "mergecomp plans for models whose ranks all get the mean"),
    ],
)
def test_wrong_arguments_are_refused(trace, capsys, machine, options, problem):
    code, _, notes = run_text(capsys, "plan", trace, machine, *options)
    assert code == 2 and problem in notes


def test_traces_of_other_models_are_refused(tmp_path, capsys):
    path = tmp_path / "ddp.trace.json"
    small_trace(buckets=True).save(path)
    code, _, notes = run_text(capsys, "plan", str(path), "lab", "--frontend", "fsdp")
    assert code == 3 and "the trace has no gathers of parameters" in notes


# -------------------------------------------------------------------- from a recording to an attachment


def recorded(form: str) -> str:
    model = model_of(SETTINGS["plain"], form)
    recording = sync.trace_model(model, 2, warmup=1, compressors=["BlockQuant(bits=4)"])
    train(model, SETTINGS["plain"], range(4), adamw(model))
    return recording.trace.to_text()


def attached(form: str, path: str) -> tuple[str, str]:
    """The policy of the plan, and the fingerprint of the plan after some steps."""
    model = model_of(SETTINGS["plain"], form)
    attachment = sync.attach(model, Plan.load(path))
    train(model, SETTINGS["plain"], range(3), adamw(model))
    found = attachment.plan
    attachment.close()
    assert found.prediction is not None
    return found.prediction.policy, found.fingerprint()


@pytest.mark.parametrize(
    ("form", "ranks", "weights"), [("fsdp", 2, "BlockQuant"), pytest.param("hsdp", 4, None, marks=pytest.mark.slow)]
)
def test_a_model_is_recorded_planned_for_and_attached(tmp_path, capsys, form, ranks, weights):
    traced, machine, plan = (tmp_path / name for name in ("trace.json", "machine.json", "plan.json"))
    traced.write_text(values_of(run_ranks(ranks, recorded, form, fresh=True, exits=False))[0])
    machine.write_text(machine_of(ranks, 1e4))  # the model is tiny
    options = ("--weights", weights) if weights else ()
    code, found = run_json(capsys, "plan", str(traced), str(machine), "--frontend", form, *options, "-o", str(plan))
    assert code == 0 and found["compresses"] and ModelTrace.load(traced).buckets
    outcomes = values_of(run_ranks(ranks, attached, form, str(plan), fresh=True, exits=False))
    loaded = Plan.load(plan)
    assert loaded.prediction is not None and loaded.prediction.policy in ("auto", "all") and loaded.compresses
    assert set(outcomes) == {(loaded.prediction.policy, loaded.fingerprint())}
    assert (loaded.weights is None) == (weights is None)
