"""Loads and stores of tiles. A tile is the run of ``TILE_NUMEL`` elements that one program of a kernel works on."""

from __future__ import annotations

import triton
import triton.language as tl

from ..codec import CHUNK_ALIGN
from .numeric import store, to_fp32
from .payload import round_up
from .target import for_nvidia


@triton.jit
def remaining(limit, tile_first, TILE_NUMEL: tl.constexpr):
    """Number of elements from ``tile_first`` to ``limit``, 0 to ``TILE_NUMEL``, as int32 for comparisons in masks."""
    return tl.maximum(tl.minimum(limit - tile_first, TILE_NUMEL), 0).to(tl.int32)


@triton.jit
def load_tile(tile_ptr, offsets, count, TILE_NUMEL: tl.constexpr):
    """The first ``count`` elements as fp32, with zeros behind them.

    A full tile is loaded without a mask. With a mask, an element count that 16 does not divide would break up the
    16-byte accesses of all tiles, not only of the last one.
    """
    if count == TILE_NUMEL:
        values = _loaded_to_fp32(tl.load(tile_ptr + offsets))
    else:
        values = to_fp32(tl.load(tile_ptr + offsets, mask=offsets < count, other=0.0))
        # so that the branches end differently, and compilers keep them apart
        values = tl.where(offsets < count, values, 0.0)
    return values


@triton.jit
def _loaded_to_fp32(values):
    """``values`` as fp32, of which a thread has loaded neighbours with one instruction."""
    if values.dtype == tl.bfloat16 and for_nvidia():
        # one instruction for each number; by itself, LLVM first gives the upper half of a word a register of its own
        return tl.inline_asm_elementwise(
            "{ shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000; }",
            "=r,=r,r",
            [values],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
    else:
        return to_fp32(values)


@triton.jit
def store_tile(tile_ptr, offsets, values, count, TILE_NUMEL: tl.constexpr):
    """Store the first ``count`` of the fp32 ``values`` in the pointer's dtype; see :func:`load_tile`."""
    if count == TILE_NUMEL:
        store(tile_ptr + offsets, values, None)
    else:
        store(tile_ptr + offsets, values, offsets < count)


def chunk_step(size: int, chunks: int) -> int:
    """Number of elements from one chunk to the next. It is a multiple of 16 also for a single chunk, so that kernels
    can rely on addresses that are multiples of 16 bytes, whatever the size."""
    return size if chunks > 1 else round_up(size, CHUNK_ALIGN)
