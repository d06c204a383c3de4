"""``gckernels explain`` says what each message costs, and what the step would take otherwise."""

from __future__ import annotations

import importlib.util
import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest

from command_files import LAYERS, NUMEL, run_json, run_text, small_trace, write_small_plan, write_small_trace
from gckernels.planner.choice import POLICIES
from gckernels.planner.commands.studies.explanation import chain_of
from gckernels.planner.drafts.problem import Problem
from gckernels.planner.machines.files import load_machine
from gckernels.planner.timeline.pricing import Pricer
from gckernels.planner.timeline.timeline import timeline
from gckernels.sync import Plan
from gckernels.sync.accuracy.accuracy import allowed_compressors
from gckernels.sync.plans.plan import Frontend
from harness.replay import read_steps
from planning import PLANNED

MACHINE = "two-sites-1gbit"


@pytest.fixture
def made(tmp_path):
    """The paths of a trace and of a plan, and the arguments that explain it."""
    trace, plan = write_small_trace(tmp_path), write_small_plan(tmp_path, MACHINE)
    return trace, plan, ("explain", trace, MACHINE, plan)


def test_times_are_those_that_the_plan_was_chosen_for(made, capsys):
    _, plan, arguments = made
    code, found = run_json(capsys, *arguments)
    predicted = Plan.load(plan).prediction
    assert code == 0
    assert found["step_s"] == pytest.approx(predicted.step_s) and found["none_s"] == pytest.approx(predicted.none_s)
    assert sum(message["nbytes"] for message in found["messages"]) == 4 * LAYERS * (NUMEL + 512)


def test_an_alternative_is_what_the_changed_plan_takes(made, capsys):
    """All messages sent exactly is the plan of ``none``, whose launches are the same."""
    _, _, arguments = made
    _, found = run_json(capsys, *arguments)
    (message,) = found["messages"]
    steps = {(each["compressor"], each["program"]): each["step_s"] for each in message["alternatives"]}
    assert steps["exactly", "allreduce"] == pytest.approx(found["none_s"])
    assert all(step_s > 0 for step_s in steps.values()) and len(steps) > 4


def test_one_unit_with_every_compressor(made, capsys):
    _, _, arguments = made
    code, found = run_json(capsys, *arguments, "--unit", "2.weight")
    (message,) = found["messages"]
    allowed = {each["compressor"]: each["allowed"] for each in message["alternatives"]}
    assert code == 0 and "2.weight" in message["units"]
    assert allowed["exactly"] and allowed["BlockQuant(bits=4)"] and not allowed["EFSignSGD"]
    code, shown, _ = run_text(capsys, *arguments, "--unit", "2.weight")
    assert "EFSignSGD" in shown and "not allowed by --accuracy" in shown


def test_an_unknown_unit_is_refused_with_those_that_are_near(made, capsys):
    code, _, errors = run_text(capsys, *made[2], "--unit", "2.wheight")
    assert code == 2 and "has no unit '2.wheight', but 2.weight" in errors


def test_faster_links_and_codecs_never_hurt(made, capsys):
    _, found = run_json(capsys, *made[2], "--messages", "0")
    assert set(found["what_if_s"]) == {"twice the bandwidth", "free codecs"}
    assert all(0 < step_s <= found["step_s"] for step_s in found["what_if_s"].values())
    assert all(message["alternatives"] == [] for message in found["messages"])


def test_the_chain_covers_the_step_without_gaps(made, capsys):
    _, found = run_json(capsys, *made[2], "--messages", "0")
    ends = [piece["end_s"] for piece in found["chain"]]
    starts = [piece["start_s"] for piece in found["chain"]]
    assert starts[0] == 0 and ends[-1] == pytest.approx(found["step_s"])
    assert starts[1:] == pytest.approx(ends[:-1])


@pytest.mark.parametrize("machine", ["lab", MACHINE, "h100-400gbit"])
@pytest.mark.parametrize("policy", ["none", "all", "threshold", "mergecomp"])
@pytest.mark.parametrize("frontend", PLANNED)
def test_every_chain_is_whole(machine, policy, frontend):
    trace = small_trace(buckets=True)
    problem = Problem(trace, Pricer(load_machine(machine)), frontend, allowed_compressors(trace))
    found = timeline(POLICIES[policy](problem), trace, problem.pricer, frontend)
    pieces = chain_of(found)
    assert pieces[0].start_s == 0 and pieces[-1].end_s == pytest.approx(found.step_s)
    for before, after in itertools.pairwise(pieces):
        assert after.start_s == pytest.approx(before.end_s, abs=1e-8)
    assert [piece.what for piece in pieces][:2] == ["forward", "backward"]


