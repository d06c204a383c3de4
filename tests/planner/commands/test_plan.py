"""``gckernels plan`` chooses a plan, advises honestly, and says with its exit code whether it pays."""

from __future__ import annotations

import json

import pytest

from command_files import run_json, run_text, write_small_trace
from gckernels.planner.choice import POLICIES
from gckernels.planner.drafts.drafts import Option, plan_of, usual_launches
from gckernels.planner.drafts.problem import Problem
from gckernels.planner.policies.messages import uniform_draft
from gckernels.sync import Plan
from gckernels.sync.plans.plan import Frontend
from gckernels.sync.programs import AllReduce, Broadcast, Level, Reduce

SLOW, FAST = "two-sites-1gbit", "h100-400gbit"


@pytest.fixture
def trace(tmp_path):
    return write_small_trace(tmp_path)


def test_a_plan_that_pays(trace, tmp_path, capsys):
    path = tmp_path / "plan.json"
    code, found = run_json(capsys, "plan", trace, SLOW, "--policy", "cupcake", "-o", str(path))
    rows = {row["policy"]: row for row in found["policies"]}
    assert code == 0 and found["pays"] and found["policy"] == "cupcake"
    assert rows["cupcake"]["step_s"] < rows["none"]["step_s"] * (1 - found["margin"])
    plan = Plan.load(path)
    assert plan.frontend == Frontend.MODULE and plan.prediction.policy == "cupcake"
    assert plan.prediction.step_s == rows["cupcake"]["step_s"]
    assert plan.prediction.none_s == rows["none"]["step_s"]


def test_the_table_has_every_policy_and_the_advice_its_band(trace, capsys):
    code, shown, _ = run_text(capsys, "plan", trace, SLOW, "--policy", "cupcake")
    lines = shown.splitlines()
    assert code == 0
    assert {line.split()[0] for line in lines if " ms " in line and line[0] != " "} >= {"none", "all", "cupcake"}
    assert lines[-1].startswith("Compress with the plan of cupcake") and "(estimated: " in lines[-1]


def test_advice_not_to_compress(tmp_path, capsys):
    """Backward of a second hides everything on fast links."""
    trace, path = write_small_trace(tmp_path, backward_s=1.0), tmp_path / "plan.json"
    code, shown, _ = run_text(capsys, "plan", trace, FAST, "-o", str(path))
    assert code == 1
    assert "Do not compress: backward hides all communication but " in shown
    assert all(unit.in_place for unit in Plan.load(path).units)  # the plan is written; it averages exactly


def test_a_plan_that_compresses_nothing_is_no_advice_to_compress(trace, tmp_path, capsys, monkeypatch):
    """It may be faster than DDP's averages all the same, by more than predictions may be wrong by."""
    hierarchical = Option((Reduce(Level.INTRA), AllReduce(Level.INTER), Broadcast(Level.INTRA)))

    def exact(problem):
        return plan_of(problem, uniform_draft(problem, usual_launches(problem), hierarchical))

    monkeypatch.setitem(POLICIES, "auto", exact)
    monkeypatch.setattr(Problem, "is_gain", lambda *arguments: True)
    arguments = ("plan", trace, SLOW, "--accuracy", "exact", "--sweep", "bandwidth=1gbit,2gbit")
    code, shown, _ = run_text(capsys, *arguments, "-o", str(tmp_path / "plan.json"))
    assert code == 1 and "Compress with" not in shown
    advice = "Do not compress. The plan of auto compresses nothing either, and averages exactly in another way: a step "
    assert advice in shown and " times as fast." in shown
    found = run_json(capsys, *arguments)[1]
    assert not found["pays"] and not found["compresses"]
    assert not Plan.load(tmp_path / "plan.json").units[1].in_place
    assert shown.count("do not compress; an exact plan pays") == 2
    assert "Compression pays at no bandwidth" in shown
    assert found["limit"] == {"bandwidth_bit_per_s": None, "always_pays": False}


