"""A trace records the work of all ranks in one file, and training does not change under it."""

from __future__ import annotations

import itertools
import json
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gckernels
from audits import Run, train
from gckernels import sync
from gckernels.sync import attach, record_timeline
from gckernels.sync.engine import recorded_step
from gckernels.sync.engine.timeline_recorder import TimelineRecorder
from gckernels.sync.messages.message import Message
from gckernels.sync.programs import PROGRAMS, ring
from gckernels.sync.programs.stages import IN_PLACE_STAGES, Resource, StageKind, StageSpec
from gckernels.sync.resources.lanes import DeviceLanes
from gckernels.sync.resources.stage import Stage
from models import SMALL_BUCKETS, build
from ranks import run_ranks, values_of
from workloads import topology

STEPS = 4  # the first step is not compressed
COMPUTING = {"Encode", "Decode", "Recode", "Cut", "Join", "Project", "Project(left)", "Project(right)", "Reconstruct"}
ALL = {**PROGRAMS, "ring": ring(2)}
STAGES = {
    ("BlockQuant", "alltoall"): ["Encode", "AllToAll", "Recode", "AllGather", "Decode"],
    ("BlockQuant", "allgather"): ["Encode", "AllGather", "Decode"],
    ("BlockQuant", "ring"): ["Encode", "Hop", "Recode", "AllGather", "Decode"],
    ("Cast16", "encoded_allreduce"): ["Encode", "AllReduce", "Decode"],
    ("Cast16", "hierarchical"): [
        *("Cut", "ReduceScatter(intra)", "Encode", "AllToAll(inter)", "Recode"),
        *("AllGather(inter)", "Decode", "AllGather(intra)", "Join"),
    ],
    ("PowerSGD", "powersgd"): ["Project(left)", "AllReduce", "Project(right)", "AllReduce", "Reconstruct"],
    ("PowerSGD(one_sided=True)", "encoded_allreduce"): ["Project", "AllReduce", "Reconstruct"],
}


class Broken(Exception):
    pass


def train_traced(path: str, compressor: str, program: str) -> float:
    """Train inside a trace, then one step more, and return the bytes that a step sent."""
    rank, module = dist.get_rank(), build("Mlp")
    hooked = DistributedDataParallel(module, bucket_cap_mb=SMALL_BUCKETS)
    codec, around = gckernels.from_spec(compressor), topology(dist.get_world_size())
    attachment = attach(hooked, sync.uniform_plan(hooked, codec, program=ALL[program], topology=around))
    with record_timeline(path):
        for step in range(STEPS):
            hooked(module.batch(step, rank)).backward()
    hooked(module.batch(STEPS, rank)).backward()
    attachment.close()
    return attachment.sent_nbytes_per_step()


@pytest.mark.parametrize(("compressor", "program"), STAGES)
def test_a_trace_has_every_stage_of_every_rank(tmp_path, compressor, program):
    path = tmp_path / "out.json"
    sent = values_of(run_ranks(2, train_traced, str(path), compressor, program))
    assert [each.name for each in tmp_path.iterdir()] == ["out.json"]
    content = json.loads(path.read_text())
    assert content["otherData"]["anchor_ns"].keys() == {"rank 0", "rank 1"}
    started_s = content["otherData"]["started_ns"] / 1e9
    assert time.time() - 600 < started_s < time.time()
    names = {event["pid"]: event["args"]["name"] for event in named(content, "process_name")}
    assert names == {0: "rank 0", 1: "rank 1"}
    for rank in names:
        events = [event for event in content["traceEvents"] if event["ph"] == "X" and event["pid"] == rank]
        lanes = {each["tid"]: each["args"]["name"] for each in named(content, "thread_name") if each["pid"] == rank}
        assert {event["tid"] for event in events} == lanes.keys()
        check_lanes(events, lanes)
        check_messages(events, STAGES[compressor, program], [name for name, _ in build("Mlp").named_parameters()])
        for step in range(1, STEPS):
            assert sum(each["args"]["bytes"] for each in events if each["args"]["step"] == step) == sent[rank]


def train_in_place(path: str) -> float:
    module = build("Mlp")
    nothing = sync.uniform_plan(module, gckernels.Identity(), program=PROGRAMS["allreduce"])
    attachment = sync.attach(module, nothing, bucket_cap_mb=SMALL_BUCKETS)
    with record_timeline(path):
        for step in range(STEPS):
            module(module.batch(step, dist.get_rank())).backward()
    attachment.close()
    return attachment.sent_nbytes_per_step()


def test_a_trace_has_every_average_in_place(tmp_path):
    path = tmp_path / "out.json"
    sent = values_of(run_ranks(2, train_in_place, str(path)))
    for rank, nbytes in enumerate(sent):
        events = [each for each in json.loads(path.read_text())["traceEvents"] if each["ph"] == "X"]
        for step in range(STEPS):
            mine = [each for each in events if each["pid"] == rank and each["args"]["step"] == step]
            assert len(mine) > 1 and {each["name"] for each in mine} == {"Average"}
            assert sum(each["args"]["bytes"] for each in mine) == nbytes
            assert len({each["args"]["bucket"] for each in mine}) == len(mine)


