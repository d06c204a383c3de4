"""A replay on virtual lanes, with the durations of a trace, takes as long as the measured step."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from gckernels import from_spec
from gckernels.planner.timeline.simulator import Need
from gckernels.planner.timeline.virtual_lanes import VirtualLanes
from gckernels.sync import Plan, Topology, UnitPlan, attach, record_timeline, uniform_plan
from gckernels.sync.communication.communicators import DryCommunicators
from gckernels.sync.messages.encoded import EncodedMessage
from gckernels.sync.messages.message import DenseMessage, Unit
from gckernels.sync.messages.seeds import Seeds
from gckernels.sync.programs import PROGRAMS, ring
from gckernels.sync.programs.lanes import MAX_PHASES, lane_key, route_of, submit_stages
from gckernels.sync.programs.stages import Resource, StageKind, StageSpec
from gckernels.sync.resources.feedback import Feedback
from gckernels.sync.resources.stage import Stage
from harness.replay import ReplayedMessage, read_steps, replay
from ranks import run_ranks, values_of
from workloads import topology

STEPS = 3  # the first step is not compressed
WARM_UP = 2
SHAPES = ((512, 1024), (256,), (1024, 1024), (256, 1024), (64,), (768, 1024), (1024, 512))
TOLERANCE = 0.025

SETTINGS = (
    ("BlockQuant", "alltoall", 1, None),
    pytest.param(("EFSignSGD", "allgather", 2, 262_144), marks=pytest.mark.slow),
    ("Cast16", "hierarchical", 1, None),
    ("BlockQuant", "ring", 2, 524_288),
    pytest.param(("TopK(ratio=0.05)", "parameter_server", 2, None), marks=pytest.mark.slow),
    pytest.param(("PowerSGD(rank=4)", "powersgd", 1, None), marks=pytest.mark.slow),
    pytest.param(("PowerSGD(rank=4, one_sided=True)", "encoded_allreduce", 1, None), marks=pytest.mark.slow),
    ("Identity", "allreduce", 1, None),
)


def plan_of(model: torch.nn.Module, spec: str, program: str, channels: int, max_numel: int | None) -> Plan:
    """A plan that averages every third matrix in place, so that messages of several kinds share a bucket."""
    ranks = dist.get_world_size()
    steps = {**PROGRAMS, "ring": ring(ranks)}[program]
    planned = uniform_plan(model, from_spec(spec), program=steps, topology=topology(ranks))
    dense = uniform_plan(model, from_spec("Identity"), program=PROGRAMS["allreduce"])
    pairs = zip(planned.units, dense.units, strict=True)
    units = tuple(other if index % 3 == 2 else unit for index, (unit, other) in enumerate(pairs))
    planned = dataclasses.replace(planned, units=units, channels=channels)
    return planned if max_numel is None else planned.parted(max_numel)


def model() -> torch.nn.Module:
    return torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES)


def train(path: str, *setting) -> None:
    module = model()
    attachment = attach(module, plan_of(module, *setting), bucket_cap_mb=4.0)
    generator = torch.Generator().manual_seed(dist.get_rank())
    parameters = list(module.parameters())
    grads = [torch.randn(each.shape, generator=generator) for each in parameters]

    def step() -> None:
        module.zero_grad()
        torch.autograd.backward(parameters, [grad.clone() for grad in grads])

    for _ in range(WARM_UP):
        step()
    with record_timeline(path):
        for _ in range(STEPS):
            step()
    attachment.close()


def steps_of(path: Path) -> list[list[ReplayedMessage]]:
    return [messages for steps in read_steps(path).values() for messages in steps.values()]


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: f"{setting[0]}-{setting[1]}")
def test_a_replay_takes_as_long_as_the_step(tmp_path, setting):
    """With the measured hand-over times every replay is exact, provided that the stages wait for each other as in the
    step. Durations alone omit the time in which threads hand work over to each other, which depends on how busy the
    machine is."""
    path = tmp_path / "trace.json"
    values_of(run_ranks(4, train, str(path), *setting))
    steps = steps_of(path)
    alone = [replay(messages) for messages in steps]
    complete = [replay(messages, with_hand_overs=True) for messages in steps]
    assert len(steps) == 4 * STEPS
    assert all(abs(each.error) <= TOLERANCE for each in complete)
    assert all(one.replayed_s <= other.replayed_s for one, other in zip(alone, complete, strict=True))
    for messages in steps:
        kinds = {stage.spec.kind for each in messages for stage in each.stages}
        assert StageKind.AVERAGE in kinds and (len(kinds) > 1 or setting[1] == "allreduce")
        assert sum(stage.lane.startswith("average") for each in messages for stage in each.stages) > 1


def with_equal_exchanges(messages: list[ReplayedMessage]) -> list[ReplayedMessage]:
    """Messages that are submitted together, with a second for each collective and nothing for other stages."""
    made = []
    for message in messages:
        durations_s = [float(each.spec.kind is StageKind.COLLECTIVE) for each in message.stages]
        stages = tuple(
            dataclasses.replace(stage, start_s=0.0, end_s=duration_s, begun_s=None, handed_over_s=0.0)
            for stage, duration_s in zip(message.stages, durations_s, strict=True)
        )
        made.append(dataclasses.replace(message, submitted_s=0.0, stages=stages))
    return made


def test_a_replay_on_other_lanes_takes_another_time(tmp_path):
    """Messages of two channels that are put on one wait for each other, unlike in the measured step."""
    path = tmp_path / "trace.json"
    values_of(run_ranks(2, train, str(path), "EFSignSGD", "allgather", 2, 262_144))
    for messages in map(with_equal_exchanges, steps_of(path)):
        on_one = [dataclasses.replace(message, channel=0) for message in messages]
        assert {message.channel for message in messages} == {0, 1}
        assert replay(on_one).replayed_s > replay(messages).replayed_s + 0.5


def test_a_trace_has_the_data_that_costs_are_fitted_to(tmp_path):
    path = tmp_path / "trace.json"
    values_of(run_ranks(2, train, str(path), "BlockQuant", "alltoall", 1, None))
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
    encodes = [event["args"] for event in events if event["name"] == "Encode"]
    sends = [event["args"] for event in events if event["name"] == "AllToAll"]
    assert {name for encode in encodes for name in encode["compressors"]} == {"BlockQuant", "Identity"}
    assert len(encodes) == len(sends) > 0
    for encode, send in zip(encodes, sends, strict=True):
        assert encode["kind"] == "encode" and encode["level"] is None
        assert encode["read_bytes"] == 4 * encode["elements"] and encode["bytes"] == 0
        assert (send["kind"], send["level"], send["resource"]) == ("collective", "flat", "communicate")
        assert send["bytes"] == send["read_bytes"] / 2  # one of the two chunks stays on the rank


# -------------------------------------------------------------------- virtual lanes


def stage(resource: Resource, phase: int = 0, starts_immediately: bool = False) -> StageSpec:
    return StageSpec(StageKind.ENCODE, "Any", phase, resource, 0, 1, starts_immediately=starts_immediately)


@dataclasses.dataclass(frozen=True)
class Timed:
    """A stage and its needs."""

    spec: StageSpec
    need: Need


def timed(resource: Resource, seconds: float, phase: int = 0, submit_s: float | None = None) -> Timed:
    return Timed(stage(resource, phase, submit_s is not None), Need(seconds, submit_s=submit_s or 0.0))


def end_of(*messages: tuple[int, list[Timed]]) -> float:
    """The time at which the last message ends when messages are submitted without a pause, each on its channel."""
    lanes = VirtualLanes[Timed](lambda stage: stage.need)
    for channel, stages in messages:
        submit_stages(lanes, route_of(lanes, stages, channel), (lanes.here(),))
    return lanes.run().end_s


CODE, SEND, MEAN = Resource.COMPUTE, Resource.COMMUNICATE, Resource.AVERAGE


def test_lanes_work_in_order_and_beside_each_other():
    message = [timed(CODE, 1.0), timed(SEND, 4.0), timed(CODE, 1.0, 1)]
    assert end_of((0, message)) == 6.0
    assert end_of((0, message), (0, message)) == 10.0  # the second one sends from 5 to 9
    assert end_of((0, message), (1, message)) == 7.0
    assert end_of((0, [timed(CODE, 1.0), timed(CODE, 1.0, 1)]), (0, [timed(CODE, 1.0)])) == 2.0


def test_phases_of_long_rings_share_lanes():
    first = [timed(SEND, 1.0), timed(SEND, 5.0, MAX_PHASES)]
    assert end_of((0, first), (0, [timed(SEND, 1.0)])) == 7.0
    assert lane_key(SEND, MAX_PHASES + 1, 3).name == "communicate-1-3" and lane_key(CODE, 9, 3).name == "compute-1"


def test_what_starts_immediately_overlaps_and_takes_time_of_the_submitter():
    assert end_of((0, [timed(MEAN, 4.0, submit_s=1.0)]), (0, [timed(MEAN, 4.0, submit_s=1.0)])) == 6.0
    assert (
        end_of((0, [timed(MEAN, 9.0, submit_s=1.0)]), (0, [timed(MEAN, 2.0, submit_s=1.0), timed(CODE, 7.0)])) == 11.0
    )
    behind = [timed(CODE, 3.0), timed(MEAN, 4.0, submit_s=1.0)]
    assert end_of((0, behind)) == 7.0  # it waits for the stage before it


def test_what_is_waited_for_together_holds_its_lane():
    lanes = VirtualLanes[Timed](lambda stage: stage.need)
    token = submit_stages(lanes, route_of(lanes, [timed(SEND, 4.0)], 0), (lanes.here(),))
    lanes.lane(CODE, 1).submit(lambda: pytest.fail("work is not done"), [token])
    lanes.wait_until(2.0)
    waited = lanes.here()
    last = submit_stages(lanes, route_of(lanes, [timed(CODE, 1.0, 1)], 0), (waited,))
    times = lanes.run().times
    assert times.end_s[waited] == 2.0
    assert times.end_s[last] == 5.0


def test_virtual_lanes_take_real_messages():
    """Real messages are submitted as usual, and none of their work runs."""
    communicators = DryCommunicators(0, Topology(4))
    grad = torch.zeros(1000, device="meta")
    unit = Unit(UnitPlan("p", 1000, from_spec("BlockQuant"), PROGRAMS["alltoall"], True), grad)
    places = communicators.places
    encoded = EncodedMessage([unit], communicators, Feedback(places), Seeds(0, places))
    lanes = VirtualLanes[Stage](lambda stage: Need(1.0 + stage.sent_nbytes))
    dense = DenseMessage(grad, ["p"], communicators)
    routes = [route_of(lanes, each.stages, each.channel) for each in (encoded, dense)]
    tokens = [submit_stages(lanes, route, [lanes.here()]) for route in routes]
    lanes.lane(CODE, 2).submit(lambda: pytest.fail("ran"), tokens)
    end_s = lanes.run().times.end_s
    assert [end_s[token] for token in tokens] == [5.0 + encoded.sent_nbytes, 1.0 + dense.sent_nbytes]
    assert [each.lane.name for each in lanes.submitted] == [
        *("compute-0", "communicate-0-0", "compute-1", "communicate-1-0", "compute-2", "average-0"),
    ]
