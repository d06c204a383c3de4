"""Synchronisation: programs, lanes, the engine, and how it is attached to a model."""

from .ddp import Attachment, attach
from .options import options
from .plan import Plan, PlanError, UnitPlan
from .program import allreduce_sent_nbytes
from .steps import (
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
from .strategies import (
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
from .synchronizer import Synchronizer
from .topology import Topology
from .tracing import trace
from .uniform import exempt_vectors, parted, spread_roots, uniform_plan

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
    "Attachment",
    "Broadcast",
    "Decode",
    "Encode",
    "Gather",
    "Hop",
    "Level",
    "Place",
    "Plan",
    "PlanError",
    "Program",
    "ProgramError",
    "Reduce",
    "ReduceScatter",
    "Synchronizer",
    "Topology",
    "UnitPlan",
    "allreduce_sent_nbytes",
    "attach",
    "default_program",
    "exempt_vectors",
    "options",
    "parted",
    "ring",
    "spread_roots",
    "trace",
    "uniform_plan",
]
