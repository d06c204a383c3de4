"""``gckernels plan`` chooses a plan, advises honestly, and says with its exit code whether it pays."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from command_files import run_json, run_text, write_small_trace
from gckernels.planner.choice import POLICIES
from gckernels.planner.drafts.drafts import Option, plan_of, usual_launches
from gckernels.planner.drafts.problem import Problem
from gckernels.planner.policies.messages import uniform_draft
from gckernels.sync import Plan
from gckernels.sync.plans.plan import Frontend
from gckernels.sync.programs import AllReduce, Broadcast, Level, Reduce

SHIPPED = Path(__file__).parents[3] / "planner" / "machines" / "shipped"
SLOW, FAST = "two-sites-1gbit", "h100-400gbit"


@pytest.fixture
def trace(tmp_path):
    return write_small_trace(tmp_path)


def test_a_plan_that_pays(trace, tmp_path, capsys):
    path = tmp_path / "plan.json"
    code, found = run_json(capsys, "plan", trace, SLOW, "--policy", "mergecomp", "-o", str(path))
    rows = {row["policy"]: row for row in found["policies"]}
    assert code == 0 and found["pays"] and found["policy"] == "mergecomp"
    assert rows["mergecomp"]["step_s"] < rows["none"]["step_s"] * (1 - found["margin"])
    plan = Plan.load(path)
    assert plan.frontend == Frontend.MODULE and plan.prediction.policy == "mergecomp"
    assert plan.prediction.step_s == rows["mergecomp"]["step_s"]
    assert plan.prediction.none_s == rows["none"]["step_s"]


def test_the_table_has_every_policy_and_the_advice_its_band(trace, capsys):
    code, shown, _ = run_text(capsys, "plan", trace, SLOW, "--policy", "mergecomp")
    lines = shown.splitlines()
    assert code == 0
    assert {line.split()[0] for line in lines if " ms " in line and line[0] != " "} >= {"none", "all", "mergecomp"}
    advice = next(line for line in lines if line.startswith("Compress with the plan of mergecomp"))
    assert "(estimated: " in advice


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


def two_homes(folder):
    """The path of a description of two machines on a line of 20 Mbit/s."""
    record = json.loads((SHIPPED / f"{SLOW}.json").read_text())
    record["topology"] = {"machines": 2, "devices": 1}
    record["links"]["inter"] |= {"bandwidth_bit_per_s": 2e7, "shared_by": 1}
    path = folder / "homes.json"
    path.write_text(json.dumps(record))
    return str(path)


def test_a_policy_that_gains_little_is_not_advised_and_a_better_one_is_named(capsys):
    """A policy in which every tensor is a launch, on a machine with a high latency."""
    arguments = ("plan", "vgg16", "utility-p3-8xlarge", "--policy", "hitopkcomm", "--compressors", "BlockQuant(bits=4)")
    code, found = run_json(capsys, *arguments)
    advice = found["advice"]
    assert code == 1 and advice.startswith("The plan of hitopkcomm does not pay: it would gain ")
    assert "less than the error of the prediction, 39 %. That of espresso does: a step takes " in advice
    rows = {row["policy"]: row["step_s"] for row in found["policies"]}
    assert not found["pays"] and found["better"] == {"policy": "espresso", "step_s": rows["espresso"]}
    assert rows["espresso"] == min(rows.values()) < 0.3 * rows["none"]


def test_a_better_plan_is_named_beside_one_that_compresses_nothing_or_still_pays(trace, capsys):
    for policy, words in (
        ("none", "The plan of none does not pay: it compresses nothing. That of "),
        ("mergecomp", ""),
    ):
        code, found = run_json(capsys, "plan", trace, SLOW, "--policy", policy)
        assert found["advice"].startswith(words) and (found["better"] is None) == (policy == "mergecomp")
        assert code == (policy == "none")
    code, found = run_json(capsys, "plan", trace, SLOW, "--policy", "all:Cast16")
    assert code == 0 and found["advice"].startswith("Compress with the plan of all:Cast16: ")
    assert f" That of {found['better']['policy']} is still faster: a step takes " in found["advice"]


def test_sweeps_of_a_named_policy_are_about_its_plans(trace, capsys):
    sweep = ("--policy", "all:Cast16", "--compressors", "Cast16", "--sweep", "bandwidth=10gbit,100gbit")
    shown = run_text(capsys, "plan", trace, SLOW, *sweep)[1]
    assert "all:Cast16  vs none" in shown
    assert "Compression by all:Cast16 pays up to " in shown and "does not pay" in shown
    assert "do not compress" not in shown


def test_updates_are_named_where_a_step_still_waits(trace, tmp_path, capsys):
    """A step computes 32 ms, and the best plan waits for seconds."""
    homes, plan = two_homes(tmp_path), str(tmp_path / "plan.json")
    quick = ("--policy", "all", "--compressors", "BlockQuant(bits=4)")
    code, found = run_json(capsys, "plan", trace, homes, *quick, "-o", plan)
    instead = found["updates_instead"]
    assert code == 0 and instead["delay"] == 1 and 0.032 < instead["step_s"] < found["step_s"] / 4
    rounds = ("--every", str(instead["every"]), "--delay", "1")
    same = run_json(capsys, "plan", trace, homes, *quick, *rounds)[1]
    assert same["training_steps"][-1]["step_s"] == pytest.approx(instead["step_s"])
    assert same["updates_instead"] is None
    sentence = f"gradients, with --every {instead['every']} --delay 1, a step takes "
    for arguments in (("plan", trace, homes, *quick), ("explain", trace, homes, plan, "--messages", "0")):
        assert sentence in run_text(capsys, *arguments)[1]
        assert run_json(capsys, *arguments)[1]["updates_instead"]["every"] == instead["every"]
    assert "a step still waits" not in run_text(capsys, "plan", trace, FAST, *quick)[1].lower()


@pytest.mark.parametrize("buckets", [False, True])
def test_the_use_of_a_plan_is_said(tmp_path, capsys, buckets):
    trace, plan = write_small_trace(tmp_path, buckets=buckets), str(tmp_path / "plan.json")
    quick = ("plan", trace, SLOW, "--policy", "all", "-o", plan)
    notes = run_text(capsys, *quick)[2]
    shown = run_text(capsys, "explain", trace, SLOW, plan, "--messages", "0")[1]
    for text in (notes, shown):
        assert f"sync.attach(model, sync.Plan.load({plan!r})) uses the plan; model is " in text
        assert ("no DistributedDataParallel model can take this plan: gckernels trace" in text) == (not buckets)
    notes = run_text(capsys, *quick, "--every", "4")[2]
    assert f"sync.attach(model, sync.Updates(optimizer, sync.Plan.load({plan!r}), every=4, delay=0)) uses" in notes
    notes = run_text(capsys, *quick, "--frontend", "module")[2]
    assert ("--frontend ddp makes one for it" in notes) == buckets


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
