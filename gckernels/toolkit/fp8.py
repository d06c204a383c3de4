"""Conversion between fp32 and 8-bit floating point, with the same bits on every device.

A format has a sign, ``7 - mantissa`` bits of exponent with a bias, and ``mantissa`` bits of mantissa; Micikevicius et
al., "FP8 Formats for Deep Learning" (arXiv:2209.05433), section 3. ``e4m3`` has no infinity and one NaN per sign
(``torch.float8_e4m3fn``). ``e5m2`` follows the rules of IEEE 754 (``torch.float8_e5m2``). Codes are int32 in
``0 .. 255``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .numeric import rounded_code_torch

FORMATS = {"e4m3": (3, 7, 448.0), "e5m2": (2, 15, 57344.0)}
"""``(mantissa, bias, largest)`` by name: bits of mantissa, bias of the exponent, largest finite number."""
CAPABILITY = 89
"""The first compute capability with instructions for these conversions."""


def encode(x: torch.Tensor, mantissa: int, bias: int, largest: float) -> torch.Tensor:
    """The code, int32, nearest to fp32 ``x`` (ties to even); magnitudes above ``largest`` get its code, and NaN any."""
    size = x.abs().clamp(max=largest)
    bits = size.view(torch.int32)
    # Rounding may carry into the exponent, which is correct. Below the smallest normal number codes are equally spaced,
    # and they end with the code of that number.
    rounded = (bits + (2 ** (22 - mantissa) - 1) + ((bits >> (23 - mantissa)) & 1)) >> (23 - mantissa)
    normal = rounded - (127 - bias) * 2**mantissa
    steps = rounded_code_torch(size.clamp(max=2.0 ** (1 - bias)) * 2.0 ** (mantissa + bias - 1), 0, mantissa + 1)
    return torch.where(size < 2.0 ** (1 - bias), steps, normal) | torch.where(x < 0, 128, 0)


def decode(codes: torch.Tensor, mantissa: int, bias: int) -> torch.Tensor:
    """The fp32 value of each code."""
    size = codes & 127
    normal = ((size << (23 - mantissa)) + (127 - bias) * 2**23).view(torch.float32)
    value = torch.where(size < 2**mantissa, size.to(torch.float32) * 2.0 ** (1 - mantissa - bias), normal)
    if mantissa == 3:
        value = torch.where(size == 127, torch.nan, value)
    else:
        value = torch.where(size < 124, value, torch.nan)
        value = torch.where(size == 124, torch.inf, value)
    return torch.where(codes >= 128, value * -1.0, value)


@triton.jit
def encode_by_instruction(x, MANTISSA: tl.constexpr):
    """:func:`encode` on a GPU of compute capability ``CAPABILITY``."""
    x += 0.0  # never -0.0
    if MANTISSA == 3:
        code = x.to(tl.float8e4nv)
    else:
        code = x.to(tl.float8e5)
    return code.to(tl.uint8, bitcast=True).to(tl.int32)


@triton.jit
def decode_by_instruction(codes, MANTISSA: tl.constexpr):
    """:func:`decode` on a GPU of compute capability ``CAPABILITY``."""
    if MANTISSA == 3:
        value = codes.to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    else:
        value = codes.to(tl.uint8).to(tl.float8e5, bitcast=True)
    return value.to(tl.float32)
