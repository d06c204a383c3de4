"""The figures at the head of a report: how long a step takes, and how long without compression."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from .data import ReportData

_LAST = 5  # samples whose median is the present time of a step


@dataclass(frozen=True)
class Time:
    """A time of a step.

    Attributes:
        seconds: the time.
        measured: whether it was measured and not predicted.
    """

    seconds: float
    measured: bool


def step_time(data: ReportData) -> Time | None:
    """The present time of a step: measured in the last steps, or when the plan was decided; else predicted."""
    begun = data.decisions[-1].step if data.decisions else 0
    recent = [row.step_s for row in data.samples if row.step_s is not None and row.step > begun][-_LAST:]
    if recent:
        return Time(statistics.median(recent), True)
    for row in reversed(data.decisions):
        if row.measured_s is not None:
            return Time(row.measured_s, True)
    return None if data.prediction is None else Time(data.prediction.step_s, False)


def plain_time(data: ReportData) -> Time | None:
    """The time of a step without compression, measured or predicted."""
    for row in reversed(data.decisions):
        if row.none_s is not None:
            return Time(row.none_s, True)
    return None if data.prediction is None else Time(data.prediction.none_s, False)


def speedup(data: ReportData) -> float | None:
    """How many times as fast a step is as without compression. Times are compared only if both were obtained alike."""
    step, plain = step_time(data), plain_time(data)
    if step is None or plain is None or not step.seconds or not data.compresses:
        return None
    if step.measured != plain.measured:
        prediction = data.prediction
        return None if prediction is None or not prediction.step_s else prediction.none_s / prediction.step_s
    return plain.seconds / step.seconds
