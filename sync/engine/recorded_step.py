"""One step of a training with the times of all stages of this rank, in memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..plans.plan import Plan
from ..programs.stages import StageKind

if TYPE_CHECKING:
    from .timeline_recorder import TimelineRecorder

_NS = 1e-9
timeline: TimelineRecorder | None = None
"""The recorder of the timeline that this process records; ``None`` if it records none."""


@dataclass(frozen=True)
class RecordedStage:
    """A stage that has run. Times are in seconds since the first message of the step was submitted.

    Attributes:
        name: its name, such as ``"Encode"`` or ``"AllGather(inter)"``.
        category: ``"compute"``, ``"communicate"`` or ``"copy"``.
        kind: its work.
        lane: the index of its row in :attr:`~gckernels.sync.RecordedStep.lanes`.
        start_s: when it started.
        end_s: when it ended.
        submitted_s: when its message was submitted.
        bucket: the number of its bucket in the step.
        message: the number of its message in the step.
        units: the keys of the message's units.
        compressors: the names of their compressors, each once.
        sent_nbytes: the bytes that a rank sends in it.
        elements: the elements that it encodes, decodes or sends, counted once however many payloads are merged.
        read_nbytes: the bytes that it reads.
    """

    name: str
    category: str
    kind: StageKind
    lane: int
    start_s: float
    end_s: float
    submitted_s: float
    bucket: int
    message: int
    units: tuple[str, ...]
    compressors: tuple[str, ...]
    sent_nbytes: float
    elements: int = 0
    read_nbytes: int = 0


@dataclass(frozen=True)
class RecordedStep:
    """A step of this rank. Times are in seconds since its first message was submitted.

    Attributes:
        step: the number of the step.
        rank: this rank.
        lanes: the names of the rows: those of lanes, which have several rows if stages overlap.
        stages: the stages, in the order in which they started.
        submitted_s: when the last message was submitted: the gradients were complete, and backward was over or nearly.
        end_s: when the last stage ended.
        plan_fingerprint: the fingerprint of the plan with which it was made.
    """

    step: int
    rank: int
    lanes: tuple[str, ...]
    stages: tuple[RecordedStage, ...]
    submitted_s: float
    end_s: float
    plan_fingerprint: str

    @property
    def hidden_s(self) -> float:
        """The seconds during which something was sent and backward still computed."""
        return covered_s(
            (stage.start_s, min(stage.end_s, self.submitted_s)) for stage in self.stages if _communicates(stage)
        )

    @property
    def exposed_s(self) -> float:
        """The seconds from the last gradient to the end of the last stage, for which training waits."""
        return max(self.end_s - self.submitted_s, 0.0)


class StepTracer:
    """Records a step when it is asked to. A plan that follows another one takes its tracer over.

    Args:
        rank: this rank.

    Attributes:
        recorder: the recorder of the step that is being submitted; ``None`` for all other steps.
    """

    def __init__(self, rank: int) -> None:
        self.recorder: TimelineRecorder | None = None
        self._rank, self._is_asked = rank, False
        self._finished: tuple[TimelineRecorder, int, Plan] | None = None
        self._last: RecordedStep | None = None

    def ask(self) -> None:
        """Record the next step. A step inside a :func:`~gckernels.sync.record_timeline` is not recorded twice: the step
        behind it is."""
        self._is_asked = True

    def begin(self) -> None:
        """Note that the first message of a step will be submitted."""
        self.recorder = None
        if self._is_asked and timeline is None:
            from . import timeline_recorder as recorders

            self.recorder = recorders.TimelineRecorder(self._rank)

    def end(self, step: int, plan: Plan) -> None:
        """Note that all messages of a step have been submitted.

        Args:
            step: its number.
        """
        if self.recorder is not None:
            self._finished, self.recorder, self._is_asked = (self.recorder, step, plan), None, False

    @property
    def last(self) -> RecordedStep | None:
        """The last step that was recorded and has ended; ``None`` if there is none."""
        if self._finished is not None:
            recorder, step, plan = self._finished
            record = recorder.record(wait=False)
            if len(record["events"]) == recorder.num_observed:
                self._finished = None
                self._last = _step_of(record, step, self._rank, plan) or self._last
        return self._last


def _step_of(record: dict[str, Any], step: int, rank: int, plan: Plan) -> RecordedStep | None:
    """The step of a recording; ``None`` if nothing has run in it."""
    events = record["events"]
    if not events:
        return None
    first_ns = min(event["args"]["submitted_ns"] for event in events)
    stages = []
    for event in events:
        args, start_ns = event["args"], event["ts"]
        start_s, end_s = (start_ns - first_ns) * _NS, (event["ts"] + event["dur"] - first_ns) * _NS
        submitted_s = (args["submitted_ns"] - first_ns) * _NS
        origin = (args["bucket"], args["message"], tuple(args["units"]), tuple(args["compressors"]))
        named = (event["name"], event["cat"], StageKind(args["kind"]), event["tid"])
        sizes = (args["bytes"], args["elements"], args["read_bytes"])
        stages.append(RecordedStage(*named, start_s, end_s, submitted_s, *origin, *sizes))
    stages.sort(key=lambda stage: (stage.start_s, stage.lane))
    submitted_s, end_s = (max(getattr(each, name) for each in stages) for name in ("submitted_s", "end_s"))
    return RecordedStep(step, rank, tuple(record["lanes"]), tuple(stages), submitted_s, end_s, plan.fingerprint())


def _communicates(stage: RecordedStage) -> bool:
    return stage.category == "communicate"


def covered_s(spans: Iterable[tuple[float, float]]) -> float:
    """The length of the union of spans; those that end before they start are empty."""
    ordered = sorted(span for span in spans if span[0] < span[1])
    ends = itertools.accumulate((end for _, end in ordered), max, initial=float("-inf"))
    return sum(max(end - max(start, before), 0.0) for (start, end), before in zip(ordered, ends, strict=False))
