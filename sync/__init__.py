"""Gradient synchronisation for PyTorch: plans, programs, and the way to attach them to a model."""

from . import programs as programs
from .attaching.attach import attach
from .attaching.attachment import Attachment
from .engine.recorded_step import RecordedStep
from .engine.timeline_recorder import record_timeline
from .frontends.request import uniform_plan
from .plans.builders import exempt_vectors
from .plans.plan import Frontend, Plan, PlanError, UnitPlan
from .plans.prediction import Prediction
from .profiling.request import profile
from .programs.topology import Topology
from .stats.decisions import Decision
from .stats.history import Sample
from .traces.model_trace import Trace, TraceError
from .traces.trace_files import read_trace, write_trace
from .tracing import ModelTracing, trace_model
from .tuning.auto import Auto

__all__ = [
    "Attachment",
    "Auto",
    "Decision",
    "Frontend",
    "ModelTracing",
    "Plan",
    "PlanError",
    "Prediction",
    "RecordedStep",
    "Sample",
    "Topology",
    "Trace",
    "TraceError",
    "UnitPlan",
    "attach",
    "exempt_vectors",
    "profile",
    "programs",
    "read_trace",
    "record_timeline",
    "trace_model",
    "uniform_plan",
    "write_trace",
]