def test_the_busiest_resource_is_busy_while_gradients_are_averaged(tmp_path, capsys):
    """A long forward keeps the device busy, which no plan changes: the link is the limit as before."""
    found, lines = {}, {}
    for forward_s in (0.01, 10.0):
        trace, plan = tmp_path / f"{forward_s}.json", str(tmp_path / "plan.json")
        replace(small_trace(), forward_s=forward_s).save(trace)
        run_text(capsys, "plan", str(trace), MACHINE, "--policy", "none", "-o", plan)
        arguments = ("explain", str(trace), MACHINE, plan, "--messages", "0")
        found[forward_s] = run_json(capsys, *arguments)[1]["busiest"]
        (lines[forward_s],) = (line for line in run_text(capsys, *arguments)[1].splitlines() if "busy for" in line)
    assert found[10.0]["resource"] == found[0.01]["resource"] == "inter"
    assert found[10.0]["busy_s"] == pytest.approx(found[0.01]["busy_s"])
    assert lines[10.0].partition(";")[0] == lines[0.01].partition(";")[0]


def test_two_plans_beside_one_another(made, tmp_path, capsys):
    trace, plan, arguments = made
    other, picture, events = (str(tmp_path / name) for name in ("other.json", "plans.png", "plans.perfetto"))
    run_text(capsys, "plan", trace, MACHINE, "--policy", "none", "-o", other)
    pytest.importorskip("matplotlib")
    code, shown, errors = run_text(capsys, *arguments, "--against", other, "--png", picture, "--perfetto", events)
    assert code == 0 and "8 of 8 units differ" in shown
    assert errors.count("is written") == 2
    with open(picture, "rb") as file:
        assert file.read(8) == b"\x89PNG\r\n\x1a\n"
    with open(events) as file:
        names = [each["args"]["name"] for each in json.load(file)["traceEvents"] if each["name"] == "process_name"]
    assert names == [f"{plan}, estimated", f"{other}, estimated"]


def test_each_plan_is_judged_as_it_is_attached(tmp_path, capsys):
    trace, paths = write_small_trace(tmp_path, buckets=True), {}
    for frontend in PLANNED:
        paths[frontend] = str(tmp_path / f"{frontend.value}.json")
        plan = ("plan", trace, MACHINE, "--policy", "all", "--frontend", frontend.value, "-o", paths[frontend])
        assert run_text(capsys, *plan)[0] == 0
    explain = ("explain", trace, MACHINE, paths[Frontend.DDP], "--messages", "0")
    _, found = run_json(capsys, *explain, "--against", paths[Frontend.MODULE])
    assert found["step_s"] == pytest.approx(Plan.load(paths[Frontend.DDP]).prediction.step_s)
    assert found["against"]["step_s"] == pytest.approx(Plan.load(paths[Frontend.MODULE]).prediction.step_s)
    assert found["step_s"] != pytest.approx(found["against"]["step_s"])
    code, _, errors = run_text(capsys, *explain, "--frontend", "module")
    assert code == 2 and "--frontend module: " in errors and "is for ddp; leave it out" in errors


def test_a_file_on_stdout_leaves_the_text_to_stderr(made, capsys):
    code, shown, errors = run_text(capsys, *made[2], "--unit", "2.weight", "--perfetto", "-")
    assert code == 0 and json.loads(shown)["traceEvents"] and "sent as" in errors


def test_perfetto_reads_what_the_replay_reads(made, tmp_path, capsys):
    path = tmp_path / "step.json"
    assert run_text(capsys, *made[2], "--messages", "0", "--perfetto", str(path))[0] == 0
    ((_, steps),) = read_steps(path).items()
    assert sum(len(messages) for messages in steps.values()) > 0


def test_a_picture_without_matplotlib_is_refused(made, tmp_path, capsys, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else found(name))
    before = sorted(tmp_path.iterdir())
    code, shown, errors = run_text(
        capsys, *made[2], "--png", str(tmp_path / "x.png"), "--perfetto", str(tmp_path / "y")
    )
    assert code == 2 and errors.endswith("--png needs matplotlib, which is not installed; pip install matplotlib\n")
    assert shown == "" and sorted(tmp_path.iterdir()) == before


def test_a_plan_of_the_first_version_is_explained(made, tmp_path, capsys):
    _, plan, arguments = made
    record, path = json.loads(Path(plan).read_text()), tmp_path / "old.json"
    new = {"launch", "message", "channel"}
    units = [{key: value for key, value in unit.items() if key not in new} for unit in record["units"]]
    kept = {key: record[key] for key in ("format", "topology", "channels")}
    path.write_text(json.dumps(kept | {"version": 1, "units": units}))
    code, found = run_json(capsys, *arguments[:3], str(path), "--messages", "0")
    assert code == 0 and 0 < found["step_s"] < found["none_s"]


def test_a_plan_from_elsewhere_is_noted(made, tmp_path, capsys):
    _, plan, _ = made
    (tmp_path / "second").mkdir()
    other = write_small_trace(tmp_path / "second", backward_s=0.03)
    code, _, errors = run_text(capsys, "explain", other, MACHINE, plan, "--messages", "0")
    assert code == 0 and "was made from another trace" in errors
