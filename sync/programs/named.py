"""Programs by name: the strategies of the field, each as data."""

from __future__ import annotations

from gckernels.compressor import Compressor
from gckernels.method import Method
from gckernels.ops import Identity

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
"""Programs by name, for plans in JSON and for users; :func:`ring` makes one more."""


def ring(world_size: int, level: Level = Level.FLAT) -> Program:
    """CaSync's ring: encode a shard, ``world_size - 1`` hops, each encoding anew, and as many that pass on the results.

    What the encodings did not say stays in residuals, as elsewhere. But where each of them has an error of a certain
    share, the errors of the hops add up: ``docs/architecture.md`` has them measured.
    """
    return (Encode(), *[Hop(level)] * (world_size - 1), AllGather(level), Decode())


def default_program(compressor: Method, world_size: int) -> Program:
    """The program used when a plan's author names none.

    Payloads that add up are reduced, in as many rounds as the method takes. Others are gathered between two ranks,
    where that is as many bytes as any other way and takes one phase; among more ranks they go to the owner of each
    shard and back, so that what a rank sends does not grow with the number of ranks.
    """
    if not isinstance(compressor, Compressor):
        return POWERSGD if compressor.rounds > 1 else ENCODED_ALLREDUCE
    if compressor.traits.summable:
        return ALLREDUCE if isinstance(compressor, Identity) else ENCODED_ALLREDUCE
    return ALLGATHER if world_size <= 2 else ALLTOALL
