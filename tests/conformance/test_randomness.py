"""The same seed gives the same bytes, and unbiased compressors are unbiased."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
import triton
import triton.language as tl
from configurations import CONFIGURATIONS, parametrize

from gckernels.toolkit.quantizer import Dual, MapQuantizer, Maps
from gckernels.toolkit.statistics import ABS_MAX, LARGER
from helpers import HOST, HOST_PARAM, KERNEL_PARAM, REFERENCE, decode_one, encode

IMPLEMENTATIONS = pytest.mark.parametrize("implementation", [HOST_PARAM, KERNEL_PARAM])
NUM_SEEDS = 2000


@triton.jit
def _largest(largest, count, BITS: tl.constexpr):
    return largest


@triton.jit
def _ternary(values, stat, u, BITS: tl.constexpr):
    return tl.where(u * stat < tl.abs(values), tl.where(values > 0, 2, 1), 0)


@triton.jit
def _ternary_value(codes, stat, BITS: tl.constexpr):
    return tl.where(codes == 0, stat * 0.0, tl.where(codes == 2, stat, -stat))


def _ternary_array(values, stat, u, bits):
    hit = u * stat < abs(values)
    return abs(values) * 0 + hit + (hit & (values > 0))  # fp32 plus bools


def _ternary_value_array(codes, stat, bits):
    return (codes == 2) * stat - (codes == 1) * stat


@dataclass(frozen=True)
class Ternary(MapQuantizer):
    """Plus or minus the largest magnitude with probability ``abs(value) / largest``, else 0. Not registered: it is here
    so that the toolkit's random numbers are tested whatever compressors there are."""

    stochastic = True
    bits: ClassVar[int] = 2
    block: int | None = None
    maps = Maps(
        reduce=ABS_MAX,
        combine=LARGER,
        finish=Dual(lambda largest, count, bits: largest, _largest),
        quantize=Dual(_ternary_array, _ternary),
        dequantize=Dual(_ternary_value_array, _ternary_value),
    )


STOCHASTIC = {spec: c for spec, c in CONFIGURATIONS.items() if c.stochastic} | {
    "toolkit": Ternary(),
    "toolkit-blocks": Ternary(block=128),
}
UNBIASED = {spec: c for spec, c in STOCHASTIC.items() if not c.needs_feedback and spec != "toolkit-blocks"}


@IMPLEMENTATIONS
@parametrize()
def test_same_arguments_give_the_same_bytes(compressor, implementation):
    grad, residual = torch.randn(1000), torch.randn(1000)
    once = encode(implementation, compressor, grad, residual, chunks=2, seed=7)
    again = encode(implementation, compressor, grad, residual, chunks=2, seed=7)
    assert torch.equal(once[0], again[0])
    assert torch.equal(once[1], again[1])
    other, _ = encode(implementation, compressor, grad, residual, chunks=2, seed=8)
    assert torch.equal(once[0], other) != compressor.stochastic, "the seed must matter exactly if `stochastic` says so"


@IMPLEMENTATIONS
@pytest.mark.parametrize("compressor", STOCHASTIC.values(), ids=STOCHASTIC)
@pytest.mark.parametrize("seed", [0, 1, 16, -1, -5, 2**31, 2**32 - 1, 2**63 - 1, -(2**63)])
def test_kernel_and_host_draw_the_references_numbers(compressor, implementation, seed):
    """Any 64-bit seed, any chunk: whatever integer type a launch passes the seed in."""
    grad = torch.randn(300)
    got, _ = encode(implementation, compressor, grad, None, chunks=3, seed=seed)
    want, _ = encode(REFERENCE, compressor, grad, None, chunks=3, seed=seed)
    assert torch.equal(got, want)


@pytest.mark.parametrize("compressor", UNBIASED.values(), ids=UNBIASED)
def test_unbiased(compressor):
    """The mean over many seeds is within four standard errors of the gradient, element by element."""
    grad = torch.randn(40)
    samples = torch.stack(
        [decode_one(compressor, encode(HOST, compressor, grad, seed=seed)[0], 40) for seed in range(NUM_SEEDS)]
    ).double()
    error = (samples.mean(0) - grad).abs()
    standard_error = samples.std(0) / NUM_SEEDS**0.5
    # an element that always decodes to the same value may still be rounded
    assert (error <= 4 * standard_error + 2.0**-23 * grad.abs()).all()


@pytest.mark.parametrize("compressor", STOCHASTIC.values(), ids=STOCHASTIC)
def test_elements_draw_independently(compressor):
    """Equal elements must not all get the same code."""
    grad = torch.cat([torch.ones(1), torch.full((499,), 0.3)])
    payload, _ = encode(HOST, compressor, grad)
    assert decode_one(compressor, payload, 500)[1:].unique().numel() > 1
