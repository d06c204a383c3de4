"""Gradient synchronisation for PyTorch: plans, programs, and the ways to attach them to a model."""

from __future__ import annotations

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


def __getattr__(name: str) -> object:
    """A name that most trainings do not need, so it is imported when it is asked for."""
    match name:
        case "AdamDirection":
            from .frontends.adam_direction import AdamDirection

            return AdamDirection
        case "ModelTrace":
            from .traces.model_trace import ModelTrace

            return ModelTrace
        case "ModelTracing":
            from .tracing.model_tracing import ModelTracing

            return ModelTracing
        case "TraceError":
            from .traces.traced_tensors import TraceError

            return TraceError
        case "quadratic_rounds":
            from .frontends.updates.schedule import quadratic_rounds

            return quadratic_rounds
        case "record_timeline":
            from .engine.timeline_file import record_timeline

            return record_timeline
        case "trace_model":
            from .tracing.model_tracing import trace_model

            return trace_model
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
