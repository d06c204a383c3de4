"""Functions that kernels call for a tile: its statistics, and the merging of payloads.

A tile is ``[rows, block]`` elements; the first ``here`` are inside the chunk. ``Q`` holds the compile-time
arguments, see :func:`.launches.kernel_constants`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..bitpack import as_numbers, load_codes, load_numbers, pack_bits
from ..numeric import at_least, at_most, bf16_bits, bf16_value, is_finite, max_along, min_along
from ..payload import HEADER_NBYTES, STATUS_OK
from ..random import dither_tile
from ..tiles import load_tile

STATUS = tl.constexpr(STATUS_OK)
_STATS_OFFSET = tl.constexpr(HEADER_NBYTES)


@triton.jit
def load_rows(tile_ptr, offsets, here, Q: tl.constexpr):
    """The first ``here`` elements of a tile as fp32 ``[rows, block]``, with zeros behind them.

    If rows are cut into parts, a thread has an access of 16 bytes in each part of a row, and few rows. If all its
    accesses were in different rows, more threads would share a row, and each would compute the statistics of more rows.
    """
    if Q.parts == 1:
        return load_tile(tile_ptr, offsets, here, Q.tile)
    else:
        COLUMNS: tl.constexpr = Q.block // Q.parts
        parts, rows = tl.arange(0, Q.parts)[:, None, None], tl.arange(0, Q.rows)[None, :, None]
        parted = rows * Q.block + parts * COLUMNS + tl.arange(0, COLUMNS)[None, None, :]
        values = load_tile(tile_ptr, parted, here, Q.tile)
        return tl.reshape(tl.permute(values, (1, 0, 2)), (Q.rows, Q.block))


@triton.jit
def reduce(terms, S: tl.constexpr, INDEX: tl.constexpr, axis: tl.constexpr):
    """Term ``INDEX`` of the statistic ``S``, reduced along ``axis``. A NaN survives."""
    KIND: tl.constexpr = S.kinds[INDEX]
    if KIND == "sum":
        reduced = tl.sum(terms, axis)
    elif KIND == "min":
        reduced = min_along(terms, axis)
    else:
        reduced = max_along(terms, axis)
    return reduced + 0.0  # never -0.0


@triton.jit
def padded(terms, S: tl.constexpr, INDEX: tl.constexpr, MERGING: tl.constexpr, valid):
    """Term ``INDEX`` where ``valid``, elsewhere what does not change its reduction."""
    KIND: tl.constexpr = S.kinds[INDEX]
    if KIND == "largest" and not MERGING:  # a missing value is 0, which changes nothing
        return terms
    elif KIND == "max":
        return tl.where(valid, terms, float("-inf"))
    elif KIND == "min":
        return tl.where(valid, terms, float("inf"))
    else:
        return tl.where(valid, terms, 0.0)


@triton.jit
def reduce_tile(values, offsets, here, S: tl.constexpr, Q: tl.constexpr, axis: tl.constexpr):
    """The terms of the first ``here`` of a tile's values, reduced along an axis; a full tile needs no masks.

    The branches end with what is reduced: if they ended with the terms, each of these would be copied, masked or not.
    """
    C: tl.constexpr = Q.C  # as an argument of its own it would be no constant with Triton 3.6
    terms = S.terms(values, C)
    if not S.pads:
        partials = _reduce_terms(terms, None, S, Q, axis)
    elif here < Q.tile:
        partials = _reduce_terms(terms, offsets < here, S, Q, axis)
    else:
        partials = _reduce_terms(terms, None, S, Q, axis)
    return partials


@triton.jit
def _reduce_terms(terms, valid, S: tl.constexpr, Q: tl.constexpr, axis: tl.constexpr):
    MERGING: tl.constexpr = Q.merging
    partials = ()
    for index in tl.static_range(len(S.kinds)):
        term = terms[index]
        if valid is not None:
            term = padded(term, S, index, MERGING, valid)
        partials = partials + (reduce(term, S, index, axis),)
    return partials


@triton.jit
def combine(a, b, Q: tl.constexpr):
    """The combined partial results of two tiles."""
    S: tl.constexpr = Q.statistic
    both = ()
    for index in tl.static_range(len(S.kinds)):
        if S.kinds[index] == "sum":
            both = both + (a[index] + b[index],)
        elif S.kinds[index] == "min":
            both = both + (at_most(a[index], b[index]),)
        else:
            both = both + (at_least(a[index], b[index]),)
    return both


@triton.jit
def finish(partials, count, S: tl.constexpr, Q: tl.constexpr):
    """The statistics as the payload holds them, all NaN if one is not finite; and whether they are finite."""
    C: tl.constexpr = Q.C
    found = S.finish(partials, count, C)
    finite = is_finite(found[0])
    for index in tl.static_range(1, len(found)):
        finite = finite & is_finite(found[index])
    stats = ()
    for index in tl.static_range(len(found)):
        stat = tl.where(finite, found[index], float("nan"))
        if Q.stats_bf16:
            stat = bf16_value(bf16_bits(stat))
        stats = stats + (stat,)
    return stats, finite


@triton.jit
def tile_statistics(values, offsets, here, count, Q: tl.constexpr):
    """:func:`finish` of the rows of a tile: by the shortcut, if there is one and it holds for all rows."""
    C: tl.constexpr = Q.C
    S: tl.constexpr = Q.statistic
    if Q.shortcut is None:
        stats, finite = finish(reduce_tile(values, offsets, here, S, Q, 1), count, S, Q)
    else:
        QUICK: tl.constexpr = Q.shortcut
        partials = reduce_tile(values, offsets, here, QUICK, Q, 1)
        stats, finite = finish(partials, count, QUICK, Q)
        if tl.min(QUICK.holds(partials, C).to(tl.int32), 0) == 0:
            stats, finite = finish(reduce_tile(values, offsets, here, S, Q, 1), count, S, Q)
    return stats, finite


@triton.jit
def as_columns(stats):
    """The statistics ``[rows]`` as columns ``[rows, 1]``."""
    columns = ()
    for index in tl.static_range(len(stats)):
        columns = columns + (stats[index][:, None],)
    return columns


@triton.jit
def quantized_tile(values, stats, seed, first, WORD_BITS: tl.constexpr, Q: tl.constexpr):
    """The codes of a tile, and the words that they fill. The tile's first element is number ``first`` of the unit."""
    if not Q.random:
        codes, packed = _codes_of(values, stats, 0.0, WORD_BITS, Q)
    elif Q.surety is None:
        codes, packed = _codes_of(values, stats, dither_tile(seed, first, Q.rows, Q.block, Q.dither_base), WORD_BITS, Q)
    else:
        C: tl.constexpr = Q.C
        if tl.min(Q.surety(values, C)) == 0.0:
            codes, packed = _codes_of(
                values, stats, dither_tile(seed, first, Q.rows, Q.block, Q.dither_base), WORD_BITS, Q
            )
        else:
            codes, packed = _codes_of(values, stats, Q.dither_base * 1.0, WORD_BITS, Q)
    return codes, packed


