"""The data of a report: all that its page shows, as frozen values."""

from __future__ import annotations

from dataclasses import dataclass

from ..engine.recorded_step import RecordedStep
from ..plans.prediction import Prediction
from ..stats.decisions import Decision
from ..stats.history import Sample


@dataclass(frozen=True)
class UnitRow:
    """A unit of the plan.

    Attributes:
        name: its key in the plan.
        numel: its elements.
        nbytes: the bytes of its gradient.
        compressor: the spec of its compressor; empty if it is averaged without one.
        program: the name of its program.
        feedback: whether its error is kept and added to the next gradient.
        sent_nbytes: the bytes that a rank sends for it in a step, as a mean over all ranks.
        plain_nbytes: the same without compression.
    """

    name: str
    numel: int
    nbytes: int
    compressor: str
    program: str
    feedback: bool
    sent_nbytes: float
    plain_nbytes: float

    @property
    def sent_by(self) -> str:
        """The compressor and the program, or that there is none."""
        return f"{self.compressor} by {self.program}" if self.compressor else EXACT


EXACT = "exact"
"""The name of the way of units that are averaged without compression."""


@dataclass(frozen=True)
class ReportData:
    """A training as its report shows it.

    Attributes:
        model: the name of the model's class.
        averager: the class that averages its gradients, ``"DistributedDataParallel"``, or ``"a bare module"``.
        ranks: the number of ranks.
        rank: the rank that has written the report.
        device: its device, such as ``"cpu"``.
        backend: the back end of its process group.
        step: the number of steps so far.
        made: date and time of the report.
        software: names and versions of the software.
        fingerprint: the hash of the plan.
        start_step: the first step that is compressed.
        channels: the number of channels of the plan.
        residual_nbytes: the memory that residuals take on this rank.
        units: the units of the plan, in its order.
        prediction: the prediction of the plan; ``None`` if nobody has made one.
        decisions: the decisions so far, in their order.
        samples: the figures of the run so far, in their order.
        traced: a step whose stages have been recorded; ``None`` without one.
    """

    model: str
    averager: str
    ranks: int
    rank: int
    device: str
    backend: str
    step: int
    made: str
    software: str
    fingerprint: str
    start_step: int
    channels: int
    residual_nbytes: int
    units: tuple[UnitRow, ...]
    prediction: Prediction | None = None
    decisions: tuple[Decision, ...] = ()
    samples: tuple[Sample, ...] = ()
    traced: RecordedStep | None = None

    @property
    def compresses(self) -> bool:
        """Whether the plan compresses anything."""
        return any(unit.compressor for unit in self.units)

    @property
    def sent_nbytes(self) -> float:
        """The bytes that a rank sends in a step with the plan, as a mean over all ranks."""
        return sum(unit.sent_nbytes for unit in self.units)

    @property
    def plain_nbytes(self) -> float:
        """The bytes that it would send without compression."""
        return sum(unit.plain_nbytes for unit in self.units)
