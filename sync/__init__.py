"""Gradient synchronisation for PyTorch: plans, programs, and the ways to attach them to a model."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from . import programs as programs
from .attaching.attach import attach
from .attaching.attachment import Attachment
from .attaching.average_updates import average_updates
from .engine.recorded_step import RecordedStep
from .engine.timeline_recorder import record_timeline
from .frontends.request import uniform_plan
from .plans.builders import exempt_vectors
from .plans.plan import Frontend, Plan, PlanError, UnitPlan
from .plans.prediction import Prediction
from .programs.topology import Topology
from .stats.decisions import Decision
from .stats.history import Sample
from .traces.model_trace import ModelTrace
from .traces.traced_tensors import TraceError
from .tracing import ModelTracing, trace_model
from .tuning.auto import Auto

if TYPE_CHECKING:
    from .profiling.measure import profile

__all__ = [
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
    "attach",
    "average_updates",
    "exempt_vectors",
    "profile",
    "programs",
    "record_timeline",
    "trace_model",
    "uniform_plan",
]


def __getattr__(name: str) -> object:
    """Import what measures machines when it is asked for, so that attaching does not wait for it."""
    if name == "profile":
        return importlib.import_module(".profiling.measure", __name__).profile
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
