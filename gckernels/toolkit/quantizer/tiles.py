"""What the kernels of ``kernels.py`` do with a tile: load and store it, its statistics, the merging of payloads.

A tile is ``[ROWS, BLOCK]`` elements, of which the first ``here`` are inside the chunk.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..bitpack import packed_slots, unpack_bits
from ..numeric import bf16_bits, bf16_value, is_finite, store, to_fp32


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


@triton.jit
def reduce(terms, KINDS: tl.constexpr, INDEX: tl.constexpr, valid, axis: tl.constexpr):
    """A tile's terms reduced along ``axis``; a NaN survives, which tl.max and tl.min would drop."""
    if KINDS[INDEX] == "sum":
        reduced = tl.sum(tl.where(valid, terms, 0.0), axis)
    else:
        # as integers in the order of the numbers, NaN at the end that wins
        bits = terms.to(tl.int32, bitcast=True)
        ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        if KINDS[INDEX] == "max":
            ordered = tl.where(terms == terms, ordered, 0x7FFFFFFF)
            reduced = tl.max(tl.where(valid, ordered, -0x7F800001), axis)  # -inf
        else:
            ordered = tl.where(terms == terms, ordered, -0x80000000)
            reduced = tl.min(tl.where(valid, ordered, 0x7F800000), axis)  # inf
        reduced = (reduced ^ ((reduced >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return reduced + 0.0  # never -0.0


@triton.jit
def reduce_all(terms, KINDS: tl.constexpr, valid, axis: tl.constexpr):
    partials = ()
    for index in tl.static_range(len(KINDS)):
        partials = partials + (reduce(terms[index], KINDS, index, valid, axis),)
    return partials


@triton.jit
def combine(a, b, KINDS: tl.constexpr):
    """Partial results of two tiles as one."""
    both = ()
    for index in tl.static_range(len(KINDS)):
        if KINDS[index] == "sum":
            both = both + (a[index] + b[index],)
        elif KINDS[index] == "max":  # NaN compares false, and is not equal to itself
            both = both + (tl.where((a[index] > b[index]) | (a[index] != a[index]), a[index], b[index]),)
        else:
            both = both + (tl.where((a[index] < b[index]) | (a[index] != a[index]), a[index], b[index]),)
    return both


@triton.jit
def finish(partials, count, FINISH: tl.constexpr, C: tl.constexpr, STAT_BF16: tl.constexpr):
    """The statistics as the payload holds them, and whether they are finite; all NaN when one is not."""
    found = FINISH(partials, count, C)
    finite = is_finite(found[0])
    for index in tl.static_range(1, len(found)):
        finite = finite & is_finite(found[index])
    stats = ()
    for index in tl.static_range(len(found)):
        stat = tl.where(finite, found[index], float("nan"))
        if STAT_BF16:
            stat = bf16_value(bf16_bits(stat))
        stats = stats + (stat,)
    return stats, finite


@triton.jit
def as_columns(stats):
    """``[ROWS]`` each to ``[ROWS, 1]``."""
    columns = ()
    for index in tl.static_range(len(stats)):
        columns = columns + (stats[index][:, None],)
    return columns


@triton.jit
def load_stats(
    payload_ptr,
    tile,
    here,
    blocks,
    NUM_STATS: tl.constexpr,
    STAT_BF16: tl.constexpr,
    STATS_OFFSET: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The statistics of each of a tile's rows, ``[ROWS]``; 0 for rows that hold no element."""
    rows = tl.arange(0, ROWS)
    typed = payload_ptr + STATS_OFFSET
    typed = typed.to(tl.pointer_type(tl.int16)) if STAT_BF16 else typed.to(tl.pointer_type(tl.float32))
    stats = ()
    for index in tl.static_range(NUM_STATS):
        if WHOLE:
            stat = tl.full((ROWS,), tl.load(typed + index), typed.dtype.element_ty)
        elif here == ROWS * BLOCK:
            stat = tl.load(typed + index * blocks + tile * ROWS + rows)
        else:
            stat = tl.load(typed + index * blocks + tile * ROWS + rows, mask=rows * BLOCK < here, other=0)
        if STAT_BF16:
            stats = stats + (bf16_value(stat.to(tl.int32) & 0xFFFF),)
        else:
            stats = stats + (stat,)
    return stats


@triton.jit
def store_stats(
    payload_ptr,
    stats,
    tile,
    here,
    blocks,
    slots,
    STAT_BF16: tl.constexpr,
    STATS_OFFSET: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A tile's statistics, and zeros for blocks without elements and behind the last (``slots``, padding included).

    For the whole unit the first tile writes everything: its rows hold the same statistic, and there are never more
    slots than a field's 16 bytes.
    """
    rows = tl.arange(0, ROWS)
    typed = payload_ptr + STATS_OFFSET
    typed = typed.to(tl.pointer_type(tl.int16)) if STAT_BF16 else typed.to(tl.pointer_type(tl.float32))
    for index in tl.static_range(len(stats)):
        places = tile * ROWS + rows
        filled = (rows == 0) & (here > 0) if WHOLE else rows * BLOCK < here
        stat = tl.where(filled, stats[index], 0.0)
        end = slots - index * blocks if index == len(stats) - 1 else blocks
        if WHOLE:
            end = tl.where(tile == 0, end, 0)
        if STAT_BF16:
            tl.store(typed + index * blocks + places, bf16_bits(stat).to(tl.int16), mask=places < end)
        else:
            tl.store(typed + index * blocks + places, stat, mask=places < end)


@triton.jit
def merged_tile(
    payload_ptr,  # of the first source
    tile,
    here,
    num_sources,
    source_stride,
    blocks,
    codes_offset,
    codes_nbytes,
    scale,
    STATUS: tl.constexpr,
    DEQUANTIZE: tl.constexpr,
    MERGE: tl.constexpr,
    C: tl.constexpr,
    NUM_STATS: tl.constexpr,
    STAT_BF16: tl.constexpr,
    STATS_OFFSET: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A tile of the merged decodings of all sources, fp32 ``[ROWS, BLOCK]``."""
    slots, used = packed_slots(tl.arange(0, ROWS), ROWS, BLOCK, C.bits)
    slots += tile * (ROWS * BLOCK * C.bits // 8)
    used = used & (slots < codes_nbytes)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for _ in range(num_sources):
        status = tl.load(payload_ptr.to(tl.pointer_type(tl.int32)))
        stats = load_stats(payload_ptr, tile, here, blocks, NUM_STATS, STAT_BF16, STATS_OFFSET, WHOLE, ROWS, BLOCK)
        codes = unpack_bits(tl.load(payload_ptr + codes_offset + slots, mask=used, other=0), ROWS, BLOCK, C.bits)
        values = DEQUANTIZE(codes, as_columns(stats), C)
        total += tl.where(status == STATUS, values, float("nan"))
        payload_ptr += source_stride
    return MERGE(total, scale, C)
