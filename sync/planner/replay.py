"""Replays of traces: the measured durations of stages, on virtual lanes.

A replay that takes as long as the measured step says that lanes, their order and the times of submission are right.
What it lacks is the time in which threads hand work over to each other.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..programs.lanes import lane_key, submit_stages
from ..programs.stages import Resource, StageSpec, spec_from_json
from .virtual_lanes import Cost, VirtualLanes

_US = 1e-6


@dataclass(frozen=True)
class RecordedStage:
    """A stage of a trace. Times are in seconds since the first stage of the trace.

    Attributes:
        spec: what it did.
        lane: the name of its lane.
        start_s, end_s: when it ran on its lane.
        begun_s: if the submitting thread has started it at once: when that was done.
        handed_over_s: seconds from when its lane was free and all before it done, to its start.
    """

    spec: StageSpec
    lane: str
    start_s: float
    end_s: float
    begun_s: float | None
    handed_over_s: float


@dataclass(frozen=True)
class RecordedMessage:
    """A message of a trace.

    Attributes:
        submitted_s: when it was submitted, in seconds since the first stage of the trace.
        channel: of its collectives.
        stages: in order.
        bucket: the messages of a bucket are waited for together, on a lane that other messages may need.
        phases: collectives of the longest program, which tell that lane.
    """

    submitted_s: float
    channel: int
    stages: tuple[RecordedStage, ...]
    bucket: int
    phases: int


def read_steps(path: str | os.PathLike[str]) -> dict[int, dict[int, list[RecordedMessage]]]:
    """The messages of a trace of :func:`gckernels.sync.trace`, by rank and training step, as they were submitted."""
    ranks: dict[int, dict[int, list[dict[str, Any]]]] = {}
    content = json.loads(Path(path).read_text())
    names = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in content["traceEvents"]
        if event["ph"] == "M" and event["name"] == "thread_name"
    }
    for event in content["traceEvents"]:
        if event["ph"] == "X":
            lane = names[event["pid"], event["tid"]]
            ranks.setdefault(event["pid"], {}).setdefault(event["args"]["step"], []).append(event | {"lane": lane})
    return {
        rank: {step: _messages(events) for step, events in sorted(steps.items())}
        for rank, steps in sorted(ranks.items())
    }


def _messages(events: list[dict[str, Any]]) -> list[RecordedMessage]:
    events.sort(key=lambda event: (event["args"]["message"], event["args"]["stage"]))
    free_s: dict[str, float] = {}  # when a lane had done what was submitted to it before
    ends_s: list[float] = []  # of the messages of a bucket
    found: list[RecordedMessage] = []
    for _, group in itertools.groupby(events, key=lambda event: event["args"]["message"]):
        stages: list[RecordedStage] = []
        first, *_ = same = list(group)
        head = first["args"]
        if found and found[-1].bucket != head["bucket"]:
            waits = lane_key(Resource.COMPUTE, head["phases"]).name
            free_s[waits] = max(free_s.get(waits, -math.inf), *ends_s)
            ends_s = []
        for event in same:
            before_s = stages[-1].end_s if stages else head["submitted_us"] * _US
            stages.append(_stage(event, max(before_s, free_s.get(event["lane"], -math.inf))))
            free_s[event["lane"]] = stages[-1].end_s
        ends_s.append(stages[-1].end_s)
        submitted_s = head["submitted_us"] * _US
        found.append(RecordedMessage(submitted_s, head["channel"], tuple(stages), head["bucket"], head["phases"]))
    return found


def _stage(event: dict[str, Any], ready_s: float) -> RecordedStage:
    args, start_s, end_s = event["args"], event["ts"] * _US, (event["ts"] + event["dur"]) * _US
    begun_s = args["begun_us"] * _US if "begun_us" in args else None
    spec = spec_from_json(event["name"], args)
    return RecordedStage(spec, event["lane"], start_s, end_s, begun_s, max(start_s - ready_s, 0.0))


@dataclass(frozen=True)
class Replay:
    """A training step of one rank: seconds from its first submission to the end of its last stage, as they were
    measured and as they are replayed."""

    measured_s: float
    replayed_s: float

    @property
    def error(self) -> float:
        """The relative error of the replay; negative if it is too short."""
        return self.replayed_s / self.measured_s - 1.0


def replay(messages: list[RecordedMessage], with_hand_overs: bool = False) -> Replay:
    """Submit the messages of a step, at the times of their submission, to virtual lanes.

    Args:
        messages: in the order of their submission.
        with_hand_overs: add to each stage the time that its lane took to begin it. The replay is then exact if virtual
            lanes make the same stages wait for each other as the real ones.
    """
    message_s = 0.0

    def cost(stage: RecordedStage) -> Cost:
        if stage.begun_s is not None:
            return Cost(stage.end_s - stage.begun_s, stage.begun_s - message_s)
        return Cost(stage.end_s - stage.start_s + (stage.handed_over_s if with_hand_overs else 0.0))

    first_s = min(message.submitted_s for message in messages)
    lanes = VirtualLanes(cost)
    for _, bucket in itertools.groupby(messages, key=lambda message: message.bucket):
        tokens = []
        for message in bucket:
            message_s = message.submitted_s
            lanes.wait_until(message_s - first_s)
            tokens.append(submit_stages(lanes, message.stages, message.channel, 0, (lanes.here(),)))
        lanes.lane(Resource.COMPUTE, message.phases).submit(lambda: None, tokens)
    measured_s = max(stage.end_s for message in messages for stage in message.stages) - first_s
    return Replay(measured_s, lanes.end_s)
