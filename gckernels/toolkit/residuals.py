"""Residuals in 8 bits: a quarter of the memory of fp32 residuals, at about half a percent of their precision.

The elements of a residual are cut into groups of 256. Each group has a scale, the smallest power of two by which the
codes of all of its elements are at most 127, and a residual is a multiple of the scale, rounded to the nearest (ties to
even). It is the format of OCP's MXINT8 (Microscaling Formats Specification 1.0, 2023) with larger groups, and does for
feedback what LoCo does (Xie et al., arXiv:2407.04480, section 3).

As scales are powers of two, nothing is rounded but the codes, so all implementations write the same bytes, and a
residual that is decoded and encoded again is the same.

A residual has as many rows as its unit has payloads. Format of a row of ``size`` elements, in bytes: the exponents of
the groups, each plus 127, then the codes, two's complement. Both are padded with zeros to multiples of 16. Bytes that
are all zero are a residual of zeros.

Example: a row of 4 elements, ``[1.0, -0.5, 0.25, 0.1]``. The largest magnitude is 1, so the scale is ``2**-6``: with
``2**-7`` its code would be 128::

    bytes  0..15  79 00 .. 00               127 - 6
    bytes 16..31  40 E0 10 06 00 .. 00      64, -32, 16, 6
    decoded [1.0, -0.5, 0.25, 0.09375]
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from ..codec import chunk_numel
from .payload import ALIGN_NBYTES, round_up

GROUP = 256
"""The elements that share a scale."""
LARGEST_CODE = 127
_BIAS = 127  # an exponent of fp32 is stored plus this
_HIGHEST = 254 - 6 + 1  # the exponent of the largest scale, as it is stored
# The exponent of a largest magnitude minus 6, and one more if the magnitude is above 127 / 64 times its power of two.
CARRY = (1 << 23) - 1 - 0x7E0000


def residual_nbytes(numel: int) -> int:
    """The bytes of the residual in 8 bits of ``numel`` elements with one payload: 1.004 per element, for many."""
    return _codes_offset(numel) + round_up(numel, ALIGN_NBYTES)


def encode_residual(values: torch.Tensor, chunks: int = 1, size: int | None = None) -> torch.Tensor:
    """The residual in 8 bits for some values, ``uint8 [chunks, residual_nbytes(size)]``.

    Args:
        values: finite, ``fp32 [numel]``.
        chunks: the number of payloads of the unit.
        size: the elements that every payload is laid out for; by default ``gckernels.chunk_numel(numel, chunks)``.
    """
    size = chunk_numel(values.numel(), chunks) if size is None else size
    at, width = _codes_offset(size), round_up(size, GROUP)
    rows = pad(values, (0, chunks * size - values.numel())).view(chunks, size)
    groups = pad(rows, (0, width - size)).view(chunks, width // GROUP, GROUP)
    largest = groups.abs().amax(-1).view(torch.int32)
    exponents = ((largest + CARRY) >> 23).sub_(6).clamp_(min=1)
    codes = (groups * _power(2 * _BIAS - exponents)).round_().to(torch.int8).view(chunks, width)
    encoded = torch.zeros(chunks, residual_nbytes(size), dtype=torch.uint8, device=values.device)
    encoded[:, : width // GROUP] = exponents
    encoded[:, at : at + size] = codes[:, :size].view(torch.uint8)
    return encoded


def decode_residual(encoded: torch.Tensor, numel: int, size: int | None = None) -> torch.Tensor:
    """The values of a residual in 8 bits, ``fp32 [numel]``.

    Args:
        encoded: ``uint8 [chunks, residual_nbytes(size)]``, or of one payload ``uint8 [residual_nbytes(size)]``.
        numel: the number of elements.
        size: as for :func:`encode_residual`.
    """
    rows = encoded if encoded.dim() == 2 else encoded[None]
    size = chunk_numel(numel, rows.shape[0]) if size is None else size
    at, width = _codes_offset(size), round_up(size, GROUP)
    codes = pad(rows[:, at : at + size], (0, width - size)).view(torch.int8).view(len(rows), width // GROUP, GROUP)
    return (codes * _power(rows[:, : width // GROUP].int())).view(len(rows), width)[:, :size].reshape(-1)[:numel]


def multiply_residual(encoded: torch.Tensor, size: int, factor: torch.Tensor | float) -> None:
    """Multiply a residual in 8 bits by a number from 0 up, in place. Powers of two are exact.

    Args:
        encoded: ``uint8 [chunks, residual_nbytes(size)]``.
        size: as for :func:`encode_residual`.
        factor: the number, an fp32 scalar on the same device or a float.
    """
    exponents, at = encoded[:, : round_up(size, GROUP) // GROUP], _codes_offset(size)
    if not isinstance(factor, torch.Tensor):
        factor = torch.full((), factor, dtype=torch.float32, device=encoded.device)
    power = factor.log2().ceil().clamp(-126, 127)
    shifted = exponents.int() + power.int()
    codes = encoded[:, at:].view(torch.int8)
    codes.copy_((codes * (factor / power.exp2())).round_())
    lost = (shifted < 1).repeat_interleave(GROUP, 1)  # below the smallest scale
    codes.masked_fill_(lost[:, : codes.shape[1]], 0)
    exponents.copy_(shifted.clamp_(1, _HIGHEST))


def _codes_offset(size: int) -> int:
    return round_up(round_up(size, GROUP) // GROUP, ALIGN_NBYTES)


def _power(exponents: torch.Tensor) -> torch.Tensor:
    """Powers of two by their biased exponents, ``fp32 [..., 1]``; 0 for exponent 0."""
    return (exponents << 23).view(torch.float32).unsqueeze(-1)
