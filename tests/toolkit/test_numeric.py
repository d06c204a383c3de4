"""The kernels' small numeric functions give torch's bits for all inputs."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis.extra import numpy as arrays

from gckernels.toolkit import numeric
from helpers import KERNEL_PARAM, assert_equal

COUNT = 256
IMPLEMENTATION = pytest.mark.parametrize("implementation", [KERNEL_PARAM])
BITS = arrays.arrays(np.uint32, COUNT, elements=st.integers(0, 2**32 - 1), fill=st.nothing())


def with_corner_cases(bits: np.ndarray) -> torch.Tensor:
    """The fp32 values of ``bits``, half of them replaced by neighbours of special values."""
    special = np.array(
        [0, 1, 0x7FFFFF, 0x800000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000, 0x3F800000], np.uint32
    )
    near = special[bits[::2] % special.size] + (bits[::2] >> 8) % 3 - 1
    mixed = bits.copy()
    mixed[::2] = near & 0x7FFFFFFF | bits[::2] & 0x80000000
    mixed[1::4] = mixed[1::4] & 0xFFFF0000 | 0x8000  # ties when rounding to bf16
    return torch.from_numpy(mixed.view(np.float32))


@triton.jit
def _numeric_kernel(x_ptr, finite_ptr, reciprocal_ptr, bits_ptr, value_ptr, bf16_ptr, fp16_ptr, COUNT: tl.constexpr):
    offsets = tl.arange(0, COUNT)
    x = tl.load(x_ptr + offsets)
    tl.store(finite_ptr + offsets, numeric.is_finite(x).to(tl.int32))
    tl.store(reciprocal_ptr + offsets, numeric.reciprocal(x))
    bits = numeric.bf16_bits(x)
    tl.store(bits_ptr + offsets, bits)
    tl.store(value_ptr + offsets, numeric.bf16_value(bits))
    numeric.store(bf16_ptr + offsets, x, offsets >= 0)
    numeric.store(fp16_ptr + offsets, x, offsets >= 0)


@IMPLEMENTATION
@given(bits=BITS)
def test_conversions_and_reciprocal(implementation, bits):
    x = with_corner_cases(bits)
    device = implementation.device
    finite, half_bits = (torch.empty(COUNT, dtype=torch.int32, device=device) for _ in range(2))
    reciprocal, value = (torch.empty(COUNT, device=device) for _ in range(2))
    bf16 = torch.empty(COUNT, dtype=torch.bfloat16, device=device)
    fp16 = torch.empty(COUNT, dtype=torch.float16, device=device)
    _numeric_kernel[(1,)](x.to(device), finite, reciprocal, half_bits, value, bf16, fp16, COUNT)
    assert torch.equal(finite.cpu().bool(), torch.isfinite(x))
    tiny = torch.finfo(torch.float32).tiny
    # NaN is no scale; other values give their reciprocal, and values below the normal numbers give 0
    want = torch.where(x.abs() >= tiny, 1 / x, 0.0)
    assert_equal(reciprocal.cpu(), want)
    assert_equal(bf16.cpu(), x.to(torch.bfloat16))
    assert_equal(value.cpu(), x.to(torch.bfloat16).float())
    signs = x.to(torch.bfloat16).view(torch.int16).int() & 0xFFFF
    assert_equal(half_bits.cpu()[~x.isnan()], signs[~x.isnan()])
    assert_equal(fp16.cpu(), x.to(torch.float16))


@triton.jit
def _round_kernel(x_ptr, out_ptr, ZERO: tl.constexpr, BITS: tl.constexpr, COUNT: tl.constexpr):
    offsets = tl.arange(0, COUNT)
    tl.store(out_ptr + offsets, numeric.rounded_code(tl.load(x_ptr + offsets), ZERO, BITS))


@IMPLEMENTATION
@pytest.mark.parametrize(("zero", "bits"), [(0, 1), (2, 2), (8, 4), (128, 8), (2**16, 22)])
@settings(max_examples=10)  # per rounding
@given(x=arrays.arrays(np.float32, COUNT, elements=st.floats(0, 1, width=32), fill=st.nothing()))
def test_rounding(implementation, zero, bits, x):
    largest = 2**bits - 1 - zero
    x = x * (largest + zero) - zero
    x[::2] = np.minimum(np.floor(x[::2]) + 0.5, largest)
    values = torch.from_numpy(x).to(implementation.device)
    codes = torch.empty_like(values, dtype=torch.int32)
    _round_kernel[(1,)](values, codes, zero, bits, COUNT)
    assert_equal(codes, (values.round() + zero).int())
    assert_equal(numeric.rounded_code_torch(values, zero, bits), codes)


def test_roots_are_correctly_rounded():
    x = torch.rand(100_000) * 4  # long enough for torch to hand them to a library
    want = torch.tensor([math.sqrt(each) for each in x.tolist()])  # numbers have 24 bits, so rounding twice is once
    assert_equal(numeric.sqrt_torch(x), want)
