"""Busy times of lanes, and their overlap, computed from files of :func:`gckernels.sync.record_timeline`."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Interval = tuple[float, float]  # start and end; end >= start


@dataclass(frozen=True)
class Span:
    """A stretch of time in which a lane worked on one message.

    Attributes:
        start, end: seconds.
        communicates: whether the work is a collective; otherwise it is computing.
        message: identifies the message: the step, and the keys of its units.
    """

    start: float
    end: float
    communicates: bool
    message: tuple[Any, ...]

    @property
    def interval(self) -> Interval:
        return self.start, self.end


@dataclass(frozen=True)
class Busy:
    """Busy times of one rank, in seconds.

    Attributes:
        compute_s: time in which at least one lane computed.
        communicate_s: time in which a collective was running, including its wait for other ranks.
        either_s: time in which any lane was busy.
        hidden_s: time in which a lane computed while a collective of another message was running.
        span_s: time from the first start to the last end.
    """

    compute_s: float
    communicate_s: float
    either_s: float
    hidden_s: float
    span_s: float

    @property
    def hidden_share(self) -> float:
        """The share of computing that is hidden, 0 to 1; 0 without computing."""
        return self.hidden_s / self.compute_s if self.compute_s else 0.0


def busy(spans: Sequence[Span]) -> Busy:
    """The busy times of one rank, given its spans."""
    computing = [span for span in spans if not span.communicates]
    communicating = [span for span in spans if span.communicates]
    hidden: list[Interval] = []
    for message in {span.message for span in computing}:
        others = union(span.interval for span in communicating if span.message != message)
        hidden += common(union(span.interval for span in computing if span.message == message), others)
    return Busy(
        compute_s=length(span.interval for span in computing),
        communicate_s=length(span.interval for span in communicating),
        either_s=length(span.interval for span in spans),
        hidden_s=length(hidden),
        span_s=max((span.end for span in spans), default=0.0) - min((span.start for span in spans), default=0.0),
    )


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The union of ``intervals`` as disjoint intervals in order."""
    disjoint: list[Interval] = []
    for start, end in sorted(intervals):
        if disjoint and start <= disjoint[-1][1]:
            disjoint[-1] = (disjoint[-1][0], max(disjoint[-1][1], end))
        else:
            disjoint.append((start, end))
    return disjoint


def length(intervals: Iterable[Interval]) -> float:
    """Total length of the union of ``intervals``."""
    return sum(end - start for start, end in union(intervals))


def common(some: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """The intersection of two unions."""
    pairs = ((max(a[0], b[0]), min(a[1], b[1])) for a, b in itertools.product(some, others))
    return [(start, end) for start, end in pairs if start < end]


def outside(some: Sequence[Interval], whole: Sequence[Interval]) -> list[Interval]:
    """The union ``whole`` without the union ``some``."""
    left = []
    for start, end in whole:
        for other_start, other_end in some:
            if start < other_end and other_start < end:
                if start < other_start:
                    left.append((start, other_start))
                start = other_end
        if start < end:
            left.append((start, end))
    return left


def read_trace(path: str | Path) -> dict[int, list[Span]]:
    """The spans of a trace by rank, in seconds since its first event."""
    ranks: dict[int, list[Span]] = {}
    for event in json.loads(Path(path).read_text())["traceEvents"]:
        if event["ph"] == "X":
            start, end = event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6
            message = (event["args"]["step"], *event["args"]["units"])
            ranks.setdefault(event["pid"], []).append(Span(start, end, event["cat"] == "communicate", message))
    return ranks
