"""Gradient synchronisation for PyTorch: plans, programs, and two ways to attach them to a model."""

from .engine.timeline_recorder import record_timeline
from .frontends.request import plan
from .plans.builders import exempt_vectors, parted, spread_roots
from .plans.plan import Attached, Plan, PlanError, UnitPlan
from .plans.prediction import Prediction
from .profiling.request import profile
from .programs.enumeration import enumerate_programs
from .programs.named import (
    ALLGATHER,
    ALLREDUCE,
    ALLTOALL,
    ENCODED_ALLREDUCE,
    HIERARCHICAL,
    PARAMETER_SERVER,
    POWERSGD,
    PROGRAMS,
    default_program,
    ring,
)
from .programs.sizes import allreduce_sent_nbytes
from .programs.steps import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Decode,
    Encode,
    Gather,
    Hop,
    Level,
    Place,
    Program,
    ProgramError,
    Reduce,
    ReduceScatter,
)
from .programs.topology import Topology
from .traces.model_trace import Trace, TraceError
from .traces.trace_files import read_trace, write_trace
from .tracing import ModelTracing, trace_model
from .tuning.attach import attach
from .tuning.attachment import Attachment
from .tuning.synchronizer import Synchronizer

__all__ = [
    "ALLGATHER",
    "ALLREDUCE",
    "ALLTOALL",
    "ENCODED_ALLREDUCE",
    "HIERARCHICAL",
    "PARAMETER_SERVER",
    "POWERSGD",
    "PROGRAMS",
    "AllGather",
    "AllReduce",
    "AllToAll",
    "Attached",
    "Attachment",
    "Broadcast",
    "Decode",
    "Encode",
    "Gather",
    "Hop",
    "Level",
    "ModelTracing",
    "Place",
    "Plan",
    "PlanError",
    "Prediction",
    "Program",
    "ProgramError",
    "Reduce",
    "ReduceScatter",
    "Synchronizer",
    "Topology",
    "Trace",
    "TraceError",
    "UnitPlan",
    "allreduce_sent_nbytes",
    "attach",
    "default_program",
    "enumerate_programs",
    "exempt_vectors",
    "parted",
    "plan",
    "profile",
    "read_trace",
    "record_timeline",
    "ring",
    "spread_roots",
    "trace_model",
    "write_trace",
]
