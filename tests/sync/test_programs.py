"""Programs: what the data is after each step, what is refused, JSON, bytes on the wire."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import gckernels
from gckernels import BlockQuant, Cast16, EFSignSGD, Identity
from gckernels.sync import (
    ALLGATHER,
    ALLREDUCE,
    ALLTOALL,
    ENCODED_ALLREDUCE,
    PROGRAMS,
    AllGather,
    AllReduce,
    AllToAll,
    Decode,
    Encode,
    Level,
    ProgramError,
    allreduce_sent_nbytes,
    default_program,
)
from gckernels.sync.program import Data, describe, program_from_json, program_to_json, sent_nbytes, trace

NUMELS = (0, 1, 5, 100, 4097)
WORLD_SIZES = (1, 2, 3, 4, 5)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
STEPS = (Encode(), Decode(), AllReduce(), AllGather(), AllToAll())


def raw(numel: int, nbytes: int, reduced: bool, sharded: bool = False) -> Data:
    return Data(numel, False, sharded, 1, 1, reduced, nbytes)


# -------------------------------------------------------------------- the named programs, by hand


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("numel", NUMELS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_allreduce_leaves_the_unit_as_it_is(numel, dtype, world_size):
    nbytes = numel * (4 if dtype == torch.float32 else 2)
    expected = (raw(numel, nbytes, False), raw(numel, nbytes, True))
    assert trace(ALLREDUCE, numel, dtype, EFSignSGD(), world_size) == expected


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize(("numel", "payload"), [(0, 16), (1, 16), (5, 16), (100, 208), (4097, 8208)])
def test_encoded_allreduce_sends_one_payload(numel, payload, world_size):
    expected = (
        raw(numel, 4 * numel, False),
        Data(numel, True, False, 1, 1, False, payload),
        Data(numel, True, False, 1, 1, True, payload),
        raw(numel, 4 * numel, True),
    )
    assert trace(ENCODED_ALLREDUCE, numel, torch.float32, Cast16(), world_size) == expected


# BlockQuant: 16 bytes of header, 4 per 256 elements, 1 per element, each field rounded up to 16
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize(("numel", "payload"), [(0, 16), (1, 48), (5, 48), (100, 144), (4097, 4208)])
def test_allgather_brings_one_payload_from_every_rank(numel, payload, world_size):
    expected = (
        raw(numel, 4 * numel, False),
        Data(numel, True, False, 1, 1, False, payload),
        Data(numel, True, False, world_size, 1, False, world_size * payload),
        raw(numel, 4 * numel, True),
    )
    assert trace(ALLGATHER, numel, torch.float32, BlockQuant(), world_size) == expected


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
@pytest.mark.parametrize("dtype", DTYPES)
def test_alltoall_goes_through_the_owners_of_the_shards(world_size, numel, shard, payload, dtype):
    nbytes = numel * (4 if dtype == torch.float32 else 2)
    expected = (
        raw(numel, nbytes, False),
        Data(numel, True, False, 1, world_size, False, world_size * payload),
        Data(shard, True, True, world_size, 1, False, world_size * payload),
        raw(shard, 4 * shard, True, sharded=True),  # fp32, whatever the gradient is
        Data(shard, True, True, 1, 1, True, payload),
        Data(numel, True, False, 1, world_size, True, world_size * payload),
        raw(numel, nbytes, True),
    )
    assert trace(ALLTOALL, numel, dtype, BlockQuant(), world_size) == expected


# -------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ((), "does not end with the averaged unit"),
        ((Encode(),), "Encode: does not end with the averaged unit"),
        ((Encode(), AllGather()), "does not end with the averaged unit"),
        ((Encode(), AllToAll(), Decode()), "does not end with the averaged unit"),
        ((Decode(),), "step 0, Decode: .*not encoded"),
        ((AllGather(),), "step 0, AllGather: raw data"),
        ((AllToAll(),), "step 0, AllToAll: only an encoded whole unit"),
        ((Encode(), Encode()), "step 1, Encode: .*encoded already"),
        ((Encode(), AllReduce(), Decode()), "step 1, AllReduce: payloads of BlockQuant cannot be added"),
        ((AllReduce(), AllReduce()), "step 0, AllReduce: raw data is reduced by a program of its own"),
        ((Encode(), AllReduce(), AllReduce(), Decode()), "step 1, AllReduce"),
        ((Encode(), AllGather(), AllGather()), "step 2, AllGather: only one payload"),
        ((Encode(), AllGather(), AllToAll()), "step 2, AllToAll"),
        ((Encode(), AllToAll(), AllGather()), "step 2, AllGather: only one payload"),
        ((Encode(), AllGather(), Decode(), AllReduce()), "step 3, AllReduce"),
        ((Encode(), AllGather(), Decode(), Encode(), AllGather(), Decode()), "step 4, AllGather"),
        ((*ALLTOALL, Decode()), "step 6, Decode: .*not encoded"),
        (("AllReduce",), "step 0, str: not a step"),
    ],
)
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_program_that_does_not_work_is_refused_and_its_step_named(program, message, world_size):
    with pytest.raises(ProgramError, match=message):
        trace(program, 100, torch.float32, BlockQuant(), world_size)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(
    "program",
    [
        # nothing is sent between encoding and decoding: all it could do is lose precision
        (Encode(), Decode(), AllReduce()),
        (AllReduce(), Encode(), Decode()),
        (Encode(), AllGather(), Decode(), Encode(), Decode()),
        (Encode(), Decode(), *ALLGATHER),
        # raw data is reduced in place, where it lies, by a message of its own
        (AllReduce(), Encode(), AllGather(), Decode()),
    ],
)
def test_what_the_engine_cannot_run_is_refused(program, world_size):
    with pytest.raises(ProgramError, match=r"step \d"):
        trace(program, 100, torch.float32, Cast16(), world_size)


@pytest.mark.parametrize("program", ["allgather", [Encode(), AllGather(), Decode()], AllReduce(), None])
def test_a_program_is_a_tuple(program):
    with pytest.raises(ProgramError, match="tuple of steps"):
        trace(program, 100, torch.float32, Cast16(), 2)


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
        states = trace(program, numel, dtype, compressor, world_size)
    except ProgramError as error:
        assert "step" in str(error) or "does not end" in str(error)
        return
    assert len(states) == len(program) + 1
    assert states[0] == raw(numel, numel * dtype.itemsize, False)
    assert states[-1] == raw(numel, numel * dtype.itemsize, True)
    for step, before, after in zip(program, states, states[1:], strict=False):
        assert after.sources * after.chunks >= 1
        if after.encoded:  # every place in a buffer is as large as any other, and payloads are aligned
            assert after.nbytes % (16 * after.sources * after.chunks) == 0
        if step != Encode() and before.encoded and after.encoded:
            assert after.nbytes in (before.nbytes, world_size * before.nbytes)
    if world_size > 1:
        assert program in PROGRAMS.values()  # nothing else means anything yet


@given(numel=st.integers(0, 10**7), world_size=st.integers(1, 64), name=st.sampled_from(sorted(gckernels.COMPRESSORS)))
def test_the_default_program_fits_every_compressor(numel, world_size, name):
    compressor = gckernels.from_spec(name)
    trace(default_program(compressor, world_size), numel, torch.float32, compressor, world_size)


# -------------------------------------------------------------------- defaults, JSON, bytes on the wire


@pytest.mark.parametrize("world_size", WORLD_SIZES)
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
    assert program_to_json(ALLGATHER) == [
        {"step": "Encode"},
        {"step": "AllGather", "level": "flat"},
        {"step": "Decode"},
    ]
    assert program_from_json([{"step": "AllReduce", "level": "flat"}]) == (AllReduce(Level.FLAT),)


@pytest.mark.parametrize(
    ("records", "message"),
    [
        (None, "expected a list"),
        ("Encode", "expected a list"),
        ({"step": "Encode"}, "expected a list"),
        (["Encode"], "unknown step"),
        ([{}], "unknown step"),
        ([{"step": "Compress"}], "unknown step .*known are Encode, Decode, AllReduce"),
        ([{"step": None}], "unknown step"),
        ([{"step": ["Encode"]}], "unknown step"),
        ([{"step": "AllReduce"}], "level .*must be one of flat"),
        ([{"step": "AllReduce", "level": "INTER"}], "level .*must be one of flat"),
        ([{"step": "AllReduce", "level": ["flat"]}], "level .*must be one of flat"),
    ],
)
def test_json_that_is_not_a_program(records, message):
    with pytest.raises(ProgramError, match=message):
        program_from_json(records)


def test_describe():
    assert describe(ALLGATHER) == "Encode AllGather Decode"
    assert describe(()) == "(empty)"


@pytest.mark.parametrize(
    ("world_size", "allreduce", "allgather", "alltoall"),
    [(1, 0.0, 0.0, 0.0), (2, 240.0, 240.0, 120.0), (3, 320.0, 480.0, 160.0), (4, 360.0, 720.0, 180.0)],
)
def test_sent_nbytes(world_size, allreduce, allgather, alltoall):
    before = Data(100, True, False, 1, world_size, False, 240)
    assert sent_nbytes(AllReduce(), before, world_size) == pytest.approx(allreduce, rel=1e-15)
    assert sent_nbytes(AllGather(), before, world_size) == allgather
    assert sent_nbytes(AllToAll(), before, world_size) == pytest.approx(alltoall, rel=1e-15)
    assert sent_nbytes(Encode(), before, world_size) == sent_nbytes(Decode(), before, world_size) == 0.0
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
    states = trace(program, 4097, torch.float32, BlockQuant(), world_size)
    sent = sum(sent_nbytes(step, states[index], world_size) for index, step in enumerate(program))
    assert sent == pytest.approx(expected, rel=1e-15)