@triton.jit
def _codes_of(values, stats, dither, WORD_BITS: tl.constexpr, Q: tl.constexpr):
    C: tl.constexpr = Q.C
    codes = Q.quantize(values, stats, dither, C)
    return codes, pack_bits(codes, Q.rows, Q.block, Q.bits, WORD_BITS)


@triton.jit
def load_stats(payload_ptr, tile, here, blocks, failed, Q: tl.constexpr):
    """The statistics of a tile's rows, ``[rows]`` each, 0 for rows without elements; or numbers, of the whole chunk.

    ``failed`` is added to them: 0, or NaN for a payload whose elements all decode to NaN.
    """
    ROWS: tl.constexpr = Q.rows
    BLOCK: tl.constexpr = Q.block
    rows = tl.arange(0, ROWS)
    typed = payload_ptr + _STATS_OFFSET
    typed = typed.to(tl.pointer_type(tl.int16)) if Q.stats_bf16 else typed.to(tl.pointer_type(tl.float32))
    stats = ()
    NUM_STATS: tl.constexpr = Q.num_stats
    for index in tl.static_range(NUM_STATS):
        if Q.whole:
            stat = tl.load(typed + index)
        elif here == Q.tile:
            stat = tl.load(typed + index * blocks + tile * ROWS + rows)
        else:
            stat = tl.load(typed + index * blocks + tile * ROWS + rows, mask=rows * BLOCK < here, other=0)
        if Q.stats_bf16:
            stat = bf16_value(stat.to(tl.int32) & 0xFFFF)
        stats = stats + (stat + failed,)
    return stats