def named(content: dict[str, Any], what: str) -> list[dict[str, Any]]:
    return [event for event in content["traceEvents"] if event["ph"] == "M" and event["name"] == what]


def end_us(event: dict[str, Any]) -> float:
    return round(event["ts"] + event["dur"], 3)  # rounded to nanoseconds


def check_lanes(events: list[dict[str, Any]], lanes: dict[int, str]) -> None:
    """Assert that a lane does one thing at a time, and work of one kind only."""
    for tid, name in lanes.items():
        mine = sorted((event for event in events if event["tid"] == tid), key=lambda event: event["ts"])
        assert all(end_us(first) <= second["ts"] for first, second in itertools.pairwise(mine))
        assert {event["cat"] for event in mine} == {name.split("-")[0].replace("average", "communicate")}


def check_messages(events: list[dict[str, Any]], stages: list[str], parameters: list[str]) -> None:
    """Assert that every unit is in one message per step, and that the message's stages follow each other."""
    for step in range(STEPS):
        messages: dict[tuple[str, ...], list[dict[str, Any]]] = {}
        for event in events:
            if event["args"]["step"] == step:
                messages.setdefault(tuple(event["args"]["units"]), []).append(event)
        assert sorted(unit for units in messages for unit in units) == sorted(parameters)
        assert (len(messages) > 1) == (step > 0)  # DDP begins with one bucket
        for each in messages.values():
            each.sort(key=lambda event: event["ts"])
            assert [event["name"] for event in each] == (stages if step else ["Average"])
            assert all(end_us(first) <= second["ts"] for first, second in itertools.pairwise(each))
            for event in each:
                computes = event["name"] in COMPUTING
                assert event["cat"] == ("compute" if computes else "communicate")
                alone = computes or event["name"].endswith("(inter)")  # two ranks are one machine
                assert alone == (event["args"]["bytes"] == 0)


def train_twice(path: str) -> tuple[str, str]:
    run = Run("BlockQuant", "alltoall")
    plain = train(run)
    with record_timeline(path):
        return plain, train(run)


def test_a_traced_training_gives_the_same_bits(tmp_path):
    path = tmp_path / "out.json"
    found = values_of(run_ranks(2, train_twice, str(path)))
    assert len({digest for pair in found for digest in pair}) == 1
    assert path.stat().st_size > 0


# -------------------------------------------------------------------- without a trace


def train_untraced() -> None:
    def never(*arguments: Any) -> None:
        raise AssertionError("recorded without a trace")

    recording, TimelineRecorder.observe = TimelineRecorder.observe, never  # type: ignore[method-assign]
    try:
        train(Run("BlockQuant", "alltoall", steps=3))
    finally:
        TimelineRecorder.observe = recording  # type: ignore[method-assign]


def test_without_a_trace_nothing_is_recorded():
    values_of(run_ranks(2, train_untraced))


# -------------------------------------------------------------------- exceptions


def raise_in_a_trace(path: str, faulty: list[int]) -> None:
    rank, module = dist.get_rank(), build("Mlp")
    hooked = DistributedDataParallel(module, bucket_cap_mb=SMALL_BUCKETS)
    attachment = attach(hooked, sync.uniform_plan(hooked, gckernels.BlockQuant(), program=PROGRAMS["alltoall"]))
    try:
        with record_timeline(path):
            for step in range(STEPS):
                hooked(module.batch(step, rank)).backward()
            if rank in faulty:
                raise Broken(f"rank {rank}")
    finally:
        assert recorded_step.timeline is None
        attachment.close()


@pytest.mark.parametrize("faulty", [[0, 1], [1]])
def test_every_rank_keeps_its_part_when_one_raises(tmp_path, faulty):
    outcomes = run_ranks(2, raise_in_a_trace, str(tmp_path / "out.json"), faulty, group_timeout_s=10)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["out.rank0.json", "out.rank1.json"]
    for rank, outcome in enumerate(outcomes):
        assert outcome.error_type == "Broken" if rank in faulty else outcome.error_type is not None
        content = json.loads((tmp_path / f"out.rank{rank}.json").read_text())
        assert {event["pid"] for event in content["traceEvents"]} == {rank}
        assert any(event["name"] == "AllToAll" for event in content["traceEvents"])


def test_the_exception_goes_on_where_nothing_can_be_written(tmp_path):
    with pytest.raises(Broken), record_timeline(tmp_path / "missing" / "out.json"):
        raise Broken


