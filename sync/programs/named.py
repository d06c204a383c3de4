"""The well-known synchronisation strategies as programs, by name."""

from __future__ import annotations

from gckernels.codec import Codec
from gckernels.compressor import Compressor
from gckernels.ops import Identity

from .spans import MEAN, SHARD, SHARD_OF_LEVELS, Span
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
    Program,
    ReduceScatter,
)

ALLREDUCE: Program = (AllReduce(),)
ENCODED_ALLREDUCE: Program = (Encode(), AllReduce(), Decode())
ALLGATHER: Program = (Encode(), AllGather(), Decode())
REDUCE_SCATTER: Program = (ReduceScatter(),)
SHARDS: Program = (Encode(), AllToAll(), Decode())
REDUCE_SCATTER_OF_LEVELS: Program = (ReduceScatter(Level.INTRA), ReduceScatter(Level.INTER))
SHARDS_OF_LEVELS: Program = (ReduceScatter(Level.INTRA), Encode(), AllToAll(Level.INTER), Decode())
POWERSGD: Program = (Encode(), AllReduce(), Encode(), AllReduce(), Decode())
ALLTOALL: Program = (Encode(), AllToAll(), Decode(), Encode(), AllGather(), Decode())
PARAMETER_SERVER: Program = (Encode(), Gather(), Decode(), Encode(), Broadcast(), Decode())
HIERARCHICAL: Program = (
    ReduceScatter(Level.INTRA),
    Encode(),
    AllToAll(Level.INTER),
    Decode(),
    Encode(),
    AllGather(Level.INTER),
    Decode(),
    AllGather(Level.INTRA),
)

PROGRAMS: dict[str, Program] = {
    "allreduce": ALLREDUCE,
    "encoded_allreduce": ENCODED_ALLREDUCE,
    "allgather": ALLGATHER,
    "alltoall": ALLTOALL,
    "parameter_server": PARAMETER_SERVER,
    "hierarchical": HIERARCHICAL,
    "powersgd": POWERSGD,
}
"""Programs by name, for plans in JSON and for users. :func:`ring` makes another one."""


def ring(world_size: int, level: Level = Level.FLAT) -> Program:
    """The ring of CaSync (Bai et al., SOSP 2021, section 3).

    Each rank encodes a shard, ``world_size - 1`` hops follow, each of which encodes again, and an all-gather
    distributes the results. The errors of the encodings stay in residuals. With compressors whose error is
    proportional to the gradient, the errors of the hops add up: ``docs/design/programs.md`` has measurements.

    Args:
        world_size: number of ranks of ``level``.
        level: the ranks that form a ring.
    """
    return (Encode(), *[Hop(level)] * (world_size - 1), AllGather(level), Decode())


def exact_program(span: Span) -> Program:
    """The program for units that nothing encodes."""
    return {SHARD: REDUCE_SCATTER, SHARD_OF_LEVELS: REDUCE_SCATTER_OF_LEVELS}.get(span, ALLREDUCE)


def default_program(compressor: Compressor, world_size: int, span: Span = MEAN) -> Program:
    """The program for units of which a plan names none.

    Payloads that can be added are reduced, in all rounds of the method. Other payloads are gathered between two ranks,
    which takes one phase and no more bytes than any other program. Among more ranks they go to the owner of each shard
    and back, so that the bytes that a rank sends do not grow with the number of ranks. Where the mean ends in shards,
    they only go there, inside machines without compression if the ranks are in machines.

    Args:
        compressor: the method of the unit.
        world_size: number of ranks.
        span: ``MEAN``, or ``SHARD`` or ``SHARD_OF_LEVELS`` for FSDP2.
    """
    if span in (SHARD, SHARD_OF_LEVELS):
        return SHARDS if span == SHARD else SHARDS_OF_LEVELS
    if not isinstance(compressor, Codec):
        return POWERSGD if compressor.rounds > 1 else ENCODED_ALLREDUCE
    if compressor.traits.summable:
        return ALLREDUCE if isinstance(compressor, Identity) else ENCODED_ALLREDUCE
    return ALLGATHER if world_size <= 2 else ALLTOALL