@triton.jit
def store_stats(payload_ptr, stats, tile, here, blocks, slots, Q: tl.constexpr):
    """Store a tile's statistics, and zeros for blocks without elements and for the padding behind the last block.

    ``slots`` is the number of statistics that fit the field, padding included. Statistics of the whole unit are stored
    by the first tile alone: the field is then never longer than 16 bytes.
    """
    rows = tl.arange(0, Q.rows)
    typed = payload_ptr + _STATS_OFFSET
    typed = typed.to(tl.pointer_type(tl.int16)) if Q.stats_bf16 else typed.to(tl.pointer_type(tl.float32))
    for index in tl.static_range(len(stats)):
        places = tile * Q.rows + rows
        filled = (rows == 0) & (here > 0) if Q.whole else rows * Q.block < here
        stat = tl.where(filled, stats[index], 0.0)
        end = slots - index * blocks if index == len(stats) - 1 else blocks
        if Q.whole:
            end = tl.where(tile == 0, end, 0)
        if Q.stats_bf16:
            tl.store(typed + index * blocks + places, bf16_bits(stat).to(tl.int16), mask=places < end)
        else:
            tl.store(typed + index * blocks + places, stat, mask=places < end)


@triton.jit
def decoded_tile(codes, stats, Q: tl.constexpr):
    """The values of codes, int32, of a tile."""
    C: tl.constexpr = Q.C
    if Q.numbers is None:
        values = Q.dequantize(codes, stats, C)
    else:
        values = Q.dequantize(as_numbers(codes, Q.bits, Q.numbers), stats, C)
    return values


@triton.jit
def merged_tile(
    payload_ptr,  # the first source
    tile,
    here,
    num_sources,
    source_stride,
    blocks,
    codes_offset,
    codes_nbytes,
    scale,
    Q: tl.constexpr,
    RUN: tl.constexpr = 4,  # elements that a thread will access at a time: 4 or 8
    IS_FULL: tl.constexpr = False,  # whether all elements are known to be inside
):
    """The merged decodings of all sources for one tile, fp32 ``[rows, block]``; any numbers behind the last element."""
    ROWS: tl.constexpr = Q.rows
    BLOCK: tl.constexpr = Q.block
    C: tl.constexpr = Q.C
    first = tile * (Q.tile * Q.bits // 8)  # byte
    nbytes = tl.minimum(codes_nbytes - first, Q.tile).to(tl.int32)  # or more than the tile has
    total, failures = tl.zeros((ROWS, BLOCK), tl.float32), tl.full((), 0.0, tl.float32)
    for _ in range(num_sources):
        status = tl.load(payload_ptr.to(tl.pointer_type(tl.int32)))
        failed = tl.where(status == STATUS, 0.0, float("nan"))
        failures += failed
        stats = load_stats(payload_ptr, tile, here, blocks, failed, Q)
        codes_ptr = payload_ptr + codes_offset + first
        if Q.numbers is None:
            codes = load_codes(codes_ptr, nbytes, ROWS, BLOCK, Q.bits, RUN, IS_FULL)
        else:
            codes = load_numbers(codes_ptr, nbytes, ROWS, BLOCK, Q.bits, RUN, IS_FULL, Q.numbers)
        if not Q.whole:
            stats = as_columns(stats)
        total += Q.dequantize(codes, stats, C)
        payload_ptr += source_stride
    if Q.num_stats == 0:  # otherwise the statistics of a source that has failed are NaN
        total += failures
    return Q.merge(total, scale, C)
