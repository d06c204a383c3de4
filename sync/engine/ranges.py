"""Ranges for ``torch.profiler``: every stage on its lane, and the submission of every message.

A range costs some microseconds, so there are ranges only while a profiler runs. Otherwise the engine reads one variable
for each message.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from torch.autograd import profiler

from ..messages.message import Message
from ..resources.lane_kinds import Lane
from ..resources.stage import Issue, Stage, Wait

if TYPE_CHECKING:
    from .timeline_recorder import TimelineRecorder

R = TypeVar("R")
SUBMIT = "gckernels::submit"
"""The range in which a message is submitted."""


def is_profiling() -> bool:
    """Whether a profiler of torch runs in this process."""
    return profiler._is_profiler_enabled


def observer(
    recorder: TimelineRecorder | None, message: Message, step: int, phases: int
) -> Callable[[Stage, Lane], Stage] | None:
    """A function that makes the stages of ``message`` record themselves, and show themselves to a profiler; ``None`` if
    nothing is recorded and no profiler runs.

    Args:
        recorder: records the stages; ``None`` to record nothing.
        message: message to submit.
        step: number of the training step.
        phases: collectives of the engine's longest program.
    """
    record = None if recorder is None else recorder.observe(message, step, phases)
    if not is_profiling():
        return record
    return with_range if record is None else lambda stage, lane: record(with_range(stage, lane), lane)


def with_range(stage: Stage, lane: Lane) -> Stage:
    """``stage`` that runs in a range, such as ``gckernels::communicate-0-0::AllGather``.

    Ranges have the same names in all steps, so that the profiler can add up their times.
    """
    name = f"gckernels::{lane.name}::{stage.spec.name}"
    begin = None if stage.begin is None else functools.partial(in_range, f"{name}::issue", stage.begin)
    issue = None if stage.issue is None else functools.partial(_issue, name, stage.issue)
    return replace(stage, work=functools.partial(in_range, name, stage.work), begin=begin, issue=issue)


def in_range(name: str, call: Callable[[], R]) -> R:
    """The result of ``call``, which runs in a range."""
    with profiler.record_function(name):
        return call()


def _issue(name: str, issue: Issue) -> Wait:
    return functools.partial(in_range, name, in_range(f"{name}::issue", issue))
