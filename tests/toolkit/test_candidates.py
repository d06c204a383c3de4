"""Kernels of sparsifiers send what the reference sends, whatever the sample says of which elements are large."""

from __future__ import annotations

import pytest
import torch

from gckernels import DGC, GradDrop, MSTopK, Threshold, TopK
from gckernels.codec import Encoding
from gckernels.toolkit.kernels.launch import record_launches
from gckernels.toolkit.sparsifier import encode_kernels
from gckernels.toolkit.sparsifier.keys import sample_positions
from gckernels.toolkit.sparsifier.selection_kernels import SAMPLES
from helpers import KERNEL, KERNEL_PARAM, REFERENCE, assert_equal, encode, interpreted

NUMEL = 17_001  # more than the kernels' own sample
SEED = 5
KERNELS = pytest.mark.parametrize("implementation", [KERNEL_PARAM])


def own_sample() -> torch.Tensor:
    """The positions of the kernels' own sample."""
    stride = -(-NUMEL // SAMPLES)
    rows = torch.arange(NUMEL // stride)
    return rows * stride + ((rows * 0x9E3779B9 & 0xFFFFFFFF) * stride >> 32)


def few_candidates() -> torch.Tensor:
    """Large elements where they are sampled, and nowhere else: 1/20 of the sample, but 1/40 of all."""
    gradient = torch.randn(NUMEL)
    gradient[own_sample()[:520]] = 100.0
    gradient[sample_positions(NUMEL, SEED, 0)[:100]] = 100.0
    return gradient


def many_candidates() -> torch.Tensor:
    """As large elements as in the sample nearly everywhere else."""
    gradient = torch.randn(NUMEL) / 1e3
    gradient[own_sample()] = torch.randn(len(own_sample())) / 1e6
    return gradient


def with_not_finite(gradient: torch.Tensor) -> torch.Tensor:
    gradient[::1001] = torch.nan
    gradient[500::1301] = -torch.inf
    return gradient


GRADIENTS = {
    "few": few_candidates,
    "many": many_candidates,
    "few, not finite": lambda: with_not_finite(few_candidates()),
    "many, not finite": lambda: with_not_finite(many_candidates()),
    "equal": lambda: torch.full((NUMEL,), -0.3),
    "zeros": lambda: torch.zeros(NUMEL),
    "almost zeros": lambda: torch.where(torch.arange(NUMEL) % 999 == 0, 1.0, 0.0),
    "ties": lambda: torch.randint(-3, 4, (NUMEL,)) * 0.5,
}
QUICK = {("TopK", "few, not finite"), ("MSTopK", "few, not finite"), ("Threshold", "many, not finite")}
COMPRESSORS = [
    TopK(ratio=0.05),
    MSTopK(ratio=0.05, value_bits=4),
    DGC(ratio=0.01),
    DGC(ratio=0.05, momentum=0.5, nesterov=True, clip=10.0, value_bits=8),
    GradDrop(ratio=0.02, value_bits=16),
    Threshold(tau=1e-5, ratio=0.05),
]


def check(implementation, compressor, gradient: torch.Tensor, chunks: int = 1) -> None:
    """Assert that payloads and states are those of the reference."""
    size = torch.randn(compressor.traits.states * gradient.numel())
    residual = size * gradient.abs().nan_to_num(1.0).clamp(max=1.0).amin()
    payload, kept = encode(implementation, compressor, gradient, residual, chunks, SEED)
    want, want_kept = encode(REFERENCE, compressor, gradient, residual, chunks, SEED)
    assert torch.equal(payload, want)
    assert_equal(kept, want_kept)


@KERNELS
@pytest.mark.parametrize(
    ("compressor", "name"),
    [
        pytest.param(compressor, name, marks=[] if (compressor.name, name) in QUICK else [pytest.mark.slow])
        for compressor in COMPRESSORS
        for name in GRADIENTS
    ],
    ids=str,
)
@interpreted(COMPRESSORS)
def test_a_misleading_sample_changes_nothing(implementation, compressor, name):
    """Among these are gradients with too few candidates, and with more than there is room for."""
    check(implementation, compressor, GRADIENTS[name]())


@KERNELS
@pytest.mark.parametrize("ratio", [1e-9, pytest.param(0.3, marks=pytest.mark.slow), 1.0])
def test_any_number_of_entries(implementation, ratio):
    check(implementation, TopK(ratio=ratio), torch.randn(encode_kernels.SMALL + 3))


@KERNELS
def test_a_program_lists_many_tiles_and_emits_many_shares(implementation, monkeypatch):
    monkeypatch.setattr(encode_kernels, "MAX_RUNS", 2)
    monkeypatch.setattr(encode_kernels, "MAX_PROGRAMS", 2)
    check(implementation, TopK(), torch.randn(NUMEL))


@KERNELS
def test_the_key_of_a_large_sample_is_found_by_digits(implementation, monkeypatch):
    monkeypatch.setattr(encode_kernels, "SAMPLES", 1024)
    check(implementation, GradDrop(), torch.randn(NUMEL))


@KERNELS
@pytest.mark.slow
@pytest.mark.parametrize("compressor", COMPRESSORS, ids=lambda compressor: compressor.name)
def test_chunks_of_any_size(implementation, compressor):
    """The last chunk is shorter than the others, or empty."""
    for numel, chunks in ((2 * encode_kernels.SMALL + 50, 2), (4 * 4112, 5), (encode_kernels.SMALL, 1)):
        check(implementation, compressor, torch.randn(numel), chunks)


def test_small_chunks_take_two_launches():
    def launches(numel: int) -> int:
        compressor = TopK()
        payload = torch.empty(1, compressor.payload_nbytes(numel), dtype=torch.uint8)
        with record_launches() as recorded:
            KERNEL.backend(compressor).encode(Encoding(compressor, torch.empty(numel), None, payload, 0, numel))
        return len(recorded)

    assert launches(encode_kernels.SMALL) == 2
    assert launches(encode_kernels.SMALL + 1) > 2
