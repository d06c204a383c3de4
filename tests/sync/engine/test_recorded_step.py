"""A step is recorded when it is asked for, whole, and only that step."""

from __future__ import annotations

import json
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gckernels import sync
from gckernels.sync.engine.recorded_step import RecordedStage, RecordedStep
from gckernels.sync.programs.stages import StageKind
from models import SMALL_BUCKETS, build
from ranks import run_ranks, values_of

STAGE = RecordedStage(
    "AllGather", "communicate", StageKind.COLLECTIVE, 0, 0.0, 1.0, 0.0, 0, 0, ("a",), ("EFSignSGD",), 100.0
)


def step_of(*spans: tuple[str, float, float], submitted_s: float) -> RecordedStep:
    stages = tuple(replace(STAGE, category=does, start_s=start, end_s=end) for does, start, end in spans)
    return RecordedStep(3, 0, ("communicate-0-0",), stages, submitted_s, max(end for *_, end in spans), "3f9a")


def test_hidden_communication_is_counted_once():
    step = step_of(
        ("communicate", 0.0, 3.0), ("communicate", 2.0, 4.0), ("compute", 5.0, 6.0), ("communicate", 7.0, 11.0),
        submitted_s=8.0,
    )  # fmt: skip
    assert step.hidden_s == 5.0  # 0 to 4, 7 to 8
    assert step.exposed_s == 3.0


def test_nothing_is_exposed_if_the_last_message_ends_first():
    assert step_of(("communicate", 0.0, 1.0), submitted_s=2.0).exposed_s == 0.0


def train_and_trace(path: str) -> tuple[list[RecordedStep | None], float]:
    module, rank = build("Mlp"), dist.get_rank()
    hooked = DistributedDataParallel(module, bucket_cap_mb=SMALL_BUCKETS)
    attachment = sync.attach(hooked, sync.uniform_plan(hooked, "EFSignSGD", program="allgather"))
    seen = []
    for step in range(6):
        if step in (2, 4):
            attachment.record_next_step()
        if step == 4:
            with sync.record_timeline(path):
                hooked(module.batch(step, rank)).backward()
        else:
            hooked(module.batch(step, rank)).backward()
        seen.append(attachment.recorded_step)
    sent_nbytes = attachment.sent_nbytes_per_step()
    attachment.close()
    return seen, sent_nbytes


def test_the_step_that_was_asked_for_is_recorded(tmp_path):
    path = tmp_path / "out.json"
    names = {name for name, _ in build("Mlp").named_parameters()}
    for rank, (seen, sent_nbytes) in enumerate(values_of(run_ranks(2, train_and_trace, str(path)))):
        before, asked, after, during, behind = seen[1], seen[2], seen[3], seen[4], seen[5]
        assert before is None and asked is not None and after == asked
        assert (asked.step, asked.rank) == (2, rank)
        assert {name for stage in asked.stages for name in stage.units} == names
        assert sum(stage.sent_nbytes for stage in asked.stages) == sent_nbytes
        assert all(0 <= stage.submitted_s <= stage.start_s <= stage.end_s <= asked.end_s for stage in asked.stages)
        assert {stage.lane for stage in asked.stages} == set(range(len(asked.lanes)))
        assert [stage.start_s for stage in asked.stages] == sorted(stage.start_s for stage in asked.stages)
        assert asked.hidden_s >= 0 and 0 <= asked.exposed_s <= asked.end_s
        assert during == asked and behind is not None and behind.step == 5  # the file has step 4
    steps = {each["args"]["step"] for each in json.loads(path.read_text())["traceEvents"] if each["ph"] == "X"}
    assert steps == {4}


def trace_changes() -> list[tuple[str, str | None, bool]]:
    """After each step, the plan that runs, the plan of the traced step, and whether its overlap is a figure."""
    module, rank = build("Mlp"), dist.get_rank()
    hooked = DistributedDataParallel(module, bucket_cap_mb=SMALL_BUCKETS)
    plans = [sync.uniform_plan(hooked, name, exempt=None) for name in ("EFSignSGD", "BlockQuant", "Identity")]
    attachment = sync.attach(hooked, plans[0])
    names = {plan.fingerprint(): type(plan.units[0].compressor).__name__ for plan in plans} | {None: None}
    attachment.record_next_step()
    seen = []
    for step in range(8):
        if step in (3, 5):
            attachment.change_plan(plans[step // 2])
        hooked(module.batch(step, rank)).backward()
        traced, stats = attachment.recorded_step, attachment.stats()
        plans_of = names[attachment.plan.fingerprint()], names[traced and traced.plan_fingerprint]
        seen.append((*plans_of, "hidden_s" in stats))
    attachment.close()
    return seen


def test_a_traced_step_is_kept_with_its_plan():
    signs, bits, none = "EFSignSGD", "BlockQuant", "Identity"
    for seen in values_of(run_ranks(2, trace_changes)):
        assert seen[:3] == [(signs, signs, True)] * 3
        assert seen[3] == (bits, signs, False)  # the exact step was made with the first plan
        assert seen[4] == (bits, bits, True)
        assert [each[:2] for each in seen[5:]] == [(none, bits)] * 3


def test_a_rank_alone_has_no_stages():
    (step,) = values_of(run_ranks(1, trace_alone))
    assert step is None


def trace_alone() -> RecordedStep | None:
    hooked = DistributedDataParallel(torch.nn.Linear(4, 4))
    attachment = sync.attach(hooked, "EFSignSGD")
    attachment.record_next_step()
    hooked(torch.ones(1, 4)).sum().backward()
    traced = attachment.recorded_step
    attachment.close()
    return traced
