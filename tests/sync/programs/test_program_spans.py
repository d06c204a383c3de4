"""Spans: the same rules give the programs of DDP, of FSDP2 and of the gathers of its parameters."""

from __future__ import annotations

import itertools

import pytest
import torch

from gckernels import BlockQuant, PowerSGD
from gckernels.sync import Topology
from gckernels.sync.programs import (
    ALLGATHER,
    ALLREDUCE,
    AllGather,
    AllToAll,
    Decode,
    Encode,
    Level,
    ProgramError,
    ReduceScatter,
    enumerate_programs,
)
from gckernels.sync.programs.named import REDUCE_SCATTER, SHARDS
from gckernels.sync.programs.sizes import plain_sent_nbytes, sent_nbytes, sizes_of
from gckernels.sync.programs.spans import (
    GATHER,
    GATHER_OF_LEVELS,
    MEAN,
    SHARD,
    SHARD_INSIDE,
    SHARD_OF_LEVELS,
    Span,
)

FLAT, TWO_BY_TWO = Topology(2), Topology(2, 2)
COUNTS = [
    (MEAN, FLAT, 12),
    (MEAN, TWO_BY_TWO, 174),
    (SHARD, FLAT, 2),
    (SHARD, TWO_BY_TWO, 2),
    (SHARD_OF_LEVELS, TWO_BY_TWO, 5),
    (SHARD_OF_LEVELS, FLAT, 0),
    (SHARD_INSIDE, TWO_BY_TWO, 31),
    (GATHER, FLAT, 2),
    (GATHER_OF_LEVELS, TWO_BY_TWO, 5),
]


@pytest.mark.parametrize(("span", "topology", "count"), COUNTS)
def test_the_programs_of_a_span(span, topology, count):
    programs = enumerate_programs(topology, span=span)
    assert len(programs) == len(set(programs)) == count
    for program in programs:
        assert sizes_of(program, 4097, torch.float32, BlockQuant(), topology, span)


def test_the_programs_of_two_spans_have_nothing_in_common():
    ends = (MEAN, SHARD, SHARD_OF_LEVELS, SHARD_INSIDE)
    for one, other in itertools.combinations(ends, 2):
        programs = set(enumerate_programs(TWO_BY_TWO, span=one))
        assert programs.isdisjoint(enumerate_programs(TWO_BY_TWO, span=other))
    assert set(enumerate_programs(FLAT, span=SHARD)) == {REDUCE_SCATTER, SHARDS}


@pytest.mark.parametrize(
    ("program", "span", "reason"),
    [
        (ALLREDUCE, SHARD, "AllReduce: does not end with a shard of the averaged unit on every rank"),
        (SHARDS, MEAN, "does not end with the averaged unit on every rank"),
        (SHARDS, SHARD_OF_LEVELS, "does not end with a shard .* cut inside the machines first"),
        ((ReduceScatter(Level.INTRA),), SHARD_INSIDE, "does not end with a shard .* on every device"),
        ((Encode(), AllToAll()), SHARD, "does not end with a shard"),
        ((), GATHER, "does not end with the averaged unit"),
        (ALLREDUCE, GATHER, "step 0, AllReduce: before flat is merged, nothing must have been"),
    ],
)
def test_a_program_that_does_not_end_where_its_span_does_is_refused(program, span, reason):
    with pytest.raises(ProgramError, match=reason):
        sizes_of(program, 100, torch.float32, BlockQuant(), TWO_BY_TWO, span)


def test_factors_of_whole_matrices_do_not_end_in_shards():
    with pytest.raises(ProgramError, match="payloads of PowerSGD cannot be cut into chunks or gathered"):
        sizes_of(SHARDS, 100, torch.float32, PowerSGD(rows=10), FLAT, SHARD)


def sent(program: tuple, span: Span, ranks: int) -> float:
    """The bytes that a rank sends for a unit of 1,600 elements per rank."""
    topology = Topology(ranks)
    data = sizes_of(program, 1600 * ranks, torch.float32, BlockQuant(bits=8), topology, span)
    steps = zip(program, data, data[1:], strict=False)
    return sum(sent_nbytes(step, before, after, topology) for step, before, after in steps)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_a_rank_sends_each_other_one_its_shard(ranks):
    payload = BlockQuant(bits=8).payload_nbytes(1600)
    assert sent(SHARDS, SHARD, ranks) == sent(ALLGATHER, GATHER, ranks) == (ranks - 1) * payload
    exactly = plain_sent_nbytes(4 * 1600 * ranks, ranks, SHARD)
    assert sent(REDUCE_SCATTER, SHARD, ranks) == sent((AllGather(),), GATHER, ranks) == exactly
    assert plain_sent_nbytes(4 * 1600 * ranks, ranks, MEAN) == 2 * exactly


def test_parameters_go_from_shards_to_the_whole():
    begin, encoded, gathered, end = sizes_of(ALLGATHER, 3200, torch.float32, BlockQuant(), FLAT, GATHER)
    assert (begin.numel, begin.nbytes) == (1600, 6400)
    assert (encoded.numel, encoded.chunks, gathered.chunks) == (1600, 1, 2)
    assert (end.numel, end.nbytes, end.flow.opened) == (3200, 12800, ())
    assert (Encode(), AllGather(), Decode()) == ALLGATHER
