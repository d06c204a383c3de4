"""Timelines of a training: every stage of every message on its lane.

The engine looks for a recorder once for each message. Without one, that is the only cost.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.futures import Future

from gckernels.devices import event_behind, profiler_range, synchronize

from ..messages.message import Message
from ..programs.stages import Resource, spec_to_json
from ..resources.lane_kinds import Lane
from ..resources.stage import Issue, Stage, Wait
from ..resources.workers import Work

Record = dict[str, Any]
"""The recording of one rank, as JSON: ``rank``, ``anchor_ns``, ``lanes`` (names by tid), ``events``."""


@dataclass(frozen=True)
class _Span:
    """A stage that has run."""

    lane: Lane  # the lane that ran it
    event: dict[str, Any]  # its description in Chrome's format, without times
    start: Any  # nanoseconds of the monotonic clock, or a device event
    end: Any  # likewise


class TimelineRecorder:
    """The stages that this process has run since a trace began.

    Args:
        rank: rank of this process in the default group.

    Attributes:
        num_observed: number of stages that have been submitted.
    """

    def __init__(self, rank: int) -> None:
        self.num_observed = 0
        self._rank, self._anchor_ns = rank, _anchor_ns()
        self._spans: list[_Span] = []  # the threads of lanes append, which needs no lock
        self._order: dict[Lane, tuple[int, int, str]] = {}
        self._clocks: dict[torch.device, _DeviceClock] = {}
        self._messages, self._buckets = 0, 0  # submitted so far

    def observe(self, message: Message, step: int, phases: int) -> Callable[[Stage, Lane], Stage]:
        """A function that makes the stages of ``message`` record themselves, on the lane that it is given.

        Called when the message is submitted, which is recorded, too.

        Args:
            message: message to submit.
            step: number of the training step.
            phases: collectives of the engine's longest program.
        """
        shared = {
            "step": step,
            "units": message.keys,
            "compressors": message.compressors,
            "channel": message.channel,
            "message": self._messages,
            "bucket": self._buckets,
            "phases": phases,
            "submitted_ns": time.perf_counter_ns(),
        }
        self._messages += 1
        numbers = itertools.count()
        return lambda stage, lane: self._timed(stage, lane, shared | {"stage": next(numbers)})

    def finish(self) -> None:
        """Record that the messages of a bucket have been submitted, and are waited for together."""
        self._buckets += 1

    def _timed(self, stage: Stage, lane: Lane, shared: dict[str, Any]) -> Stage:
        """``stage`` that also records when it ran."""
        spec = stage.spec
        self.num_observed += 1
        self._order.setdefault(lane, (spec.phase, list(Resource).index(spec.resource), lane.name))
        sizes = {"bytes": stage.sent_nbytes, "elements": stage.elements}
        sizes |= {"read_bytes": stage.read_nbytes, "written_bytes": stage.written_nbytes}
        event = {
            "ph": "X",
            "pid": self._rank,
            "name": spec.name,
            "cat": spec.resource.does,
            "args": shared | sizes | spec_to_json(spec),
        }
        if lane.stream is not None:
            return replace(stage, work=functools.partial(self._on_stream, stage.work, lane, lane.stream, event))
        begin = None if stage.begin is None else functools.partial(self._begin, stage.begin, lane, event)
        issue = None if stage.issue is None else functools.partial(self._issue, stage.issue, lane, event)
        work = functools.partial(self._on_thread, stage.work, lane, event)
        return replace(stage, work=work, begin=begin, issue=issue)

    def _issue(self, issue: Issue, lane: Lane, event: dict[str, Any]) -> Wait:
        """Issue a collective. The time until it ends is recorded from when the lane waits for no earlier one."""
        return functools.partial(self._on_thread, issue(), lane, event)

    def _begin(self, begin: Callable[[], Future[Any]], lane: Lane, event: dict[str, Any]) -> Future[Any]:
        """Start a stage in the thread that submits it."""
        future = begin()
        start = event["args"]["begun_ns"] = time.perf_counter_ns()
        # before all other callbacks, so that a trace that ends with the bucket has the stage
        future.add_done_callback(lambda ended: self._spans.append(_Span(lane, event, start, time.perf_counter_ns())))
        return future

    def _on_thread(self, work: Work, lane: Lane, event: dict[str, Any]) -> None:
        start = time.perf_counter_ns()
        try:
            work()
        finally:
            self._spans.append(_Span(lane, event, start, time.perf_counter_ns()))

    def _on_stream(self, work: Work, lane: Lane, stream: torch.Stream, event: dict[str, Any]) -> None:
        if stream.device not in self._clocks:
            self._clocks[stream.device] = _DeviceClock(stream)
        with profiler_range(stream.device, f"{event['name']}, step {event['args']['step']}"):
            start = event_behind(stream, is_timed=True)
            try:
                work()
            finally:
                self._spans.append(_Span(lane, event, start, event_behind(stream, is_timed=True)))

    def record(self, wait: bool) -> Record:
        """The recording so far, with times in nanoseconds since the epoch.

        Args:
            wait: whether to wait for the devices first. If not, work that they have not finished, which may be stuck,
                is left out.
        """
        if wait:
            for device in self._clocks:
                synchronize(device)
        spans = list(self._spans)  # a copy: lanes may still append
        timed = [(times, span) for span in spans if (times := self._times_ns(span)) is not None]
        timed.sort(key=lambda each: each[0])
        rows: dict[Lane, list[int]] = {lane: [0] for lane in self._order}  # the end of the last span in each row
        placed = [(_place(rows[span.lane], span, *times), times, span) for times, span in timed]
        # in the order in which messages pass through them
        lanes = sorted(self._order, key=self._order.__getitem__)
        names = [f"{lane.name} ({row + 1})" if row else lane.name for lane in lanes for row in range(len(rows[lane]))]
        firsts = dict(zip(lanes, itertools.accumulate((len(rows[lane]) for lane in lanes), initial=0), strict=False))
        events = []
        for row, (start, end), span in placed:
            args = {
                key: value + self._anchor_ns if key.endswith("_ns") else value
                for key, value in span.event["args"].items()
            }
            tid = firsts[span.lane] + row
            events.append(span.event | {"tid": tid, "ts": start, "dur": end - start, "args": args})
        return {"rank": self._rank, "anchor_ns": self._anchor_ns, "lanes": names, "events": events}

    def _times_ns(self, span: _Span) -> tuple[int, int] | None:
        """Start and end of a span; ``None`` if a device has not finished it."""
        start, end = span.start, span.end
        if span.lane.stream is not None:
            if not end.query():
                return None
            clock = self._clocks[span.lane.stream.device]
            start, end = clock.host_ns(start), clock.host_ns(end)
        return self._anchor_ns + start, self._anchor_ns + end


def _place(rows: list[int], span: _Span, start: int, end: int) -> int:
    """The row of a lane that shows a span. Spans that the submitting thread has started may overlap.

    Args:
        rows: the end of the last span in each row of the lane, to which this span is added.
        span: the span. All that start earlier have been placed.
        start, end: its times.
    """
    overlaps = "begun_ns" in span.event["args"]
    row = next((row for row, last in enumerate(rows) if last <= start or not overlaps), len(rows))
    rows[row : row + 1] = [end]
    return row


class _DeviceClock:
    """Conversion of a device's events to the monotonic clock of the host, by one event whose time is known on both.

    Construction waits for the work on ``stream``. A minute later the conversion is still exact to some microseconds.
    """

    def __init__(self, stream: torch.Stream) -> None:
        self._anchor = event_behind(stream, is_timed=True)
        self._anchor.synchronize()
        self._anchor_ns = time.perf_counter_ns()

    def host_ns(self, event: torch.Event) -> int:
        """The time of an event in nanoseconds of the host's monotonic clock."""
        elapsed_ms: float = self._anchor.elapsed_time(event)
        return self._anchor_ns + round(elapsed_ms * 1e6)


def _anchor_ns() -> int:
    """Offset in nanoseconds of the time since the epoch to the monotonic clock; the most exact of ten readings."""
    readings = []
    for _ in range(10):
        before, epoch, after = time.perf_counter_ns(), time.time_ns(), time.perf_counter_ns()
        readings.append((after - before, epoch - (before + after) // 2))
    return min(readings)[1]
