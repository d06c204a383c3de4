"""Gradient synchronisation for PyTorch: plans, programs, and the ways to attach them to a model."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from . import programs as programs
from .attaching.attach import attach
from .attaching.attachment import Attachment
from .attaching.updates import Updates
from .engine.recorded_step import RecordedStep
from .frontends.request import uniform_plan
from .plans.builders import exempt_vectors
from .plans.plan import Frontend, Plan, PlanError, UnitPlan
from .plans.prediction import Prediction
from .programs.topology import Topology
from .stats.decisions import Decision
from .stats.history import Sample
from .tuning.auto import Auto

if TYPE_CHECKING:
    from .engine.timeline_file import record_timeline
    from .frontends.adam_direction import AdamDirection
    from .frontends.updates.schedule import quadratic_rounds
    from .traces.model_trace import ModelTrace
    from .traces.traced_tensors import TraceError
    from .tracing.model_tracing import ModelTracing, trace_model

__all__ = [
    "AdamDirection",
    "Attachment",
    "Auto",
    "Decision",
    "Frontend",
    "ModelTrace",
    "ModelTracing",
    "Plan",
    "PlanError",
    "Prediction",
    "RecordedStep",
    "Sample",
    "Topology",
    "TraceError",
    "UnitPlan",
    "Updates",
    "attach",
    "exempt_vectors",
    "programs",
    "quadratic_rounds",
    "record_timeline",
    "trace_model",
    "uniform_plan",
]


_LATER = {
    "AdamDirection": ".frontends.adam_direction",
    "ModelTrace": ".traces.model_trace",
    "ModelTracing": ".tracing.model_tracing",
    "TraceError": ".traces.traced_tensors",
    "quadratic_rounds": ".frontends.updates.schedule",
    "record_timeline": ".engine.timeline_file",
    "trace_model": ".tracing.model_tracing",
}
"""The modules of names that most trainings do not need. They are imported when a name is asked for."""


def __getattr__(name: str) -> object:
    if name in _LATER:
        return getattr(importlib.import_module(_LATER[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