def test_work_that_fails_is_recorded():
    recorder, lanes = TimelineRecorder(0), DeviceLanes(torch.device("cpu"))

    def fail() -> None:
        time.sleep(0.01)
        raise Broken

    spec = StageSpec(StageKind.COLLECTIVE, "AllGather", 0, Resource.COMMUNICATE, 0, 1)
    stage, message = Stage(spec, lambda: None, 12.0), Message()
    message.keys = ("a", "b")
    lane = lanes.lane(Resource.COMMUNICATE, 0, 0)
    observed = recorder.observe(message, 7, 2)(replace(stage, work=lambda: fail()), lane)
    lane.submit_stage(observed, ()).join()
    lanes.close()
    assert isinstance(lanes.failure.error, Broken)
    (event,) = recorder.record(wait=True)["events"]
    assert event["name"] == "AllGather" and event["dur"] >= 10e6
    args = {"step": 7, "units": ("a", "b"), "bytes": 12.0, "kind": "collective", "steps": [0, 1], "message": 0}
    assert event["args"].items() >= args.items()
    assert recorder._anchor_ns < event["args"]["submitted_ns"] <= event["ts"]


# -------------------------------------------------------------------- one process


def test_without_a_process_group(tmp_path):
    path = tmp_path / "out.json"
    with record_timeline(path):
        assert recorded_step.timeline is not None and not path.exists()
    assert recorded_step.timeline is None
    assert [event["args"]["name"] for event in json.loads(path.read_text())["traceEvents"]] == ["rank 0"]


def test_traces_do_not_nest(tmp_path):
    with record_timeline(tmp_path / "outer.json"):
        outer = recorded_step.timeline
        with pytest.raises(RuntimeError, match="records a timeline already"), record_timeline(tmp_path / "inner.json"):
            pass
        assert recorded_step.timeline is outer
    assert [each.name for each in tmp_path.iterdir()] == ["outer.json"]


def test_lanes_are_in_the_order_in_which_messages_pass_them():
    recorder, lanes = TimelineRecorder(0), DeviceLanes(torch.device("cpu"))
    lanes.close()
    message = Message()
    message.keys = ()
    for phase, channel in ((1, 1), (0, 0), (0, 1)):
        message.channel = channel
        for resource in (Resource.COMMUNICATE, Resource.COMPUTE):
            spec = StageSpec(StageKind.ENCODE, "Any", phase, resource, 0, 1)
            stage, lane = Stage(spec, lambda: None), lanes.lane(resource, phase, channel)
            recorder.observe(message, 0, 2)(stage, lane)
    assert recorder.record(wait=True)["lanes"] == [
        *("compute-0", "communicate-0-0", "communicate-0-1"),
        *("compute-1", "communicate-1-1"),
    ]


def test_averages_that_overlap_are_in_rows_of_their_own():
    recorder, lanes = TimelineRecorder(0), DeviceLanes(torch.device("cpu"))
    (spec,) = IN_PLACE_STAGES
    lane, message, ends = lanes.lane(Resource.AVERAGE, 0), Message(), [torch.futures.Future() for _ in range(3)]
    message.keys = ()

    def begin(number: int) -> None:
        stage = Stage(spec, lambda: None, begin=lambda: ends[number])
        lane.submit_stage(recorder.observe(message, 0, 1)(stage, lane), ())

    begin(0)
    begin(1)
    ends[1].set_result(None)  # the first is still in progress
    begin(2)
    for each in (2, 0):
        ends[each].set_result(None)
    record = recorder.record(wait=True)
    assert record["lanes"] == ["average-0", "average-0 (2)"]
    assert {event["args"]["message"]: event["tid"] for event in record["events"]} == {0: 0, 1: 1, 2: 1}
    assert all(event["args"]["begun_ns"] == event["ts"] for event in record["events"])


@pytest.mark.gpu
def test_streams():
    device = torch.device("cuda")
    recorder, lanes = TimelineRecorder(0), DeviceLanes(device)
    lane, other = (lanes.lane(Resource.COMPUTE, phase) for phase in range(2))
    message, values = Message(), torch.zeros(1 << 24, device=device)
    message.keys = ("a",)
    before_ns, token = time.time_ns(), lanes.here()
    for step, each in enumerate((lane, other, lane, other)):
        spec = StageSpec(StageKind.ENCODE, "Encode", 0, Resource.COMPUTE, 0, 1)
        stage = Stage(spec, lambda: values.add_(1))
        token = each.submit_stage(recorder.observe(message, step, 2)(stage, each), (token,))
    events = recorder.record(wait=True)["events"]
    assert [event["args"]["step"] for event in events] == [0, 1, 2, 3] and all(event["dur"] > 0 for event in events)
    # elapsed times are fp32 milliseconds, exact to half a microsecond
    assert all(first["ts"] + first["dur"] <= second["ts"] + 1e3 for first, second in itertools.pairwise(events))
    assert before_ns - 1e6 < events[0]["ts"] < events[-1]["ts"] < time.time_ns()
