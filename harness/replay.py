"""Replays of traces: the measured durations of stages on virtual lanes.

If a replay takes as long as the measured step, then lanes, their order and the times of submission are modelled
correctly. A replay lacks only the time in which threads hand work over to each other.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gckernels.planner.timeline.simulator import Need
from gckernels.planner.timeline.virtual_lanes import VirtualLanes
from gckernels.sync.programs.lanes import lane_key, route_of, submit_stages
from gckernels.sync.programs.stages import Resource, StageKind, StageSpec
from gckernels.sync.programs.steps import Level, Place

_US = 1e-6


@dataclass(frozen=True)
class ReplayedStage:
    """A stage of a trace. Times are in seconds since the first stage of the trace.

    Attributes:
        spec: its specification.
        lane: name of its lane.
        start_s: when it started on its lane.
        end_s: when it ended there.
        begun_s: when the submitting thread had started it; ``None`` if its lane has started it.
        handed_over_s: seconds between the time when it could have started, and its start.
    """

    spec: StageSpec
    lane: str
    start_s: float
    end_s: float
    begun_s: float | None
    handed_over_s: float


@dataclass(frozen=True)
class ReplayedMessage:
    """A message of a trace.

    Attributes:
        submitted_s: when it was submitted, in seconds since the first stage of the trace.
        channel: channel of its collectives.
        stages: its stages, in order.
        bucket: number of its bucket. One lane waits for all messages of a bucket, and other messages may need that
            lane. No lane waits for a bucket that is a single collective, started by the submitting thread.
        phases: number of collectives of the longest program, on which the choice of that lane depends.
    """

    submitted_s: float
    channel: int
    stages: tuple[ReplayedStage, ...]
    bucket: int
    phases: int


def read_steps(path: str | os.PathLike[str]) -> dict[int, dict[int, list[ReplayedMessage]]]:
    """The messages in a file of :func:`gckernels.sync.record_timeline`, by rank and step, in order of submission."""
    ranks: dict[int, dict[int, list[dict[str, Any]]]] = {}
    content = json.loads(Path(path).read_text())
    names = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in content["traceEvents"]
        if event["ph"] == "M" and event["name"] == "thread_name"
    }
    for event in content["traceEvents"]:
        if event["ph"] == "X" and "message" in event["args"]:  # predicted steps also have forward and backward
            lane = names[event["pid"], event["tid"]]
            ranks.setdefault(event["pid"], {}).setdefault(event["args"]["step"], []).append(event | {"lane": lane})
    return {
        rank: {step: _messages(events) for step, events in sorted(steps.items())}
        for rank, steps in sorted(ranks.items())
    }


def _messages(events: list[dict[str, Any]]) -> list[ReplayedMessage]:
    events.sort(key=lambda event: (event["args"]["message"], event["args"]["stage"]))
    free_s: dict[str, float] = {}  # when each lane had finished its earlier work
    bucket: list[ReplayedMessage] = []  # the messages of the current one so far
    found: list[ReplayedMessage] = []
    for _, group in itertools.groupby(events, key=lambda event: event["args"]["message"]):
        stages: list[ReplayedStage] = []
        first, *_ = same = list(group)
        head = first["args"]
        if bucket and bucket[0].bucket != head["bucket"]:
            if _has_waiting_lane(bucket):
                waits = lane_key(Resource.COMPUTE, head["phases"]).name
                free_s[waits] = max(free_s.get(waits, -math.inf), *(each.stages[-1].end_s for each in bucket))
            bucket = []
        for event in same:
            before_s = stages[-1].end_s if stages else head["submitted_us"] * _US
            stages.append(_stage(event, max(before_s, free_s.get(event["lane"], -math.inf))))
            free_s[event["lane"]] = stages[-1].end_s
        submitted_s = head["submitted_us"] * _US
        found.append(ReplayedMessage(submitted_s, head["channel"], tuple(stages), head["bucket"], head["phases"]))
        bucket.append(found[-1])
    return found


def _has_waiting_lane(bucket: Sequence[ReplayedMessage]) -> bool:
    """Whether a lane waits for all messages of a bucket."""
    return len(bucket) > 1 or bucket[0].stages[0].begun_s is None


def _stage(event: dict[str, Any], ready_s: float) -> ReplayedStage:
    args, start_s, end_s = event["args"], event["ts"] * _US, (event["ts"] + event["dur"]) * _US
    begun_s = args["begun_us"] * _US if "begun_us" in args else None
    return ReplayedStage(
        _spec(event["name"], args), event["lane"], start_s, end_s, begun_s, max(start_s - ready_s, 0.0)
    )


def _spec(name: str, args: dict[str, Any]) -> StageSpec:
    """The spec that :func:`gckernels.sync.programs.stages.spec_to_json` has written into the arguments of an event."""
    return StageSpec(
        StageKind(args["kind"]),
        name,
        args["phase"],
        Resource(args["resource"]),
        args["steps"][0],
        args["steps"][1],
        Place(args["place"]),
        None if args["level"] is None else Level(args["level"]),
        args["encoding"],
        args["starts_immediately"],
    )


@dataclass(frozen=True)
class Replay:
    """The duration of a training step of one rank, from the first submission to the end of the last stage.

    Attributes:
        measured_s: measured seconds.
        replayed_s: seconds in the replay.
    """

    measured_s: float
    replayed_s: float

    @property
    def error(self) -> float:
        """The relative error of the replay; negative if it is too short."""
        return self.replayed_s / self.measured_s - 1.0


def replay(messages: list[ReplayedMessage], with_hand_overs: bool = False) -> Replay:
    """Submit the messages of a step to virtual lanes, at the recorded times.

    Args:
        messages: the messages of one rank and step, in the order of their submission.
        with_hand_overs: whether to add to each stage the time that its lane took to start it. The replay is then exact
            if stages wait for each other on virtual lanes as on real ones.
    """
    message_s = 0.0

    def need(stage: ReplayedStage) -> Need:
        if stage.begun_s is not None:
            return Need(stage.end_s - stage.begun_s, submit_s=stage.begun_s - message_s)
        return Need(stage.end_s - stage.start_s + (stage.handed_over_s if with_hand_overs else 0.0))

    first_s = min(message.submitted_s for message in messages)
    lanes = VirtualLanes(need)
    for _, group in itertools.groupby(messages, key=lambda message: message.bucket):
        tokens, bucket = [], list(group)
        for message in bucket:
            message_s = message.submitted_s
            lanes.wait_until(message_s - first_s)
            route = route_of(lanes, message.stages, message.channel)
            tokens.append(submit_stages(lanes, route, (lanes.here(),)))
        if _has_waiting_lane(bucket):
            lanes.lane(Resource.COMPUTE, bucket[0].phases).submit(lambda: None, tokens)
    measured_s = max(stage.end_s for message in messages for stage in message.stages) - first_s
    return Replay(measured_s, lanes.run().end_s)
