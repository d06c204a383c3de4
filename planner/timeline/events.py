"""Timelines in the format of traces, so that Perfetto shows a predicted and a recorded step side by side."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gckernels.sync.programs.lanes import LaneKey
from gckernels.sync.programs.stages import Resource, spec_to_json

from .timeline import Timeline

_US = 1e6
_TRAINING = "training"
_ORDER = list(Resource)


def timeline_events(timeline: Timeline, process: int = 0, name: str = "predicted") -> dict[str, Any]:
    """A predicted step as JSON, in the format of :func:`gckernels.sync.record_timeline`.

    As there, a thread is a lane, and a slice is a stage with the same arguments; those that a prediction does not have,
    such as bytes, are left out. :func:`~..replay.read_steps` reads it. In addition there is a thread for forward,
    backward and optimizer, one for gathers of parameters, and a counter for the load of each shared resource.

    Args:
        timeline: the predicted step.
        process: the number of the process. Give it one that no rank has, to show it beside a recorded trace.
        name: the name of the process.
    """
    lanes = sorted({stage.lane for stage in timeline.stages}, key=_order)
    tids = {lane: tid for tid, lane in enumerate(lanes, start=1)}
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "args": {"name": name}}]
    for tid, label in enumerate([_TRAINING, *(lane.name for lane in lanes)]):
        events.append({"ph": "M", "tid": tid, "name": "thread_name", "args": {"name": label}})
    events += _training(timeline)
    events += (event | {"tid": tids[lane]} for event, lane in _slices(timeline))
    if timeline.gathers:
        events.append({"ph": "M", "tid": len(tids) + 1, "name": "thread_name", "args": {"name": "gathers"}})
    for names, first, last in timeline.gathers:
        event = _slice(", ".join(names), timeline.run.times.start_s[first], timeline.run.times.end_s[last])
        events.append(event | {"tid": len(tids) + 1, "cat": "gather"})
    events += _counters(timeline)
    return {"traceEvents": [event | {"pid": process} for event in events], "displayTimeUnit": "ms", "otherData": {}}


def _order(lane: LaneKey) -> tuple[int, int, str]:
    """A key that sorts lanes as messages pass through them."""
    return lane.phase, _ORDER.index(lane.resource), lane.name


def _training(timeline: Timeline) -> Iterator[dict[str, Any]]:
    begins_s = timeline.step_s - timeline.optimizer_s
    backward = (("backward", *part) for part in timeline.backward)
    for name, start_s, end_s in (
        ("forward", 0.0, timeline.forward_s),
        *backward,
        ("optimizer", begins_s, timeline.step_s),
    ):
        if end_s > start_s:
            yield _slice(name, start_s, end_s) | {"tid": 0, "cat": "training"}


def _slices(timeline: Timeline) -> Iterator[tuple[dict[str, Any], LaneKey]]:
    """The slices of stages, with their lanes."""
    message, number, submitted_s, channel = -1, 0, 0.0, 0
    channels = {stage.message: stage.lane.channel for stage in timeline.stages if stage.lane.channel is not None}
    for stage, each in zip(timeline.stages, timeline.submitted, strict=True):
        number += 1
        if stage.message != message:
            message, number, channel = stage.message, 0, channels.get(stage.message, 0)
            (before,) = timeline.run.tasks[each.task].after
            submitted_s = timeline.run.times.end_s[before]
        args = {
            "step": 0,
            "units": stage.keys,
            "channel": channel,
            "message": message,
            "bucket": stage.launch,
            "phases": timeline.phases,
            "submitted_us": submitted_s * _US,
            "stage": number,
        }
        begun = {"begun_us": submitted_s * _US} if stage.at_once else {}
        event = _slice(stage.spec.name, stage.start_s, stage.end_s, args | spec_to_json(stage.spec) | begun)
        yield event | {"cat": stage.spec.resource.does}, stage.lane


def _counters(timeline: Timeline) -> Iterator[dict[str, Any]]:
    for shared, load in timeline.utilisation.items():
        for at_s, value in zip(load.times_s.tolist(), [*load.load.tolist(), 0.0], strict=True):
            yield {"ph": "C", "name": shared.value, "ts": at_s * _US, "args": {"load": value}}


def _slice(name: str, start_s: float, end_s: float, args: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"ph": "X", "name": name, "ts": start_s * _US, "dur": (end_s - start_s) * _US, "args": args or {}}
