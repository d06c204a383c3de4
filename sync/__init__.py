"""Synchronisation: programs, lanes, the engine, and how it is attached to a model."""

from .ddp import Attachment, attach
from .plan import Plan, PlanError, UnitPlan, exempt_vectors, uniform_plan
from .program import (
    ALLGATHER,
    ALLREDUCE,
    ALLTOALL,
    ENCODED_ALLREDUCE,
    POWERSGD,
    PROGRAMS,
    AllGather,
    AllReduce,
    AllToAll,
    Decode,
    Encode,
    Level,
    Program,
    ProgramError,
    allreduce_sent_nbytes,
    default_program,
)

__all__ = [
    "ALLGATHER",
    "ALLREDUCE",
    "ALLTOALL",
    "ENCODED_ALLREDUCE",
    "POWERSGD",
    "PROGRAMS",
    "AllGather",
    "AllReduce",
    "AllToAll",
    "Attachment",
    "Decode",
    "Encode",
    "Level",
    "Plan",
    "PlanError",
    "Program",
    "ProgramError",
    "UnitPlan",
    "allreduce_sent_nbytes",
    "attach",
    "default_program",
    "exempt_vectors",
    "uniform_plan",
]
