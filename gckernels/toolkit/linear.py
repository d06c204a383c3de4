"""Signed linear quantisation, shared by block-wise and sparse compressors, each function in torch and in Triton.

With ``m = 2**(bits - 1) - 1`` a code stands for an integer from ``-m`` to ``m``, with ``m + 1`` added, times a scale.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .numeric import reciprocal, round_half_even

_TINY = torch.finfo(torch.float32).tiny
Array = Any


@triton.jit
def zero_below_normal(scale):
    """``scale``, and 0 for one below the smallest normal number."""
    return tl.where(scale < 1.1754943508222875e-38, 0.0, scale)


@triton.jit
def absmax_scale(largest, count, BITS: tl.constexpr):
    """The scale with which ``largest`` becomes ``m``."""
    limit = tl.full(largest.shape, 2 ** (BITS - 1) - 1, tl.float32)
    return zero_below_normal(tl.div_rn(largest, limit))


@triton.jit
def quantize(values, scale, u, BITS: tl.constexpr):
    """Codes, int32: the nearest integer (ties to even) to ``values / scale``."""
    LIMIT: tl.constexpr = 2 ** (BITS - 1) - 1
    level = round_half_even(values * reciprocal(scale))
    return tl.clamp(level, -LIMIT * 1.0, LIMIT * 1.0).to(tl.int32) + (LIMIT + 1)


@triton.jit
def dequantize(codes, scale, BITS: tl.constexpr):
    """fp32 values of int32 codes."""
    return (codes - 2 ** (BITS - 1)).to(tl.float32) * scale


def zero_below_normal_array(scale: Array) -> Array:
    """See :func:`zero_below_normal`."""
    return scale * (scale >= _TINY)


def absmax_scale_array(largest: Array, count: Array, bits: int) -> Array:
    """See :func:`absmax_scale`."""
    return zero_below_normal_array(largest / (2 ** (bits - 1) - 1))


def quantize_array(values: Array, scale: Array, u: Array | None, bits: int) -> Array:
    """See :func:`quantize`; the codes are integral fp32."""
    limit = 2 ** (bits - 1) - 1
    is_zero = scale == 0
    inverse = (1.0 / (scale + is_zero)) * ~is_zero
    return (values * inverse).round().clip(-limit, limit) + (limit + 1)


def dequantize_array(codes: Array, scale: Array, bits: int) -> Array:
    """See :func:`dequantize`; the codes are integral fp32."""
    return (codes - 2 ** (bits - 1)) * scale
