"""ChunkTopK's selection handles ties and magnitudes of any spread: in C with every instruction set, and in kernels."""

from __future__ import annotations

import pytest
import torch

from cases import cases
from gckernels import ChunkTopK
from gckernels.ops.chunktopk import host as chunktopk_host
from gckernels.ops.chunktopk.pack12 import pack12, unpack12
from gckernels.toolkit.host import library
from helpers import (
    HOST,
    HOST_PARAM,
    KERNEL_PARAM,
    REFERENCE,
    REFERENCE_PARAM,
    assert_equal,
    decode,
    encode,
    interpreted,
)

WITHOUT_AVX512 = "#undef __AVX512F__\n"
WITHOUT_AVX2 = WITHOUT_AVX512 + "#undef __AVX2__\n"
NUMEL = 2 * 4096 + 100


def integers(highest: int) -> torch.Tensor:
    return torch.randint(-highest, highest + 1, (NUMEL,)).float()


VALUES = {
    "zeros": lambda: torch.zeros(NUMEL),
    "equal": lambda: integers(1) * 0 + 3,
    "ties": lambda: integers(4),
    "few ties": lambda: integers(1000),
    "sparse": lambda: torch.where(torch.rand(NUMEL) < 0.003, torch.randn(NUMEL), 0.0),
    "any exponent": lambda: torch.randn(NUMEL) * 2.0 ** torch.randint(-140, 120, (NUMEL,)),
    "ascending": lambda: torch.arange(NUMEL).float(),
    "descending": lambda: -torch.arange(NUMEL, 0, -1).float(),
    "in one class": lambda: (torch.arange(NUMEL) % 256 == 7) * torch.randn(NUMEL),
    "in one column": lambda: (torch.arange(NUMEL) % 128 < 10) * 100.0 + torch.randn(NUMEL),
    "not finite": lambda: torch.randn(NUMEL).index_fill_(0, torch.tensor([5000]), torch.inf),
    "seldom finite": lambda: torch.where(torch.rand(NUMEL) < 0.4, torch.randn(NUMEL), torch.nan).nan_to_num_(torch.inf),
    "often NaN": lambda: torch.where(torch.rand(NUMEL) < 0.9, torch.randn(NUMEL), torch.nan),
}


@cases("values", VALUES)
@cases("prefix", ["", WITHOUT_AVX512, WITHOUT_AVX2])
@pytest.mark.parametrize(
    "compressor",
    [ChunkTopK(), ChunkTopK(k=4096), ChunkTopK(k=1000, value_bits=2), ChunkTopK(chunk=64, k=8, value_bits=4)],
    ids=repr,
)
def test_every_selection_is_that_of_the_reference(compressor, prefix, values, monkeypatch):
    built = library.library(prefix + chunktopk_host.program(compressor))
    if built is None:
        pytest.skip("there is no C compiler")
    library.declare(built, "encode", "decode")
    monkeypatch.setattr(chunktopk_host, "build", lambda _: built)
    grad, residual = VALUES[values](), torch.zeros(NUMEL)
    got, kept = encode(HOST, compressor, grad, residual)
    want, left = encode(REFERENCE, compressor, grad, residual)
    assert torch.equal(got, want)
    assert_equal(kept, left)
    assert_equal(decode(HOST, compressor, got, grad), decode(REFERENCE, compressor, got, grad))


IN_KERNELS = [
    ChunkTopK(),
    ChunkTopK(chunk=64, k=8, value_bits=8),
    ChunkTopK(chunk=256, k=120, value_bits=4),
    ChunkTopK(chunk=512, k=8, value_bits=2),
    ChunkTopK(chunk=1024, k=40, value_bits=4),
    ChunkTopK(chunk=1024, k=512, value_bits=8),
    ChunkTopK(chunk=2048, k=1024),
]
QUICK = ("ties", "any exponent", "in one column", "often NaN")


@pytest.mark.parametrize(
    "values", [pytest.param(each, marks=() if each in QUICK else pytest.mark.slow) for each in VALUES]
)
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("implementation", [KERNEL_PARAM])
@pytest.mark.parametrize("compressor", IN_KERNELS, ids=repr)
@interpreted(IN_KERNELS[:2])
def test_kernels_select_what_the_reference_does(compressor, implementation, dtype, values):
    """Few candidates are searched, or the whole group if there are many or if it is small. Numbers of 16 bits are often
    equal. The last group is not full, and neither are the groups of the last program."""
    grad = VALUES[values]()[4000:8200].to(dtype)
    assert torch.equal(encode(implementation, compressor, grad)[0], encode(REFERENCE, compressor, grad)[0])
    residual = VALUES[values]()[4000:8200].roll(7)
    got, kept = encode(implementation, compressor, grad, residual)
    want, left = encode(REFERENCE, compressor, grad, residual)
    assert torch.equal(got, want)
    assert_equal(kept, left)


@pytest.mark.parametrize("implementation", [REFERENCE_PARAM, HOST_PARAM, KERNEL_PARAM])
@pytest.mark.parametrize("compressor", IN_KERNELS, ids=repr)
@interpreted([*IN_KERNELS[:2], IN_KERNELS[4]])
@cases(("wrong", "like"), [(1, 0), (-1, -2), (3, 5)])
def test_a_damaged_group_decodes_to_nan(compressor, implementation, wrong, like):
    """An index that repeats would count once or twice. Other groups, and other sources of theirs, stay."""
    numel, group = 3 * compressor.chunk, slice(compressor.chunk, 2 * compressor.chunk)
    payloads = torch.stack([encode(REFERENCE, compressor, torch.randn(numel))[0] for _ in range(2)])
    want = decode(REFERENCE, compressor, payloads, torch.empty(numel))
    want[group] = torch.nan
    row = compressor.rows(payloads[1, 0], compressor.layout(numel))["indices"][1]
    indices = unpack12(row)
    indices[wrong] = indices[like]
    row.copy_(pack12(indices))
    assert_equal(decode(implementation, compressor, payloads, torch.empty(numel)), want)


def test_twelve_bits_are_packed_as_the_example_says():
    numbers = torch.tensor([0x123, 0xABC])
    assert pack12(numbers).tolist() == [0x23, 0xC1, 0xAB]
    every = torch.arange(4096).view(2, -1)
    assert torch.equal(unpack12(pack12(every)), every)
