"""The data of a report out of an attachment."""

from __future__ import annotations

import datetime
import platform

import torch
import torch.distributed as dist

import gckernels
from gckernels.ops import Identity

from ..frontends.frontend import ModelFrontend
from ..plans.names import program_name, short_spec
from ..plans.plan import Frontend
from ..plans.strides import in_reals
from ..plans.units import UnitPlan
from ..programs.sizes import plain_sent_nbytes, unit_sent_nbytes
from ..programs.spans import Span
from ..programs.topology import Topology
from ..stats.stats import Figures
from .data import ReportData, UnitRow

_AVERAGERS = {
    Frontend.DDP: "DistributedDataParallel",
    Frontend.MODULE: "a bare module",
    Frontend.HSDP: "HSDP",
    Frontend.FSDP: "FSDP",
}


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
        averager=_AVERAGERS[frontend.kind],
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
