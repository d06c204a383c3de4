"""Programs: the steps in which a unit is synchronised, as data. Pure: no tensors, no process groups, no clock."""

from typing import TYPE_CHECKING

from .named import (
    ALLGATHER,
    ALLREDUCE,
    ALLTOALL,
    ENCODED_ALLREDUCE,
    HIERARCHICAL,
    PARAMETER_SERVER,
    POWERSGD,
    PROGRAMS,
    REDUCE_SCATTER,
    SHARDS,
    SHARDS_OF_LEVELS,
    default_program,
    ring,
)
from .sizes import allreduce_sent_nbytes
from .spans import GATHER, GATHER_OF_LEVELS, MEAN, SHARD, SHARD_INSIDE, SHARD_OF_LEVELS, Span
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
    describe,
)

if TYPE_CHECKING:
    from .enumeration import enumerate_programs
    from .texts import parse

__all__ = [
    "ALLGATHER",
    "ALLREDUCE",
    "ALLTOALL",
    "ENCODED_ALLREDUCE",
    "GATHER",
    "GATHER_OF_LEVELS",
    "HIERARCHICAL",
    "MEAN",
    "PARAMETER_SERVER",
    "POWERSGD",
    "PROGRAMS",
    "REDUCE_SCATTER",
    "SHARD",
    "SHARDS",
    "SHARDS_OF_LEVELS",
    "SHARD_INSIDE",
    "SHARD_OF_LEVELS",
    "AllGather",
    "AllReduce",
    "AllToAll",
    "Broadcast",
    "Decode",
    "Encode",
    "Gather",
    "Hop",
    "Level",
    "Place",
    "Program",
    "ProgramError",
    "Reduce",
    "ReduceScatter",
    "Span",
    "allreduce_sent_nbytes",
    "default_program",
    "describe",
    "enumerate_programs",
    "parse",
    "ring",
]


def __getattr__(name: str) -> object:
    """A name that few trainings need, so it is imported when it is asked for."""
    match name:
        case "enumerate_programs":
            from .enumeration import enumerate_programs

            return enumerate_programs
        case "parse":
            from .texts import parse

            return parse
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
