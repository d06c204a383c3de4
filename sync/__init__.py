"""Gradient synchronisation for PyTorch: plans, programs, and two ways to attach them to a model."""

from . import programs as programs
from .engine.timeline_recorder import record_timeline
from .frontends.request import uniform_plan
from .plans.builders import exempt_vectors
from .plans.plan import Attached, Plan, PlanError, UnitPlan
from .plans.prediction import Prediction
from .profiling.request import profile
from .programs.topology import Topology
from .traces.model_trace import Trace, TraceError
from .traces.trace_files import read_trace, write_trace
from .tracing import ModelTracing, trace_model
from .tuning.attach import attach
from .tuning.attachment import Attachment
from .tuning.synchronizer import Synchronizer

__all__ = [
    "Attached",
    "Attachment",
    "ModelTracing",
    "Plan",
    "PlanError",
    "Prediction",
    "Synchronizer",
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
