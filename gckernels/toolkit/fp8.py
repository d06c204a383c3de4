"""Conversion between fp32 and 8-bit floating point in integer arithmetic, with the same bits on every device.

A format has a sign, ``7 - mantissa`` bits of exponent with a bias, and ``mantissa`` bits of mantissa; Micikevicius et
al., "FP8 Formats for Deep Learning" (arXiv:2209.05433), section 3. ``e4m3`` has no infinity and one NaN per sign
(``torch.float8_e4m3fn``). ``e5m2`` follows the rules of IEEE 754 (``torch.float8_e5m2``). Codes are int32 in
``0 .. 255``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .numeric import round_half_even

FORMATS = {"e4m3": (3, 7, 448.0), "e5m2": (2, 15, 57344.0)}
"""``(mantissa, bias, largest)`` by name: bits of mantissa, bias of the exponent, largest finite number."""


@triton.jit
def encode(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr, LARGEST: tl.constexpr):
    """The code nearest to finite fp32 ``x`` (ties to even); magnitudes above ``LARGEST`` get its code."""
    size = tl.minimum(tl.abs(x), LARGEST)
    bits = size.to(tl.int32, bitcast=True)
    # Rounding may carry into the exponent, which is correct. Below the smallest normal number codes are equally spaced,
    # and they end with the code of that number.
    rounded = (bits + (2 ** (22 - MANTISSA) - 1) + ((bits >> (23 - MANTISSA)) & 1)) >> (23 - MANTISSA)
    normal = rounded - ((127 - BIAS) * 2**MANTISSA)
    steps = round_half_even(tl.minimum(size, 2.0 ** (1 - BIAS)) * 2.0 ** (MANTISSA + BIAS - 1)).to(tl.int32)
    return tl.where(size < 2.0 ** (1 - BIAS), steps, normal) | tl.where(x < 0, 128, 0)


@triton.jit
def decode(codes, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """The fp32 value of each code."""
    size = codes & 127
    normal = ((size << (23 - MANTISSA)) + ((127 - BIAS) * 2**23)).to(tl.float32, bitcast=True)
    value = tl.where(size < 2**MANTISSA, size.to(tl.float32) * 2.0 ** (1 - MANTISSA - BIAS), normal)
    if MANTISSA == 3:
        value = tl.where(size == 127, float("nan"), value)
    else:
        value = tl.where(size < 124, value, float("nan"))
        value = tl.where(size == 124, float("inf"), value)
    return tl.where(codes >= 128, value * -1.0, value)  # unary minus is 0 - value, which is never -0.0


def encode_torch(x: torch.Tensor, mantissa: int, bias: int, largest: float) -> torch.Tensor:
    """:func:`encode` in torch."""
    size = x.abs().clamp(0.0, largest)
    bits = size.view(torch.int32)
    rounded = (bits + (2 ** (22 - mantissa) - 1) + ((bits >> (23 - mantissa)) & 1)) >> (23 - mantissa)
    normal = rounded - (127 - bias) * 2**mantissa
    steps = (size.clamp(0.0, 2.0 ** (1 - bias)) * 2.0 ** (mantissa + bias - 1)).round().to(torch.int32)
    return torch.where(size < 2.0 ** (1 - bias), steps, normal) | torch.where(x < 0, 128, 0)


def decode_torch(codes: torch.Tensor, mantissa: int, bias: int) -> torch.Tensor:
    """:func:`decode` in torch."""
    size = codes & 127
    normal = ((size << (23 - mantissa)) + (127 - bias) * 2**23).view(torch.float32)
    value = torch.where(size < 2**mantissa, size.to(torch.float32) * 2.0 ** (1 - mantissa - bias), normal)
    if mantissa == 3:
        value = torch.where(size == 127, torch.nan, value)
    else:
        value = torch.where(size < 124, value, torch.nan)
        value = torch.where(size == 124, torch.inf, value)
    return torch.where(codes >= 128, value * -1.0, value)
