"""The generic kernels of element-wise quantisers: encoding, decoding and recoding.

A quantiser has a statistic and two maps, ``quantize(values, stats, dither, C) -> code`` and ``dequantize(code, stats,
C) -> value``. The kernels get these functions, and everything else that is known at compile time, in one object, ``Q``;
see :func:`.launches.kernel_constants`. The kernels themselves do everything that all quantisers share: error feedback,
random numbers, chunks, tails, bit packing, the status word and the merging of any number of payloads. They encode a
gradient or, for the owner of a shard, the merged decodings of payloads (``Q.merging``), which never reach memory.

A program works on a tile of ``Q.rows`` blocks of ``Q.block`` elements. Each block has its own statistics. With a
statistic of the whole unit (``Q.whole``), a block is only a row of a tile: a first kernel writes at most
``MAX_PARTIALS`` partial results per chunk. Every program that encodes reduces all of them if they are at most
``PARTIALS``, otherwise one program of a launch in between does. The number of partial results follows from the size
alone, so the result does not depend on the device. The encoding programs go through the unit backwards: its end, which
was read last, is still in the cache.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..bitpack import packed_slots, without_tail
from ..kernels.places import tile_of
from ..kernels.seeds import seed_of
from ..numeric import is_finite
from ..tiles import load_tile, remaining, store_tile
from .residuals import load_residual, store_residual
from .tiles import (
    STATUS,
    as_columns,
    combine,
    decoded_tile,
    finish,
    load_rows,
    merged_tile,
    padded,
    quantized_tile,
    reduce,
    reduce_tile,
    store_stats,
    tile_statistics,
)


@triton.jit(do_not_specialize=["num_partials", "num_sources", "blocks"])
def _partials_kernel(
    source_ptr,  # the gradient, or payloads
    residual_ptr,
    partials_ptr,  # fp32 [chunks, terms, num_partials]
    numel,
    chunk_numel,
    num_partials,
    num_sources,
    source_stride,
    blocks,
    codes_offset,
    codes_nbytes,
    scale,
    Q: tl.constexpr,
    place=None,
):
    """Reduce every ``num_partials``-th tile of a chunk, from the program's own on, to one partial result per term.

    A thread first combines its own elements, of all tiles. Only at the end do threads exchange their results.
    """
    index, chunk = tile_of(place)
    FOLDS: tl.constexpr = 2 if Q.has_residual or Q.merging else 4  # 16-byte loads of a thread in bf16
    WIDTH: tl.constexpr = Q.tile // FOLDS
    C: tl.constexpr = Q.C
    S: tl.constexpr = Q.statistic
    chunk_first = chunk * chunk_numel
    limit = tl.minimum(chunk_numel, numel - chunk_first)
    offsets = tl.arange(0, FOLDS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    totals = reduce_tile(tl.zeros((FOLDS, WIDTH), tl.float32), offsets, 0, S, Q, 0)
    tile = index
    while tile * Q.tile < limit:
        first = chunk_first + tile * Q.tile
        here = remaining(limit, tile * Q.tile, Q.tile)
        if Q.merging:
            merged = merged_tile(
                source_ptr, tile, here, num_sources, source_stride, blocks, codes_offset, codes_nbytes, scale, Q
            )  # fmt: skip
            values = tl.reshape(merged, (FOLDS, WIDTH))
        else:
            values = load_tile(source_ptr + first, offsets, here, Q.tile)
        if Q.has_residual:
            residual = load_residual(residual_ptr, first, offsets, chunk, chunk_numel, tile * Q.tile, here, Q)
            values = Q.accumulate(values, residual, C)
        totals = combine(totals, reduce_tile(values, offsets, here, S, Q, 0), Q)
        tile += num_partials
    for term in tl.static_range(len(S.kinds)):
        place = (chunk * len(S.kinds) + term) * num_partials + index
        tl.store(partials_ptr + place, reduce(totals[term], S, term, 0))


@triton.jit(do_not_specialize=["num_partials"])
def _combine_kernel(
    partials_ptr,  # fp32 [chunks, terms, num_partials]
    combined_ptr,  # fp32 [chunks, terms]
    num_partials,
    Q: tl.constexpr,
    place=None,
):
    """Reduce the partial results of a chunk to one result per term."""
    _, chunk = tile_of(place)
    S: tl.constexpr = Q.statistic
    MERGING: tl.constexpr = Q.merging
    slots = tl.arange(0, Q.partials_width)
    there = slots < num_partials
    for index in tl.static_range(len(S.kinds)):
        place = chunk * len(S.kinds) + index
        found = tl.load(partials_ptr + place * num_partials + slots, mask=there, other=0.0)
        tl.store(combined_ptr + place, reduce(padded(found, S, index, MERGING, there), S, index, 0))


@triton.constexpr_function
def _word_of(source, Q):
    """The type of the words into which codes are packed: as many codes as a thread loads elements with one access."""
    per_access = 4 if Q.merging or Q.has_residual else 128 // source.primitive_bitwidth
    width = per_access * Q.bits if 8 % Q.bits == 0 and Q.bits < 8 else 8
    return {16: tl.int16, 32: tl.int32}.get(width, tl.int8)


@triton.jit(do_not_specialize=["num_partials", "num_sources", "blocks", "seed"])
def _encode_kernel(
    source_ptr,  # the gradient, or payloads
    residual_ptr,
    payload_ptr,  # uint8 [chunks, payload_stride]
    partials_ptr,  # see _partials_kernel; with num_partials=1 see _combine_kernel
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
    seed: tl.int64,
    Q: tl.constexpr,
    place=None,
    added_ptr=None,
):
    """Encode a tile of a chunk."""
    WHOLE: tl.constexpr = Q.whole
    tile, chunk = tile_of(place, WHOLE)
    seed = seed_of(seed, added_ptr)
    C: tl.constexpr = Q.C
    chunk_first = chunk * chunk_numel
    tile_first = tile * Q.tile
    first = chunk_first + tile_first
    rows, columns = tl.arange(0, Q.rows), tl.arange(0, Q.block)
    offsets = rows[:, None] * Q.block + columns[None, :]
    limit = tl.minimum(chunk_numel, numel - chunk_first)
    here = remaining(limit, tile_first, Q.tile)
    if Q.merging:
        values = merged_tile(
            source_ptr, tile, here, num_sources, source_stride, blocks, codes_offset, codes_nbytes, scale, Q
        )  # fmt: skip
    else:
        values = load_rows(source_ptr + first, offsets, here, Q)
    if Q.has_residual:
        residual = load_residual(residual_ptr, first, offsets, chunk, chunk_numel, tile_first, here, Q)
        values = Q.accumulate(values, residual, C)

    payload_ptr += chunk * payload_stride
    columns_of_stats = ()
    if Q.num_stats > 0:
        if Q.whole:
            S: tl.constexpr = Q.statistic
            MERGING: tl.constexpr = Q.merging
            partials = ()
            # numbers instead of tiles of one element, whose layout the values would have to take on
            for index in tl.static_range(len(S.kinds)):
                place = chunk * len(S.kinds) + index
                if Q.partials_width > 1:
                    slots = tl.arange(0, Q.partials_width)
                    there = slots < num_partials
                    found = tl.load(partials_ptr + place * num_partials + slots, mask=there, other=0.0)
                    partials = partials + (reduce(padded(found, S, index, MERGING, there), S, index, 0),)
                else:
                    partials = partials + (tl.load(partials_ptr + place),)
            stats, finite = finish(partials, tl.maximum(limit, 1).to(tl.float32), S, Q)
            columns_of_stats = stats
        else:
            count = tl.minimum(tl.maximum(here - rows * Q.block, 1), Q.block).to(tl.float32)
            stats, finite = tile_statistics(values, offsets, here, count, Q)
            columns_of_stats = as_columns(stats)
            finite = finite[:, None]
    WORD: tl.constexpr = _word_of(source_ptr.dtype.element_ty, Q)
    WORD_BITS: tl.constexpr = WORD.primitive_bitwidth
    codes, packed = quantized_tile(values, columns_of_stats, seed, first, WORD_BITS, Q)
    if Q.num_stats > 0:  # the codes of a row fill whole words
        packed = tl.where(finite, packed, 0)
    slots, used = packed_slots(rows, Q.rows, Q.block, Q.bits, WORD_BITS)
    if here < Q.tile:
        packed = without_tail(packed, slots, here, Q.bits, WORD_BITS)
    slots += tile * (Q.tile * Q.bits // WORD_BITS)
    typed = (payload_ptr + codes_offset).to(tl.pointer_type(WORD))
    tl.store(typed + slots, packed.to(WORD), mask=used & (slots < codes_nbytes // (WORD_BITS // 8)))
    if Q.has_residual:
        # the old value is stored again where the new one is not finite: a mask that varies from element to element
        # would break the 16-byte stores up
        left = Q.keep(values, decoded_tile(codes, columns_of_stats, Q), C)
        left = tl.where(is_finite(left), left, residual)
        store_residual(residual_ptr, left, first, offsets, chunk, chunk_numel, tile_first, here, Q)
    # the small stores come last, when few registers are in use
    if tile == 0:
        words = tl.arange(0, 4)
        tl.store(payload_ptr.to(tl.pointer_type(tl.int32)) + words, tl.where(words == 0, STATUS, 0))
    if Q.num_stats > 0:
        store_stats(payload_ptr, stats, tile, here, blocks, stats_slots, Q)


@triton.jit(do_not_specialize=["blocks"])
def _decode_kernel(
    payload_ptr,
    out_ptr,
    numel,
    chunk_numel,
    num_sources,
    source_stride,
    chunk_stride,
    blocks,
    codes_offset,
    codes_nbytes,
    scale,
    Q: tl.constexpr,
    place=None,
):
    """Decode and merge a tile of a chunk."""
    tile, chunk = tile_of(place)
    tile_first = tile * Q.tile
    chunk_first = chunk * chunk_numel
    offsets = tl.arange(0, Q.rows)[:, None] * Q.block + tl.arange(0, Q.block)[None, :]
    here = remaining(tl.minimum(chunk_numel, numel - chunk_first), tile_first, Q.tile)
    payload_ptr += chunk * chunk_stride
    out_ptr += chunk_first + tile_first
    if here == Q.tile:
        _decode_tile(
            payload_ptr, out_ptr, offsets, tile, here, num_sources, source_stride, blocks, codes_offset, codes_nbytes,
            scale, Q, True
        )  # fmt: skip
    else:
        _decode_tile(
            payload_ptr, out_ptr, offsets, tile, here, num_sources, source_stride, blocks, codes_offset, codes_nbytes,
            scale, Q, False
        )  # fmt: skip


@triton.jit
def _decode_tile(
    payload_ptr,
    out_ptr,
    offsets,
    tile,
    here,
    num_sources,
    source_stride,
    blocks,
    codes_offset,
    codes_nbytes,
    scale,
    Q: tl.constexpr,
    IS_FULL: tl.constexpr,  # whether here == Q.tile: then nothing needs a mask
):
    RUN: tl.constexpr = 128 // out_ptr.dtype.element_ty.primitive_bitwidth  # 16 bytes
    total = merged_tile(
        payload_ptr, tile, here, num_sources, source_stride, blocks, codes_offset, codes_nbytes, scale, Q, RUN, IS_FULL
    )
    count = Q.tile if IS_FULL else here
    if Q.adds_to_out:
        total += load_tile(out_ptr, offsets, count, Q.tile)
    store_tile(out_ptr, offsets, total, count, Q.tile)
