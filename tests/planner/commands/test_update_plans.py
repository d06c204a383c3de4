"""``gckernels plan --every`` answers for ``sync.Updates``: steps, bits, and a plan that it takes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from command_files import LAYERS, NUMEL, run_json, run_text, small_trace, write_small_trace
from gckernels import sync
from gckernels.sync import Plan
from gckernels.sync.plans.plan import Frontend
from ranks import run_ranks, values_of

SLOW = "lab"
SIGNS = "EFSignSGD(block=1024, magnitude='projection')"
QUICK = ("--policy", f"all:{SIGNS}", "--compressors", SIGNS)


@pytest.fixture
def trace(tmp_path):
    return write_small_trace(tmp_path)


def by_name(found):
    return {each["name"]: each for each in found["training_steps"]}


def test_a_step_beside_plain_ddp_and_exact_updates(trace, capsys):
    code, found = run_json(capsys, "plan", trace, SLOW, "--every", "4", *QUICK)
    steps, computing_s = by_name(found), 0.032
    assert code == 0 and found["rounds"] == {"every": 4, "delay": 0} and found["frontend"] == "module"
    assert [*steps] == ["plain DDP", "exact updates", "the plan"]
    assert computing_s < steps["the plan"]["step_s"] < steps["exact updates"]["step_s"] < steps["plain DDP"]["step_s"]
    assert steps["the plan"]["step_s"] == pytest.approx(found["step_s"] / 4)
    assert steps["exact updates"]["step_s"] == pytest.approx(found["none_s"] / 4)
    apart_s = found["step_s"] - 4 * computing_s - found["policies"][-1]["exposed_s"]
    assert 0 <= apart_s < 1e-3  # the time of a launch
    assert steps["plain DDP"]["sent_bits"] == 32 and steps["exact updates"]["sent_bits"] == 8
    assert 1 / 4 < steps["the plan"]["sent_bits"] < 1.2 / 4
    shown = run_text(capsys, "plan", trace, SLOW, "--every", "4", *QUICK)[1]
    assert "small, rounds of 4 steps on lab" in shown and "For sync.Updates." in shown
    assert "training step" in shown and "bits sent per element" in shown
    assert "a round of 4 steps takes " in shown


def test_plain_ddp_is_that_of_a_plan_for_ddp(tmp_path, capsys):
    """Its buckets, and its copies out of them, are those of the trace."""
    path = str(tmp_path / "ddp.trace.json")
    replace(small_trace(buckets=True), copies_gradients=True).save(path)
    ddp_s = run_json(capsys, "plan", path, SLOW, "--policy", "none")[1]["none_s"]
    found = run_json(capsys, "plan", path, SLOW, "--every", "2", "--policy", "none")[1]
    assert found["frontend"] == "module" and by_name(found)["plain DDP"]["step_s"] == pytest.approx(ddp_s)


def test_a_delay_hides_a_round(trace, capsys):
    shown, exposed_s, steps_s = [], [], []
    for delay in (0, 1, 4):
        arguments = ("plan", trace, SLOW, "--every", "4", "--delay", str(delay), *QUICK)
        found = run_json(capsys, *arguments)[1]
        exposed_s.append(found["policies"][-1]["exposed_s"])
        steps_s.append(by_name(found)["the plan"]["step_s"])
        shown.append(run_text(capsys, *arguments)[1])
    assert exposed_s[0] > exposed_s[1] == exposed_s[2] == 0
    assert steps_s[0] > steps_s[1] == pytest.approx(steps_s[2])
    assert "with a delay of 4" in shown[2] and "delay" not in shown[0]


def test_where_rounds_are_long_nothing_is_gained(tmp_path, capsys):
    trace = write_small_trace(tmp_path, backward_s=10.0)
    code, shown, _ = run_text(capsys, "plan", trace, SLOW, "--every", "100", *QUICK)
    assert code == 1 and "Do not compress: a round of 100 steps waits for exact updates only " in shown


def test_aggressive_compressors_begin_at_once(trace, tmp_path, capsys):
    path = tmp_path / "plan.json"
    rule = ("--accuracy", "aggressive", "--policy", "all")
    code, found = run_json(capsys, "plan", trace, SLOW, "--every", "2", *rule, "-o", str(path))
    assert code == 0 and "EFSignSGD" in found["allowed"] and Plan.load(path).start_step == 0


def test_compressors_whose_result_is_no_mean_are_left_out(trace, tmp_path, capsys):
    arguments = (
        "plan",
        trace,
        SLOW,
        "--every",
        "2",
        "--policy",
        "all",
        "--compressors",
        "SignSGD",
        "DGC",
        "BlockQuant",
    )
    found = run_json(capsys, *arguments)[1]
    assert found["allowed"] == ["BlockQuant"]
    assert found["unusable"] == dict.fromkeys(("SignSGD", "DGC"), "its results are not the mean of updates")
    assert "SignSGD" in run_json(capsys, *arguments[:3], *arguments[5:])[1]["allowed"]
    code, _, errors = run_text(capsys, *arguments[:5], "--policy", "all:SignSGD", "--compressors", "SignSGD")
    assert code == 2 and "its results are not the mean of updates" in errors


def test_memory_has_anchors_and_updates(trace, capsys):
    plain, of_updates = (
        run_json(capsys, "plan", trace, SLOW, *QUICK, *more)[1]["memory"] for more in ((), ("--every", "2"))
    )
    assert of_updates["model_nbytes"] == 2 * plain["model_nbytes"]
    shown = run_text(capsys, "plan", trace, SLOW, *QUICK, "--every", "2")[1]
    assert " for weights, gradients, anchors and updates, " in shown


def test_sweeps_are_of_rounds(trace, capsys):
    sweep = ("--sweep", "bandwidth=100mbit,10gbit", "batch=1,100")
    code, found = run_json(capsys, "plan", trace, SLOW, "--every", "4", *QUICK, *sweep)
    slow, _ = found["sweeps"][0]["points"]
    once, often = found["sweeps"][1]["points"]
    assert code == 0 and slow["step_s"] > found["step_s"]
    assert once["step_s"] == pytest.approx(found["step_s"])
    assert often["step_s"] - once["step_s"] == pytest.approx(4 * 99 * 0.03)  # forward and backward, no optimizer
    assert found["limit"]["bandwidth_bit_per_s"] > 1e8


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--every", "0"], "--every: must be an integer from 1 up, got 0"),
        (["--every", "2", "--delay", "3"], "--delay: must be an integer from 0 to every, 2, got 3"),
        (["--delay", "1"], "--delay is for rounds of sync.Updates; add --every"),
        (["--every", "2", "--frontend", "ddp"], "--every is for bare modules, not --frontend ddp"),
        (["--every", "2", "--weights", "BlockQuant"], "--weights is for models of --frontend fsdp"),
        (["--every", "2", "--steps", "100"], "--steps"),
        (["--every", "many"], "--every"),
    ],
)
def test_wrong_rounds_are_named(trace, capsys, arguments, reason):
    code, shown, errors = run_text(capsys, "plan", trace, SLOW, *arguments)
    assert code == 2 and reason in errors and shown == "" and errors.count("\n") == 1


# -------------------------------------------------------------------- a plan in a training


def net() -> torch.nn.Module:
    """The model of the small trace."""
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(LAYERS)))


def averaged(path: str) -> tuple[str, float, bool]:
    """The policy of the plan, the bytes that a round has sent, and whether all ranks have the same parameters."""
    model, generator = net(), torch.Generator().manual_seed(torch.distributed.get_rank())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    attachment = sync.attach(model, sync.Updates(optimizer, Plan.load(path), every=2))
    for _ in range(4):
        model(torch.randn(4, 512, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    mine = torch.cat([each.detach().flatten() for each in model.parameters()])
    other = mine.clone()
    torch.distributed.broadcast(other, 0)
    sent_nbytes, policy = attachment.sent_nbytes_per_step(), attachment.stats()["policy"]
    attachment.close()
    return policy, sent_nbytes, torch.equal(mine, other)


def test_updates_take_the_plan_and_sends_what_was_predicted(trace, tmp_path, capsys):
    path = tmp_path / "plan.json"
    arguments = ("plan", trace, SLOW, "--every", "2", "--policy", "mergecomp", "--compressors", SIGNS, "-o", str(path))
    code, found = run_json(capsys, *arguments)
    plan = Plan.load(path)
    assert code == 0 and found["policy"] == "mergecomp" and plan.made_for is Frontend.MODULE
    assert plan.prediction.step_s == found["step_s"] and plan.prediction.trace.name == "small, rounds of 2 steps"
    predicted = by_name(found)["the plan"]["sent_bits"] * 2 * LAYERS * (NUMEL + 512) / 8
    for policy, sent_nbytes, same in values_of(run_ranks(2, averaged, str(path))):
        assert policy == "mergecomp" and same and sent_nbytes == pytest.approx(predicted)