def test_a_policy_that_loses_is_not_advised(trace, capsys):
    code, shown, _ = run_text(
        capsys, "plan", trace, FAST, "--policy", "all:PowerSGD", "--accuracy", "aggressive", "--steps", "100"
    )
    assert code == 1 and "Do not compress: " in shown and "4 PowerSGD by powersgd" in shown


def test_published_traces_work_by_name(capsys):
    code, found = run_json(capsys, "plan", "lstm", "espresso-pcie", "--policy", "all:Cast16")
    assert code == 0 and found["model"] == "lstm" and found["estimated"]


def test_the_trace_says_what_executes_the_plan(tmp_path, capsys):
    trace = write_small_trace(tmp_path, buckets=True)
    _, found = run_json(capsys, "plan", trace, SLOW, "--policy", "none")
    assert found["frontend"] == "ddp"
    _, found = run_json(capsys, "plan", trace, SLOW, "--policy", "none", "--frontend", "module")
    assert found["frontend"] == "module"


def test_a_plan_goes_through_a_pipe(trace, capsys):
    code, shown, errors = run_text(capsys, "plan", trace, SLOW, "--policy", "all", "-o", "-")
    assert code == 0 and Plan.from_json(json.loads(shown)).prediction.policy == "all"
    assert "policy" in errors  # the table


def test_aggressive_plans_begin_after_a_tenth_of_the_training(trace, tmp_path, capsys):
    path = tmp_path / "plan.json"
    arguments = ("plan", trace, SLOW, "--policy", "all", "--accuracy", "aggressive", "-o", str(path))
    code, _, errors = run_text(capsys, *arguments)
    assert code == 2 and "--steps" in errors and not path.exists()
    assert run_text(capsys, *arguments, "--steps", "2000")[0] == 0
    assert Plan.load(path).start_step == 200


def test_named_compressors_are_the_only_ones(trace, tmp_path, capsys):
    path = tmp_path / "plan.json"
    run_text(capsys, "plan", trace, SLOW, "--policy", "all", "--compressors", "EFSignSGD", "-o", str(path))
    assert {unit.compressor.name for unit in Plan.load(path).units} == {"EFSignSGD", "Identity"}
    run_text(capsys, "plan", trace, SLOW, "--accuracy", "exact", "-o", str(path))
    assert {unit.compressor.name for unit in Plan.load(path).units} == {"Identity"}


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--policy", "best"], "policy: must be none, "),
        (["--policy", "all:Nothing"], "Nothing"),
        (["--policy", "all:EFSignSGD"], "so there is nothing to compress; --compressors EFSignSGD allows it"),
        (["--accuracy", "high"], "--accuracy must be exact, safe, aggressive or a number from 0 to 1, got 'high'"),
        (["--accuracy", "-1"], "--accuracy"),
        (["--compressors", "Nothing"], "--compressors cannot be 'Nothing'"),
        (["--compressors", "QSGD", "--accuracy", "exact"], "not allowed with argument"),
        (["--policy", "none", "--frontend", "ddp"], "the trace has no buckets"),
        (["--steps", "0", "--accuracy", "aggressive"], "--steps must be an integer from 1 up, got 0"),
        (["--steps", "0"], "--steps must be an integer from 1 up, got 0"),
        (["--accuracy", "aggressive"], "--accuracy aggressive: its compressors begin after a tenth of the training, "),
    ],
)
def test_wrong_arguments_are_named(trace, tmp_path, capsys, arguments, reason):
    before = sorted(tmp_path.iterdir())
    code, shown, errors = run_text(capsys, "plan", trace, SLOW, "-o", str(tmp_path / "plan.json"), *arguments)
    assert code in (2, 3) and reason in errors and shown == "" and errors.count("\n") == 1
    assert not any(word in errors for word in ("steps=", "accuracy=", "None"))  # no options of the command
    assert sorted(tmp_path.iterdir()) == before
