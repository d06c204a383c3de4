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
    """A unit of the plan."""

    name: str  # its key in the plan
    numel: int  # its elements
    nbytes: int  # the bytes of its gradient
    compressor: str  # the spec of its compressor; empty if it is averaged without one
    program: str  # the name of its program
    feedback: float  # the part of its error that is added to the next gradient, from 0 to 1
    sent_nbytes: float  # the bytes that a rank sends for it in a step, as a mean over all ranks
    plain_nbytes: float  # the same without compression

    @property
    def sent_by(self) -> str:
        """The compressor and the program, or that there is none."""
        return f"{self.compressor} by {self.program}" if self.compressor else EXACT


EXACT = "exact"
"""The name of the way of units that are averaged without compression."""


@dataclass(frozen=True)
class ReportData:
    """A training as its report shows it."""

    model: str  # the name of the model's class
    averager: str  # the class that averages its gradients, "DistributedDataParallel", or "a bare module"
    ranks: int  # the number of ranks
    rank: int  # the rank that has written the report
    device: str  # its device, such as "cpu"
    backend: str  # the back end of its process group
    step: int  # the number of steps so far
    made: str  # date and time of the report
    software: str  # names and versions of the software
    fingerprint: str  # the hash of the plan
    start_step: int  # the first step that is compressed
    channels: int  # the number of channels of the plan
    residual_nbytes: int  # the memory that residuals take on this rank
    units: tuple[UnitRow, ...]  # the units of the plan, in its order
    prediction: Prediction | None = None  # the prediction of the plan; None if nobody has made one
    decisions: tuple[Decision, ...] = ()  # the decisions so far, in their order
    samples: tuple[Sample, ...] = ()  # the figures of the run so far, in their order
    traced: RecordedStep | None = None  # a step whose stages have been recorded; None without one

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
