"""The data of a report: all that its page shows, as frozen values, and where they are found."""

from __future__ import annotations

import datetime
import platform
from dataclasses import dataclass

import torch
import torch.distributed as dist

import gckernels
from gckernels.ops import Identity

from ..engine.recorded_step import RecordedStep
from ..frontends.frontend import ModelFrontend
from ..plans.names import program_name, short_spec
from ..plans.prediction import Prediction
from ..plans.strides import in_reals
from ..plans.units import UnitPlan
from ..programs.sizes import plain_sent_nbytes, unit_sent_nbytes
from ..programs.spans import Span
from ..programs.topology import Topology
from ..stats.decisions import Decision
from ..stats.history import Sample
from ..stats.stats import Figures


@dataclass(frozen=True)
class UnitRow:
    """A unit of the plan.

    Attributes:
        name: its key in the plan.
        numel: its elements.
        nbytes: the bytes of its gradient.
        compressor: the spec of its compressor; empty if it is averaged without one.
        program: the name of its program.
        feedback: the part of its error that is added to the next gradient, from 0 to 1.
        sent_nbytes: the bytes that a rank sends for it in a step, as a mean over all ranks.
        plain_nbytes: the same without compression.
    """

    name: str
    numel: int
    nbytes: int
    compressor: str
    program: str
    feedback: float
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


# -------------------------------------------------------------------- of an attachment


def collected(frontend: ModelFrontend, figures: Figures, residual_nbytes: int, title: str | None = None) -> ReportData:
    """All that is known of a training on this rank. Communicates nothing; on a device it waits for the last sample.

    Args:
        frontend: the front end of its attachment.
        figures: its figures.
        residual_nbytes: the bytes of residuals and their copies.
        title: the name of the training; by default that of the model in the plan's prediction.
    """
    plan, group = frontend.runtime.plan, frontend.runtime.group
    ranks = dist.get_world_size(group)
    topology = plan.topology_of(ranks)
    dtypes = {name: in_reals(parameter).dtype for name, parameter in frontend.parameters().items()}
    prediction = frontend.plan.prediction
    known = "Training" if prediction is None else prediction.trace.name
    return ReportData(
        model=title or known,
        averager=frontend.kind.traits.name,
        ranks=ranks,
        rank=dist.get_rank(group),
        device=str(frontend.device),
        backend=dist.get_backend(group),
        step=figures.journal.step,
        made=datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        software=_software(),
        fingerprint=frontend.plan.fingerprint(),
        start_step=plan.start_step,
        channels=plan.channels,
        residual_nbytes=residual_nbytes,
        units=tuple(_row(unit, dtypes[unit.parameter], topology, plan.span) for unit in plan.units),
        prediction=prediction,
        decisions=tuple(figures.journal.decisions),
        samples=figures.journal.samples,
        traced=frontend.runtime.tracer.last,
    )


def _row(unit: UnitPlan, dtype: torch.dtype, topology: Topology, span: Span) -> UnitRow:
    nbytes, ranks = unit.numel * dtype.itemsize, topology.world_size
    return UnitRow(
        name=unit.key,
        numel=unit.numel,
        nbytes=nbytes,
        compressor="" if isinstance(unit.compressor, Identity) else short_spec(unit.compressor),
        program=program_name(unit.program, ranks),
        feedback=unit.feedback,
        sent_nbytes=unit_sent_nbytes(unit.program, unit.numel, dtype, unit.compressor, topology, span),
        plain_nbytes=plain_sent_nbytes(nbytes, ranks, span),
    )


def _software() -> str:
    versions = (("gckernels", gckernels.__version__), ("torch", torch.__version__))
    return ", ".join(f"{name} {version}" for name, version in (*versions, ("Python", platform.python_version())))
