"""Signed linear quantisation for block-wise and sparse compressors. Each function exists in torch and in Triton.

With ``m = 2**(bits - 1) - 1``, the code of an integer ``k`` from ``-m`` to ``m`` is ``k + m + 1``; it decodes to ``k``
times a scale.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .numeric import (
    reciprocal,
    reciprocal_torch,
    rounded_code,
    rounded_code_torch,
    small_to_fp32,
    small_to_fp32_torch,
)
from .quantizer import LARGEST, Statistic
from .quantizer.statistics import MAGNITUDE

_TINY = torch.finfo(torch.float32).tiny


@triton.jit
def zero_below_normal(scale):
    """``scale``, or 0 where ``scale`` is below the smallest normal number."""
    return tl.where(scale < 1.1754943508222875e-38, 0.0, scale)


@triton.jit
def absmax_scale(largest, BITS: tl.constexpr):
    """The scale that maps the magnitude ``largest`` to ``m``."""
    return zero_below_normal(tl.div_rn(largest, tl.full(largest.shape, 2 ** (BITS - 1) - 1, tl.float32)))


@triton.jit
def pairwise_sum(values, ROWS: tl.constexpr, LOG2_COLUMNS: tl.constexpr):
    """Sums ``[ROWS]`` of the rows of ``[ROWS, 2**LOG2_COLUMNS]``, neighbours first; ``tl.sum`` has no fixed order."""
    for level in tl.static_range(1, LOG2_COLUMNS + 1):
        values = tl.sum(tl.reshape(values, (ROWS, 2 ** (LOG2_COLUMNS - level), 2)), 2)
    return tl.reshape(values, (ROWS,))


@triton.jit
def quantize_codes(values, scale, BITS: tl.constexpr):
    """Codes, int32: ``values / scale`` rounded to an integer (ties to even) from ``-m`` to ``m``, plus ``m + 1``; any
    code for NaN."""
    LIMIT: tl.constexpr = 2 ** (BITS - 1) - 1
    return rounded_code(tl.clamp(values * reciprocal(scale), -LIMIT * 1.0, LIMIT * 1.0), LIMIT + 1, BITS)


@triton.jit
def dequantize_codes(codes, scale, BITS: tl.constexpr):
    """The fp32 values of int32 codes."""
    return small_to_fp32(codes, 2 ** (BITS - 1)) * scale


def zero_below_normal_torch(scale: torch.Tensor) -> torch.Tensor:
    """See :func:`zero_below_normal`."""
    return torch.where(scale < _TINY, 0.0, scale)


def absmax_scale_torch(largest: torch.Tensor, bits: int) -> torch.Tensor:
    """See :func:`absmax_scale`."""
    return zero_below_normal_torch(largest / (2 ** (bits - 1) - 1))


def pairwise_sum_torch(values: torch.Tensor) -> torch.Tensor:
    """Sums ``[rows]`` of the rows of ``[rows, columns]``, for any number of columns; see :func:`pairwise_sum`."""
    while values.shape[1] > 1:
        odd_one = values[:, values.shape[1] // 2 * 2 :]
        values = torch.cat([values[:, 0:-1:2] + values[:, 1::2], odd_one], 1)
    return values[:, 0]


def quantize_torch(values: torch.Tensor, scale: torch.Tensor, bits: int) -> torch.Tensor:
    """See :func:`quantize_codes`."""
    limit = 2 ** (bits - 1) - 1
    return rounded_code_torch((values * reciprocal_torch(scale)).clip(-limit, limit), limit + 1, bits)


def dequantize_torch(codes: torch.Tensor, scale: torch.Tensor, bits: int) -> torch.Tensor:
    """See :func:`dequantize_codes`."""
    return small_to_fp32_torch(codes, 2 ** (bits - 1)) * scale


ABSMAX_SCALE = Statistic((LARGEST,), MAGNITUDE, lambda partials, count, C: (absmax_scale_torch(partials[0], C.bits),))
