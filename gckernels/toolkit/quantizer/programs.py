"""What one program of the kernels of ``kernels.py`` and ``batch_kernels.py`` does, wherever it got its arguments
from: the partial results of a whole chunk's statistic, the encoding of a tile, the decoding of a tile."""

from __future__ import annotations

import triton
import triton.language as tl

from ..bitpack import pack_bits, packed_slots
from ..numeric import is_finite
from ..random import uniform_tile
from .tiles import (
    as_columns,
    combine,
    finish,
    load_tile,
    merged_tile,
    reduce,
    reduce_all,
    remaining,
    store_stats,
    store_tile,
)


@triton.jit
def partials_program(
    source_ptr,  # the gradient, or payloads
    residual_ptr,
    partials_ptr,  # fp32 [chunks, terms, num_partials]
    index,  # of the partial result
    chunk,
    numel,
    chunk_numel,
    num_partials,
    num_sources,
    source_stride,
    blocks,
    codes_offset,
    codes_nbytes,
    scale,
    TERMS: tl.constexpr,
    KINDS: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    MERGING: tl.constexpr,
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
    """Reduce every ``num_partials``-th tile of a chunk, from tile ``index`` on."""
    chunk_first = chunk * chunk_numel
    limit = tl.minimum(chunk_numel, numel - chunk_first)
    rows = tl.arange(0, ROWS)
    offsets = rows[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    totals = reduce_all(TERMS(tl.zeros((ROWS, BLOCK), tl.float32), C), KINDS, offsets < 0, 1)
    tile = index
    while tile * (ROWS * BLOCK) < limit:
        first = chunk_first + tile * (ROWS * BLOCK)
        here = remaining(limit, tile * (ROWS * BLOCK), ROWS * BLOCK)
        if MERGING:
            values = merged_tile(
                source_ptr, tile, here, num_sources, source_stride, blocks, codes_offset, codes_nbytes, scale,
                STATUS, DEQUANTIZE, MERGE, C, NUM_STATS, STAT_BF16, STATS_OFFSET, WHOLE, ROWS, BLOCK
            )  # fmt: skip
        else:
            values = load_tile(source_ptr + first, offsets, here, ROWS * BLOCK)
        if HAS_RESIDUAL:
            values = ACCUMULATE(values, load_tile(residual_ptr + first, offsets, here, ROWS * BLOCK), C)
        partials = reduce_all(TERMS(values, C), KINDS, offsets < here, 1)
        totals = combine(totals, partials, KINDS)
        tile += num_partials
    for term in tl.static_range(len(KINDS)):
        place = (chunk * len(KINDS) + term) * num_partials + index
        tl.store(
            partials_ptr + place + tl.arange(0, 1),
            reduce(totals[term][None, :], KINDS, term, rows[None, :] >= 0, 1),
        )


@triton.jit
def encode_program(
    source_ptr,  # the gradient, or payloads
    residual_ptr,
    payload_ptr,  # uint8 [chunks, payload_stride]
    partials_ptr,  # as above
    tile,
    chunk,
    numel,
    chunk_numel,
    payload_stride,
    num_partials,
    num_sources,
    source_stride,
    blocks,
    stats_slots,  # padding included
    codes_offset,
    codes_nbytes,  # padding included
    scale,
    seed,
    KINDS: tl.constexpr,
    TERMS: tl.constexpr,
    FINISH: tl.constexpr,
    PARTIALS: tl.constexpr,  # at least num_partials
    QUANTIZE: tl.constexpr,
    RANDOM_BITS: tl.constexpr,  # 0 for none
    ACCUMULATE: tl.constexpr,
    KEEP: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    MERGING: tl.constexpr,
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
    """Encode a tile of a chunk, ``tile`` and ``chunk`` int64."""
    chunk_first = chunk * chunk_numel
    tile_first = tile * (ROWS * BLOCK)
    first = chunk_first + tile_first
    rows, columns = tl.arange(0, ROWS), tl.arange(0, BLOCK)
    offsets = rows[:, None] * BLOCK + columns[None, :]
    limit = tl.minimum(chunk_numel, numel - chunk_first)
    here = remaining(limit, tile_first, ROWS * BLOCK)
    if MERGING:
        values = merged_tile(
            source_ptr, tile, here, num_sources, source_stride, blocks, codes_offset, codes_nbytes, scale,
            STATUS, DEQUANTIZE, MERGE, C, NUM_STATS, STAT_BF16, STATS_OFFSET, WHOLE, ROWS, BLOCK
        )  # fmt: skip
    else:
        values = load_tile(source_ptr + first, offsets, here, ROWS * BLOCK)
    if HAS_RESIDUAL:
        residual = load_tile(residual_ptr + first, offsets, here, ROWS * BLOCK)
        values = ACCUMULATE(values, residual, C)

    payload_ptr += chunk * payload_stride
    columns_of_stats = ()
    usable = offsets < here
    if NUM_STATS > 0:
        if WHOLE:
            partials = ()
            slots = tl.arange(0, PARTIALS)[None, :]
            there = slots < num_partials
            for index in tl.static_range(len(KINDS)):
                place = (chunk * len(KINDS) + index) * num_partials
                found = tl.load(partials_ptr + place + slots, mask=there, other=0.0)
                partials = partials + (reduce(found, KINDS, index, there, 1),)
            count = tl.maximum(limit, 1).to(tl.float32) + tl.zeros((1,), tl.float32)
        else:
            partials = reduce_all(TERMS(values, C), KINDS, usable, 1)
            count = tl.minimum(tl.maximum(here - rows * BLOCK, 1), BLOCK).to(tl.float32)
        stats, finite = finish(partials, count, FINISH, C, STAT_BF16)
        columns_of_stats = as_columns(stats)
        usable = usable & finite[:, None]
    u = uniform_tile(seed, first, ROWS, BLOCK, RANDOM_BITS) if RANDOM_BITS > 0 else 0.0
    codes = tl.where(usable, QUANTIZE(values, columns_of_stats, u, C), 0)
    slots, used = packed_slots(rows, ROWS, BLOCK, C.bits)
    slots += tile * (ROWS * BLOCK * C.bits // 8)
    tl.store(
        payload_ptr + codes_offset + slots, pack_bits(codes, ROWS, BLOCK, C.bits), mask=used & (slots < codes_nbytes)
    )
    if HAS_RESIDUAL:
        # the old value is stored again where the new one is not finite: a mask that varies from element to element
        # would break the 16-byte stores up
        left = KEEP(values, DEQUANTIZE(codes, columns_of_stats, C), C)
        store_tile(residual_ptr + first, offsets, tl.where(is_finite(left), left, residual), here, ROWS * BLOCK)
    # the small stores last, when few registers are in use
    if tile == 0:
        words = tl.arange(0, 4)
        tl.store(payload_ptr.to(tl.pointer_type(tl.int32)) + words, tl.where(words == 0, STATUS, 0))
    if NUM_STATS > 0:
        store_stats(payload_ptr, stats, tile, here, blocks, stats_slots, STAT_BF16, STATS_OFFSET, WHOLE, ROWS, BLOCK)


@triton.jit
def decode_program(
    payload_ptr,
    out_ptr,
    tile,
    chunk,
    numel,
    chunk_numel,
    num_sources,
    source_stride,
    chunk_stride,
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
    ACCUMULATE: tl.constexpr,
):
    """Decode and merge a tile of a chunk, ``tile`` and ``chunk`` int64."""
    tile_first = tile * (ROWS * BLOCK)
    chunk_first = chunk * chunk_numel
    offsets = tl.arange(0, ROWS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    here = remaining(tl.minimum(chunk_numel, numel - chunk_first), tile_first, ROWS * BLOCK)
    payload_ptr += chunk * chunk_stride
    out_ptr += chunk_first + tile_first
    total = merged_tile(
        payload_ptr, tile, here, num_sources, source_stride, blocks, codes_offset, codes_nbytes, scale,
        STATUS, DEQUANTIZE, MERGE, C, NUM_STATS, STAT_BF16, STATS_OFFSET, WHOLE, ROWS, BLOCK
    )  # fmt: skip
    if ACCUMULATE:
        total += load_tile(out_ptr, offsets, here, ROWS * BLOCK)
    store_tile(out_ptr, offsets, total, here, ROWS * BLOCK)
