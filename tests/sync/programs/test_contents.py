"""Contents of programs have the sizes of every unit."""

from __future__ import annotations

import pytest
import torch

import gckernels
from gckernels.compressor import Compressor
from gckernels.sync import Topology
from gckernels.sync.programs import HIERARCHICAL, POWERSGD, Level, Program, enumerate_programs, ring
from gckernels.sync.programs.layouts import Capabilities, propagate
from gckernels.sync.programs.sizes import sent_content, sent_nbytes, sizes_of

NUMELS = (0, 1, 5, 15, 16, 17, 100, 4097, 65_536, 1_000_003)


def check(
    programs: list[Program], compressor: Compressor, dtype: torch.dtype, topology: Topology, numels=NUMELS
) -> None:
    for program in programs:
        layouts = propagate(program, Capabilities.of(compressor), topology)
        for numel in numels:
            expected = sizes_of(program, numel, dtype, compressor, topology)
            sent = [sent_nbytes(step, *expected[index : index + 2], topology) for index, step in enumerate(program)]

            def nbytes(content, numel=numel):
                return content.nbytes(numel, dtype.itemsize, compressor.round_nbytes)

            assert [layout.piece.elements(numel) for layout in layouts] == [data.numel for data in expected]
            assert [nbytes(layout.content) for layout in layouts] == [data.nbytes for data in expected]
            steps = zip(program, layouts, layouts[1:], strict=False)
            contents = [sent_content(*each, topology) for each in steps]
            assert [times * nbytes(content) for content, times in contents] == pytest.approx(sent, rel=1e-12)
            assert [layout.sources for layout in layouts] == [data.sources for data in expected]


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
def test_contents_have_the_sizes_of_every_program(spec, dtype, topology):
    compressor = gckernels.from_spec(spec)
    check(list(enumerate_programs(topology, summable=compressor.traits.summable)), compressor, dtype, topology)


def test_rings_and_low_rank_methods():
    rings = [ring(3), ring(3, Level.FLAT)[:-1] + ring(3)[-1:]]
    check(rings, gckernels.BlockQuant(), torch.bfloat16, Topology(3))
    check([HIERARCHICAL, ring(6)], gckernels.EFSignSGD(), torch.float32, Topology(2, 3))
    check([POWERSGD], gckernels.Identity(), torch.float32, Topology(2, 2))


def test_a_low_rank_method_has_two_rounds():
    method = gckernels.PowerSGD(rank=2).fit((30, 40))
    check([POWERSGD], method, torch.float32, Topology(4), numels=(1200,))
