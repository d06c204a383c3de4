"""A table of the sizes of many units in many programs equals the sizes computed one by one."""

from __future__ import annotations

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


def test_the_work_for_programs_is_done_once_and_for_payloads_once_per_size(monkeypatch):
    """The 174 programs need only a few payload sizes of each unit, and their rules are applied only once."""
    topology, numels = Topology(8, 8), [1000 + 12_347 * index for index in range(20)]
    programs = enumerate_programs(topology)
    asked = []
    round_nbytes = gckernels.EFSignSGD.round_nbytes
    monkeypatch.setattr(
        gckernels.EFSignSGD, "round_nbytes", lambda self, *key: asked.append(key) or round_nbytes(self, *key)
    )
    size_table(programs, numels, torch.float32, gckernels.EFSignSGD(), topology)
    assert len(programs) == 174 and len(asked) == len(set(asked)) <= 5 * len(numels)
    monkeypatch.setattr(size_tables, "propagate", lambda *_: pytest.fail("the programs are known"))
    size_table(programs, numels[:3], torch.float32, gckernels.EFSignSGD(block=256), topology)
