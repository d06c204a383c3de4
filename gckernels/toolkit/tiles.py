"""Loads and stores of tiles; a tile is the run of ``TILE_NUMEL`` elements that one program of a kernel works on."""

from __future__ import annotations

import triton
import triton.language as tl

from ..compressor import CHUNK_ALIGN
from .numeric import store, to_fp32
from .payload import round_up


@triton.jit
def remaining(limit, tile_first, TILE_NUMEL: tl.constexpr):
    """Elements from ``tile_first`` to ``limit``, at least 0 and at most a tile's, as int32: what masks compare with."""
    return tl.maximum(tl.minimum(limit - tile_first, TILE_NUMEL), 0).to(tl.int32)


@triton.jit
def load_tile(tile_ptr, offsets, count, TILE_NUMEL: tl.constexpr):
    """``count`` elements and zeros behind them, as fp32.

    A full tile is loaded without a mask: an element count that 16 does not divide would otherwise break every 16-byte
    access up, not only those of the last tile.
    """
    if count == TILE_NUMEL:
        values = tl.load(tile_ptr + offsets)
    else:
        values = tl.load(tile_ptr + offsets, mask=offsets < count, other=0.0)
    return to_fp32(values)


@triton.jit
def store_tile(tile_ptr, offsets, values, count, TILE_NUMEL: tl.constexpr):
    """Store the first ``count`` of the fp32 ``values`` in the pointer's dtype; see :func:`load_tile`."""
    if count == TILE_NUMEL:
        store(tile_ptr + offsets, values, None)
    else:
        store(tile_ptr + offsets, values, offsets < count)


def chunk_step(size: int, chunks: int) -> int:
    """Elements from one chunk to the next; a multiple of 16 also for a single chunk, so that addresses are known to be
    multiples of 16 bytes whatever the size."""
    return size if chunks > 1 else round_up(size, CHUNK_ALIGN)
