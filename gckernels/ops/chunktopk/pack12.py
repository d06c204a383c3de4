"""Packing 12-bit integers, two in three bytes, lowest bits first: indices into a group of at most 4096 elements.

Example: ``0x123 0xABC`` become the bytes ``0x23 0xC1 0xAB``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BITS = 12
MAX_GROUP = 1 << BITS


def packed12_nbytes(numel: int) -> int:
    """Size in bytes of ``numel`` packed integers; ``numel`` is even."""
    return numel // 2 * 3


def pack12(numbers: torch.Tensor) -> torch.Tensor:
    """``numbers [..., numel]``, in ``0 .. 4095``, as ``uint8 [..., packed12_nbytes(numel)]``; ``numel`` is even."""
    even, odd = numbers[..., 0::2], numbers[..., 1::2]
    return torch.stack([even & 255, even >> 8 | (odd & 15) << 4, odd >> 4], -1).flatten(-2).to(torch.uint8)


def unpack12(packed: torch.Tensor) -> torch.Tensor:
    """The numbers, ``int64 [..., numel]``, in ``packed``: the inverse of :func:`pack12`."""
    first, middle, last = packed.long().unflatten(-1, (-1, 3)).unbind(-1)
    return torch.stack([first | (middle & 15) << 8, middle >> 4 | last << 4], -1).flatten(-2)


@triton.jit
def store12(packed_ptr, pairs, even, odd, mask):
    """Store the first numbers (``even``) and second numbers (``odd``), int32, of the pairs with indices ``pairs``."""
    tl.store(packed_ptr + pairs * 3, (even & 255).to(tl.uint8), mask=mask)
    tl.store(packed_ptr + pairs * 3 + 1, (even >> 8 | (odd & 15) << 4).to(tl.uint8), mask=mask)
    tl.store(packed_ptr + pairs * 3 + 2, (odd >> 4).to(tl.uint8), mask=mask)


@triton.jit
def load12(packed_ptr, positions, mask):
    """The numbers at ``positions``, int32 in ``0 .. 4095``."""
    first = packed_ptr + positions * 3 // 2
    low = tl.load(first, mask=mask, other=0).to(tl.int32)
    high = tl.load(first + 1, mask=mask, other=0).to(tl.int32)
    return ((low | high << 8) >> (positions % 2 * 4)) & 0xFFF
