"""Sizes of many units in many programs: the same as one by one."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

import gckernels
from gckernels.sync import HIERARCHICAL, POWERSGD, Level, Program, Topology, enumerate_programs, ring
from gckernels.sync.programs import size_tables
from gckernels.sync.programs.size_tables import size_table
from gckernels.sync.programs.sizes import sent_nbytes, sizes_of

NUMELS = (0, 1, 5, 15, 16, 17, 100, 4097, 65_536, 1_000_003)


def check(programs: list[Program], spec: str, dtype: torch.dtype, topology: Topology) -> None:
    compressor = gckernels.from_spec(spec)
    table = size_table(programs, NUMELS, dtype, compressor, topology)
    rows = [slice(first, first + len(program) + 1) for first, program in zip(table.first_rows, programs, strict=True)]
    assert table.numel.shape == table.nbytes.shape == table.wire_nbytes.shape == (rows[-1].stop, len(NUMELS))
    for program, mine in zip(programs, rows, strict=True):
        for column, numel in enumerate(NUMELS):
            states = sizes_of(program, numel, dtype, compressor, topology)
            sent = [sent_nbytes(step, *states[index : index + 2], topology) for index, step in enumerate(program)]
            assert table.numel[mine, column].tolist() == [data.numel for data in states]
            assert table.nbytes[mine, column].tolist() == [data.nbytes for data in states]
            assert table.wire_nbytes[mine, column].tolist() == [0.0, *sent]


@pytest.mark.parametrize(
    ("spec", "dtype", "topology"),
    [
        ("EFSignSGD", torch.float32, Topology(2, 2)),
        ("BlockQuant(bits=4)", torch.bfloat16, Topology(3, 2)),
        ("TopK", torch.float16, Topology(8, 8)),
        ("RandomK", torch.float32, Topology(5, 3)),
        ("DGC", torch.float32, Topology(4)),
    ],
)
def test_a_table_has_the_sizes_of_every_program(spec, dtype, topology):
    compressor = gckernels.from_spec(spec)
    check(list(enumerate_programs(topology, summable=compressor.traits.summable)), spec, dtype, topology)


def test_rings_and_low_rank_methods():
    check([ring(3), ring(3, Level.FLAT)[:-1] + ring(3)[-1:]], "BlockQuant", torch.bfloat16, Topology(3))
    check([HIERARCHICAL, ring(6)], "EFSignSGD", torch.float32, Topology(2, 3))
    check([POWERSGD], "Identity", torch.float32, Topology(2, 2))


def test_a_low_rank_method_has_two_rounds():
    method = gckernels.PowerSGD(rank=2).fit((30, 40))
    table = size_table([POWERSGD], [1200], torch.float32, method, Topology(4))
    assert table.nbytes[:, 0].tolist() == [
        each.nbytes for each in sizes_of(POWERSGD, 1200, torch.float32, method, Topology(4))
    ]


def test_a_size_that_the_compressor_refuses():
    with pytest.raises(ValueError, match="PowerSGD"):
        size_table([POWERSGD], [1199], torch.float32, gckernels.PowerSGD(rank=2).fit((30, 40)), Topology(4))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Threads that wait for each other on a busy machine spin, which counts as work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
def test_all_programs_of_a_large_model_take_little_time():
    """174 programs for 314 units, of which no two have the same size: 20 ms, here with room for a busy machine."""
    topology, numels = Topology(8, 8), [1000 + 12_347 * index for index in range(314)]
    programs = enumerate_programs(topology)
    compressor = gckernels.from_spec("EFSignSGD")
    size_table(programs, numels, torch.float32, compressor, topology)
    times = []
    for _ in range(10):
        start = time.thread_time()
        size_table(programs, numels, torch.float32, compressor, topology)
        times.append(time.thread_time() - start)
    assert len(programs) == 174 and min(times) < 0.06
    assert size_tables._index.cache_info().hits
