"""Programs: the data after each step, refused programs, JSON, and bytes on the wire."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import gckernels
from cases import cases
from gckernels import BlockQuant, Cast16, EFSignSGD, Identity
from gckernels.compressor import Compressor
from gckernels.sync import Topology
from gckernels.sync.programs import (
    ALLGATHER,
    ALLREDUCE,
    ALLTOALL,
    ENCODED_ALLREDUCE,
    POWERSGD,
    PROGRAMS,
    SHARDS_OF_LEVELS,
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
    allreduce_sent_nbytes,
    default_program,
    describe,
    enumerate_programs,
    parse,
    ring,
)
from gckernels.sync.programs.rules import Flow
from gckernels.sync.programs.sizes import Data, sent_nbytes, sizes_of
from gckernels.sync.programs.steps import KINDS, program_from_json, program_to_json

NUMELS = (0, 1, 5, 100, 4097)
WORLD_SIZES = (1, 2, 3, 4, 5)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
STEPS = tuple(kind() for kind in KINDS.values())


@dataclass(frozen=True)
class Shown:
    """Facts about data for the tests below; ``complete`` if it contains the contributions of all ranks."""

    numel: int
    encoded: bool
    sharded: bool
    sources: int
    chunks: int
    complete: bool
    nbytes: int


def raw(numel: int, nbytes: int, complete: bool, sharded: bool = False) -> Shown:
    return Shown(numel, False, sharded, 1, 1, complete, nbytes)


def traced(
    program: Program, numel: int, dtype: torch.dtype, compressor: Compressor, world_size: int
) -> tuple[Shown, ...]:
    return tuple(map(shown, sizes_of(program, numel, dtype, compressor, Topology(world_size))))


def shown(data: Data) -> Shown:
    flow = data.flow
    return Shown(data.numel, flow.encoded, bool(flow.opened), data.sources, data.chunks, flow.complete, data.nbytes)


# -------------------------------------------------------------------- named programs, checked by hand


@cases("world_size", WORLD_SIZES)
@pytest.mark.parametrize("numel", NUMELS)
@cases("dtype", DTYPES)
def test_allreduce_leaves_the_unit_as_it_is(numel, dtype, world_size):
    nbytes = numel * (4 if dtype == torch.float32 else 2)
    expected = (raw(numel, nbytes, False), raw(numel, nbytes, True))
    assert traced(ALLREDUCE, numel, dtype, EFSignSGD(), world_size) == expected


@cases("world_size", WORLD_SIZES)
@pytest.mark.parametrize(("numel", "payload"), [(0, 16), (1, 16), (5, 16), (100, 208), (4097, 8208)])
def test_encoded_allreduce_sends_one_payload(numel, payload, world_size):
    expected = (
        raw(numel, 4 * numel, False),
        Shown(numel, True, False, 1, 1, False, payload),
        Shown(numel, True, False, 1, 1, True, payload),
        raw(numel, 4 * numel, True),
    )
    assert traced(ENCODED_ALLREDUCE, numel, torch.float32, Cast16(), world_size) == expected


# BlockQuant: 16 bytes of header, 4 per 256 elements and 1 per element, each field rounded up to 16
@cases("world_size", WORLD_SIZES)
@pytest.mark.parametrize(("numel", "payload"), [(0, 16), (1, 48), (5, 48), (100, 144), (4097, 4208)])
def test_allgather_brings_one_payload_from_every_rank(numel, payload, world_size):
    expected = (
        raw(numel, 4 * numel, False),
        Shown(numel, True, False, 1, 1, False, payload),
        Shown(numel, True, False, world_size, 1, True, world_size * payload),
        raw(numel, 4 * numel, True),
    )
    assert traced(ALLGATHER, numel, torch.float32, BlockQuant(), world_size) == expected


@pytest.mark.parametrize(
    ("world_size", "numel", "shard", "payload"),
    [
        (1, 0, 0, 16),
        (1, 1, 1, 48),
        (1, 5, 5, 48),
        (1, 100, 100, 144),
        (1, 4097, 4097, 4208),
        (2, 0, 0, 16),
        (2, 1, 16, 48),
        (2, 5, 16, 48),
        (2, 100, 64, 96),
        (2, 4097, 2064, 2128),
        (3, 0, 0, 16),
        (3, 1, 16, 48),
        (3, 5, 16, 48),
        (3, 100, 48, 80),
        (3, 4097, 1376, 1424),
        (4, 0, 0, 16),
        (4, 1, 16, 48),
        (4, 5, 16, 48),
        (4, 100, 32, 64),
        (4, 4097, 1040, 1088),
        (5, 0, 0, 16),
        (5, 1, 16, 48),
        (5, 5, 16, 48),
        (5, 100, 32, 64),
        (5, 4097, 832, 864),
    ],
)
@cases("dtype", DTYPES)
def test_alltoall_goes_through_the_owners_of_the_shards(world_size, numel, shard, payload, dtype):
    nbytes = numel * (4 if dtype == torch.float32 else 2)
    expected = (
        raw(numel, nbytes, False),
        Shown(numel, True, False, 1, world_size, False, world_size * payload),
        Shown(shard, True, True, world_size, 1, True, world_size * payload),
        raw(shard, 4 * shard, True, sharded=True),  # fp32 for every dtype of the gradient
        Shown(shard, True, True, 1, 1, True, payload),
        Shown(numel, True, False, 1, world_size, True, world_size * payload),
        raw(numel, nbytes, True),
    )
    assert traced(ALLTOALL, numel, dtype, BlockQuant(), world_size) == expected


# -------------------------------------------------------------------- refused programs


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ((), "does not end with the averaged unit"),
        ((Encode(),), "Encode: does not end with the averaged unit"),
        ((Encode(), AllGather()), "does not end with the averaged unit"),
        ((Encode(), AllToAll(), Decode()), "does not end with the averaged unit"),
        ((Encode(), Gather(), Decode()), "does not end with the averaged unit"),
        ((ReduceScatter(),), "does not end with the averaged unit"),
        ((ReduceScatter(Level.INTRA), AllReduce(Level.INTER)), "does not end with the averaged unit"),
        ((Decode(),), "step 0, Decode: .*not encoded"),
        ((AllGather(),), "step 0, AllGather: raw data"),
        ((AllToAll(),), "step 0, AllToAll: raw data is reduced, not exchanged"),
        ((Gather(),), "step 0, Gather: raw data"),
        ((Broadcast(),), "step 0, Broadcast: there is no root"),
        ((ReduceScatter(), Broadcast()), "step 1, Broadcast: there is no root"),
        ((Reduce(), AllGather()), "step 1, AllGather: raw data"),
        ((Encode(), Reduce()), "step 1, Reduce: payloads are exchanged or gathered"),
        ((Encode(), Encode()), "step 1, Encode: .*encoded already"),
        ((Encode(), AllReduce(), Decode()), "step 1, AllReduce: payloads of BlockQuant cannot be added"),
        ((AllReduce(), AllReduce()), "step 1, AllReduce: before flat is merged, nothing must have been, but flat"),
        ((AllReduce(Level.INTRA),), r"step 0, AllReduce\(intra\): inside a machine"),
        ((AllReduce(Level.INTER),), "before inter is merged, intra must have been, but nothing has been"),
        ((Reduce(Level.INTRA), AllReduce()), "before flat is merged, nothing must have been, but intra has been"),
        ((ReduceScatter(Level.INTRA), AllGather(Level.INTRA)), "not all ranks' contributions"),
        ((Encode(), AllReduce(), AllReduce(), Decode()), "step 1, AllReduce"),
        ((Encode(), AllGather(), AllGather()), "step 2, AllGather: before flat is merged, nothing"),
        ((Encode(), AllGather(), AllToAll()), "step 2, AllToAll"),
        ((Encode(), AllGather(), Decode(), AllReduce()), "step 3, AllReduce"),
        ((Encode(), AllGather(), Decode(), Encode(), AllGather(), Decode()), "step 3, Encode: every rank has the mean"),
        ((*ALLTOALL, Decode()), "step 6, Decode: .*not encoded"),
        ((Hop(),), "step 0, Hop: a ring must begin"),
        ((Encode(), Hop(), Hop(), Hop(), Hop()), "step . Hop: a ring must begin|step ., Hop: before flat is"),
        (("AllReduce",), "step 0, str: not a step"),
    ],
)
@cases("world_size", [2, 3])
def test_a_program_that_does_not_work_is_refused_and_its_step_named(program, message, world_size):
    with pytest.raises(ProgramError, match=message):
        sizes_of(program, 100, torch.float32, BlockQuant(), Topology(world_size))


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(
    "program",
    [
        # nothing is sent between encoding and decoding, so they would only lose precision
        (Encode(), Decode(), AllReduce()),
        (AllReduce(), Encode(), Decode()),
        (Encode(), AllGather(), Decode(), Encode(), Decode()),
        (Encode(), Decode(), *ALLGATHER),
        # nothing is left to send
        (AllReduce(), Encode(), AllGather(), Decode()),
    ],
)
def test_what_the_engine_cannot_run_is_refused(program, world_size):
    with pytest.raises(ProgramError, match=r"step \d"):
        sizes_of(program, 100, torch.float32, Cast16(), Topology(world_size))


@pytest.mark.parametrize("program", ["allgather", [Encode(), AllGather(), Decode()], AllReduce(), None])
def test_a_program_is_a_tuple(program):
    with pytest.raises(ProgramError, match="tuple of steps"):
        sizes_of(program, 100, torch.float32, Cast16(), Topology(2))


@given(
    program=st.lists(st.sampled_from(STEPS), max_size=8).map(tuple),
    numel=st.sampled_from(NUMELS),
    dtype=st.sampled_from(DTYPES),
    compressor=st.sampled_from([BlockQuant(), Cast16(), EFSignSGD(), Identity()]),
    world_size=st.integers(1, 5),
)
@example(program=ALLTOALL, numel=5, dtype=torch.float32, compressor=EFSignSGD(), world_size=4)
@example(program=ENCODED_ALLREDUCE, numel=5, dtype=torch.float32, compressor=Cast16(), world_size=3)
def test_any_sequence_is_refused_or_ends_with_the_averaged_unit(program, numel, dtype, compressor, world_size):
    try:
        states = sizes_of(program, numel, dtype, compressor, Topology(world_size))
    except ProgramError as error:
        assert "step" in str(error) or "does not end" in str(error)
        return
    assert len(states) == len(program) + 1
    assert shown(states[0]) == raw(numel, numel * dtype.itemsize, False)
    assert shown(states[-1]) == raw(numel, numel * dtype.itemsize, True)
    for data in states:
        assert data.sources * data.chunks >= 1
        if data.flow.encoded:
            # all places in a buffer have the same size, and payloads are aligned
            assert data.nbytes % (16 * data.sources * data.chunks) == 0
            assert data.size * data.chunks >= data.numel or isinstance(program[1], Hop)
    if world_size > 1:
        flat = set(enumerate_programs(Topology(world_size), summable=compressor.traits.summable)) | {
            ring(world_size),
            POWERSGD,
        }
        assert program in flat


@given(numel=st.integers(0, 10**7), world_size=st.integers(1, 64), name=st.sampled_from(sorted(gckernels.CODECS)))
def test_the_default_program_fits_every_compressor(numel, world_size, name):
    compressor = gckernels.from_spec(name)
    sizes_of(default_program(compressor, world_size), numel, torch.float32, compressor, Topology(world_size))


# -------------------------------------------------------------------- defaults, JSON, bytes on the wire


@cases("world_size", WORLD_SIZES)
def test_default_program(world_size):
    gathered = ALLGATHER if world_size <= 2 else ALLTOALL
    assert default_program(BlockQuant(), world_size) == gathered
    assert default_program(EFSignSGD(), world_size) == gathered
    assert default_program(Cast16(), world_size) == ENCODED_ALLREDUCE
    assert default_program(Cast16(torch.float16), world_size) == ENCODED_ALLREDUCE
    assert default_program(Identity(), world_size) == ALLREDUCE


@pytest.mark.parametrize("name", PROGRAMS)
def test_json_round_trip(name):
    program = PROGRAMS[name]
    read = program_from_json(json.loads(json.dumps(program_to_json(program))))
    assert read == program and isinstance(read, tuple)


def test_json_by_hand():
    assert program_to_json((Encode(), AllGather(Level.INTER), Decode(Place.HOST))) == [
        {"step": "Encode", "place": "device"},
        {"step": "AllGather", "level": "inter"},
        {"step": "Decode", "place": "host"},
    ]
    assert program_from_json([{"step": "Encode"}]) == (Encode(),)
    assert program_from_json([{"step": "AllReduce", "level": "flat"}]) == (AllReduce(Level.FLAT),)


@pytest.mark.parametrize(
    ("records", "message"),
    [
        (None, "expected a list"),
        ("Encode", "expected a list"),
        ({"step": "Encode"}, "expected a list"),
        (["Encode"], "unknown step"),
        ([{}], "unknown step"),
        ([{"step": "Compress"}], "unknown step .*known: Encode, Decode, AllReduce"),
        ([{"step": None}], "unknown step"),
        ([{"step": ["Encode"]}], "unknown step"),
        ([{"step": "AllReduce"}], "level .*must be one of flat"),
        ([{"step": "AllReduce", "level": "INTER"}], "level .*must be one of flat"),
        ([{"step": "AllReduce", "level": ["flat"]}], "level .*must be one of flat, intra, inter"),
        ([{"step": "Encode", "place": "GPU"}], "place .*must be one of device, host"),
    ],
)
def test_json_that_is_not_a_program(records, message):
    with pytest.raises(ProgramError, match=message):
        program_from_json(records)


def test_describe():
    assert describe(ALLGATHER) == "Encode AllGather Decode"
    assert describe((Encode(Place.HOST), AllGather(Level.INTER))) == "Encode(host) AllGather(inter)"
    assert describe(()) == "(empty)"


def test_a_program_is_what_its_text_says():
    for program in (*PROGRAMS.values(), SHARDS_OF_LEVELS, ring(4, Level.INTER), *enumerate_programs(Topology(2, 2))):
        assert parse(describe(program)) == program
    assert parse("E A2A(inter) D(host) E(host) AG(inter) D") == (
        Encode(),
        AllToAll(Level.INTER),
        Decode(Place.HOST),
        Encode(Place.HOST),
        AllGather(Level.INTER),
        Decode(),
    )
    assert parse("RS  E H H AG D B R G AR")[2:4] == (Hop(), Hop())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'': there is no step"),
        ("E AG decode", "'decode' is no step; known: E or Encode, D or Decode, AR or AllReduce"),
        ("E AG(host) D", r"'AG\(host\)' must have one of flat, intra, inter in parentheses"),
        ("E(inter)", r"'E\(inter\)' must have one of device, host"),
        ("E AG( D", r"'AG\(' is no step"),
    ],
)
def test_texts_that_are_no_program(text, message):
    with pytest.raises(ProgramError, match=message):
        parse(text)


@pytest.mark.parametrize(
    ("world_size", "allreduce", "allgather", "alltoall"),
    [(1, 0.0, 0.0, 0.0), (2, 240.0, 240.0, 120.0), (3, 320.0, 480.0, 160.0), (4, 360.0, 720.0, 180.0)],
)
def test_sent_nbytes(world_size, allreduce, allgather, alltoall):
    data = Data(100, Flow(encoded=True, fresh=True), torch.float32, 1, world_size, 32, 240)
    topology = Topology(world_size)
    assert sent_nbytes(AllReduce(), data, data, topology) == pytest.approx(allreduce, rel=1e-15)
    assert sent_nbytes(AllGather(), data, data, topology) == allgather
    for step in (AllToAll(), Gather(), Broadcast(), Reduce()):  # a root keeps its own part
        assert sent_nbytes(step, data, data, topology) == pytest.approx(alltoall, rel=1e-15)
    assert sent_nbytes(ReduceScatter(), data, data, topology) == 240.0 * (world_size - 1)
    assert sent_nbytes(Hop(), data, data, topology) == 240.0
    assert sent_nbytes(Encode(), data, data, topology) == sent_nbytes(Decode(), data, data, topology) == 0.0
    assert allreduce_sent_nbytes(240, world_size) == pytest.approx(allreduce, rel=1e-15)


@pytest.mark.parametrize(
    ("program", "world_size", "expected"),
    [
        (ALLREDUCE, 4, 2 * 16388 * 3 / 4),
        (ALLGATHER, 4, 3 * 4208),
        (ALLTOALL, 4, 3 * 1088 + 3 * 1088),  # a payload of the shard to every other rank, in both phases
        (ALLTOALL, 2, 2128 + 2128),
    ],
)
def test_sent_nbytes_of_a_whole_program(program, world_size, expected):
    topology = Topology(world_size)
    states = sizes_of(program, 4097, torch.float32, BlockQuant(), topology)
    sent = sum(sent_nbytes(step, states[index], states[index + 1], topology) for index, step in enumerate(program))
    assert sent == pytest.approx(expected, rel=1e-15)
