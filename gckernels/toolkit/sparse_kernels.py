"""The kernels that encode for :mod:`~gckernels.toolkit.sparse`: count digits, count tiles, place tiles, emit entries.

The k-th largest key is found digit by digit: a kernel counts the values of a digit among the keys that begin with the
digits found before, and every program of the next kernel finds the digit from these 2048 counts by itself. Then the
entries of every tile are counted, one program per chunk says where each tile's entries go, and a last kernel writes
entries and residual. Counters are the only thing that is added to atomically: integers, whose order does not show.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from .launch import launch
from .map_kernels import chunk_step
from .map_tiles import load_tile, remaining, store_tile
from .numeric import bf16_bits, bf16_value, is_finite, to_fp32
from .payload import STATUS_OK
from .sparse_keys import LARGEST_FINITE, SAMPLE_STRIDE, SMALLEST_SAMPLE

if TYPE_CHECKING:
    from .sparse import Sparsifier

TILE, NUM_WARPS = 4096, 8
MAX_PROGRAMS = 512  # that count, per launch: each has a share in a constant effort
SMALLEST_SHARE = 4  # tiles
PLACED_TILE = 1024  # tiles that are given their places at once
_SMALLEST_SAMPLE, _SAMPLE_STRIDE = tl.constexpr(SMALLEST_SAMPLE), tl.constexpr(SAMPLE_STRIDE)
_LARGEST_FINITE = tl.constexpr(LARGEST_FINITE)
_BINS = tl.constexpr(2048)


@triton.jit
def _keys(values):
    return values.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _load_values(grad_ptr, residual_ptr, offsets, here, HAS_RESIDUAL: tl.constexpr, TILE: tl.constexpr):
    values = load_tile(grad_ptr, offsets, here, TILE)
    if HAS_RESIDUAL:
        values += load_tile(residual_ptr, offsets, here, TILE)
    return values


@triton.jit
def _sample_size(numel):
    """``(elements sampled, of how many in a row one)``, int64; see ``sample_positions``."""
    stride = tl.maximum(tl.minimum(numel // _SMALLEST_SAMPLE, _SAMPLE_STRIDE), 1)
    return numel // stride, stride


@triton.jit
def _rank(numel, k, SAMPLED: tl.constexpr):
    """The rank that is looked for, int32."""
    if SAMPLED:
        size, _ = _sample_size(numel)
        whole = tl.maximum(numel, 1)
        return ((size * tl.minimum(k, numel) + whole - 1) // whole).to(tl.int32)
    else:
        return k.to(tl.int32)


@triton.jit
def _prefix(counts_ptr, rank, DIGITS: tl.constexpr):
    """The first ``DIGITS`` digits of the key of that rank, from counts ``[digits, 2048]``; 0 if there are too few."""
    bins = tl.arange(0, _BINS)
    prefix = tl.full((), 0, tl.int32)
    for digit in tl.static_range(DIGITS):
        counts = tl.load(counts_ptr + digit * _BINS + bins)
        reach = tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts  # keys of this digit or a larger one
        found = tl.maximum(tl.sum((reach >= rank).to(tl.int32), 0) - 1, 0)
        rank -= tl.sum(tl.where(bins > found, counts, 0), 0)
        prefix = (prefix << (11 if digit == 0 else 10)) | found
    return prefix


@triton.jit(do_not_specialize=["seed", "k"])
def _digit_kernel(
    grad_ptr,
    residual_ptr,
    counts_ptr,  # int32 [chunks, 3, 2048], zero at first
    numel,
    chunk_numel,
    k,
    seed: tl.int64,
    DIGIT: tl.constexpr,
    SAMPLED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    TILE: tl.constexpr,
):
    chunk = tl.program_id(1).to(tl.int64)
    chunk_first = chunk * chunk_numel
    limit = tl.maximum(tl.minimum(chunk_numel, numel - chunk_first), 0)
    counts_ptr += chunk * (3 * _BINS)
    SHIFT: tl.constexpr = 20 - 10 * DIGIT
    if DIGIT > 0:
        prefix = _prefix(counts_ptr, _rank(limit, k, SAMPLED), DIGIT)
    BINS: tl.constexpr = 2048 if DIGIT == 0 else 1024  # each of them costs registers
    offsets, bins = tl.arange(0, TILE), tl.arange(0, BINS)
    totals = tl.zeros((BINS,), tl.int32)
    size = limit
    if SAMPLED:
        size, stride = _sample_size(limit)
    tile = tl.program_id(0).to(tl.int64)
    while tile * TILE < size:
        here = remaining(size, tile * TILE, TILE)
        if SAMPLED:
            starts = (tile * TILE + offsets) * stride
            counter = chunk_first + starts
            zero = tl.zeros((TILE,), tl.uint32)
            word, _, _, _ = tl.philox(seed, counter.to(tl.uint32), (counter >> 32).to(tl.uint32), zero, zero)
            places = chunk_first + starts + ((word.to(tl.int64) & 0xFFFFFFFF) * stride >> 32)
            values = to_fp32(tl.load(grad_ptr + places, mask=offsets < here, other=0.0))
            if HAS_RESIDUAL:
                values += tl.load(residual_ptr + places, mask=offsets < here, other=0.0)
        else:
            first = chunk_first + tile * TILE
            values = _load_values(grad_ptr + first, residual_ptr + first, offsets, here, HAS_RESIDUAL, TILE)
        keys = _keys(values)
        counted = offsets < here
        if DIGIT == 0:
            digits = keys >> SHIFT
        else:
            digits = (keys >> SHIFT) & 1023
            counted = counted & ((keys >> (SHIFT + 10)) == prefix)
        totals += tl.histogram(digits, BINS, mask=counted)
        tile += tl.num_programs(0)
    tl.atomic_add(counts_ptr + DIGIT * _BINS + bins, totals, mask=totals > 0, sem="relaxed")


@triton.jit(do_not_specialize=["k", "lowest"])
def _count_kernel(
    grad_ptr,
    residual_ptr,
    counts_ptr,
    bounds_ptr,  # int32 [chunks, 4]: lower, upper, and what _place_kernel adds
    entries_ptr,  # int32 [chunks, 2, tiles]: above the bounds, between them
    numel,
    chunk_numel,
    tiles,
    k,
    lowest,
    DIGITS: tl.constexpr,
    SAMPLED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    TILE: tl.constexpr,
):
    chunk = tl.program_id(1).to(tl.int64)
    chunk_first = chunk * chunk_numel
    limit = tl.maximum(tl.minimum(chunk_numel, numel - chunk_first), 0)
    if DIGITS == 0:
        lower, upper = lowest.to(tl.int32), tl.full((), _LARGEST_FINITE, tl.int32)
    else:
        SHIFT: tl.constexpr = 30 - 10 * DIGITS
        prefix = _prefix(counts_ptr + chunk * (3 * _BINS), _rank(limit, k, SAMPLED), DIGITS)
        lower = tl.maximum(prefix << SHIFT, 1)
        upper = tl.full((), _LARGEST_FINITE, tl.int32) if SAMPLED else (prefix << SHIFT) + (2**SHIFT - 1)
    if tl.program_id(0) == 0:
        tl.store(bounds_ptr + chunk * 4, lower)
        tl.store(bounds_ptr + chunk * 4 + 1, upper)
    offsets = tl.arange(0, TILE)
    entries_ptr += chunk * 2 * tiles
    tile = tl.program_id(0).to(tl.int64)
    while tile < tiles:
        first = chunk_first + tile * TILE
        here = remaining(limit, tile * TILE, TILE)
        keys = _keys(_load_values(grad_ptr + first, residual_ptr + first, offsets, here, HAS_RESIDUAL, TILE))
        above = keys > upper
        both = tl.sum(above.to(tl.int32) + ((keys >= lower) & ~above).to(tl.int32) * 65536, 0)
        tl.store(entries_ptr + tile, both & 0xFFFF)
        tl.store(entries_ptr + tiles + tile, both >> 16)
        tile += tl.num_programs(0)


@triton.jit(do_not_specialize=["k"])
def _place_kernel(
    bounds_ptr,
    entries_ptr,  # becomes what there is before each tile
    payload_ptr,  # uint8 [chunks, payload_stride]
    payload_stride,
    tiles,
    k,
    STATUS: tl.constexpr,
    TILE: tl.constexpr,
):
    chunk = tl.program_id(0).to(tl.int64)
    entries_ptr += chunk * 2 * tiles
    offsets = tl.arange(0, TILE)
    above, between = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    first = tl.full((), 0, tl.int64)
    while first < tiles:
        inside = offsets < tiles - first
        of_above = tl.load(entries_ptr + first + offsets, mask=inside, other=0)
        of_between = tl.load(entries_ptr + tiles + first + offsets, mask=inside, other=0)
        tl.store(entries_ptr + first + offsets, above + tl.cumsum(of_above, 0) - of_above, mask=inside)
        before = between + tl.cumsum(of_between, 0) - of_between
        tl.store(entries_ptr + tiles + first + offsets, before, mask=inside)
        above += tl.sum(of_above, 0)
        between += tl.sum(of_between, 0)
        first += TILE
    room = tl.maximum(k - above, 0).to(tl.int32)
    count = tl.minimum(above, k).to(tl.int32) + tl.minimum(between, room)
    tl.store(bounds_ptr + chunk * 4 + 2, room)
    tl.store(bounds_ptr + chunk * 4 + 3, count)
    words = tl.arange(0, 8)  # header and count
    word = tl.where(words == 0, STATUS, tl.where(words == 4, count, 0))
    tl.store((payload_ptr + chunk * payload_stride).to(tl.pointer_type(tl.int32)) + words, word)


@triton.jit(do_not_specialize=["k"])
def _emit_kernel(
    grad_ptr,
    residual_ptr,
    bounds_ptr,
    entries_ptr,
    payload_ptr,
    numel,
    chunk_numel,
    payload_stride,
    tiles,
    k,
    index_slots,  # padding included
    value_slots,
    values_offset,
    INDICES_OFFSET: tl.constexpr,
    BF16: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    TILE: tl.constexpr,
):
    tile = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1).to(tl.int64)
    chunk_first = chunk * chunk_numel
    first = chunk_first + tile * TILE
    here = remaining(tl.minimum(chunk_numel, numel - chunk_first), tile * TILE, TILE)
    offsets = tl.arange(0, TILE)
    values = load_tile(grad_ptr + first, offsets, here, TILE)
    if HAS_RESIDUAL:
        old = load_tile(residual_ptr + first, offsets, here, TILE)
        values += old
    lower, upper = tl.load(bounds_ptr + chunk * 4), tl.load(bounds_ptr + chunk * 4 + 1)
    room, count = tl.load(bounds_ptr + chunk * 4 + 2), tl.load(bounds_ptr + chunk * 4 + 3)
    keys = _keys(values)
    above = keys > upper  # not behind the last element, where the keys are 0
    between = (keys >= lower) & ~above
    ranks = tl.cumsum(above.to(tl.int32) + between.to(tl.int32) * 65536, 0)
    of_above = (ranks & 0xFFFF) + tl.load(entries_ptr + chunk * 2 * tiles + tile)
    of_between = (ranks >> 16) + tl.load(entries_ptr + (chunk * 2 + 1) * tiles + tile)
    sent = (above & (of_above <= k)) | (between & (of_between <= room))
    places = of_above + tl.minimum(of_between, room) - 1

    payload_ptr += chunk * payload_stride
    indices_ptr = (payload_ptr + INDICES_OFFSET).to(tl.pointer_type(tl.int32))
    bits = values.to(tl.int32, bitcast=True)
    if BF16:
        stored = bf16_bits(values)
        decoded = bf16_value(stored)
        stored = stored.to(tl.int16)
        values_ptr = (payload_ptr + values_offset).to(tl.pointer_type(tl.int16))
    else:
        stored = tl.where(values != values, 0x7FC00000, bits)
        decoded = values
        values_ptr = (payload_ptr + values_offset).to(tl.pointer_type(tl.int32))
    tl.store(indices_ptr + places, (tile * TILE + offsets).to(tl.int32), mask=sent)
    tl.store(values_ptr + places, stored, mask=sent)
    if HAS_RESIDUAL:
        left = tl.where(sent, values - decoded, values)
        store_tile(residual_ptr + first, offsets, tl.where(is_finite(left), left, old), here, TILE)
    # what is behind the last entry
    slots = tile * TILE + offsets
    if tile * TILE < value_slots:
        nothing = tl.zeros((TILE,), tl.int32)
        tl.store(indices_ptr + slots, nothing, mask=(slots >= count) & (slots < index_slots))
        tl.store(values_ptr + slots, nothing.to(stored.dtype), mask=(slots >= count) & (slots < value_slots))


# -------------------------------------------------------------------- launchers


def encode(compressor: Sparsifier, grad, residual, payload, size: int, seed: int) -> None:
    """Launch the encoding of ``grad`` into ``payload [chunks, nbytes]``, each chunk laid out for ``size`` elements."""
    numel, chunks, device = grad.numel(), payload.shape[0], grad.device
    layout, k = compressor.layout(size), compressor.capacity(size)
    indices, values = layout["indices"], layout["values"]
    index_slots, value_slots = indices.nbytes // 4, values.nbytes // values.dtype.itemsize
    tiles = max(1, triton.cdiv(max(size, index_slots, value_slots), TILE))
    step = chunk_step(size, chunks)
    source = grad, grad if residual is None else residual
    counting = (min(triton.cdiv(tiles, SMALLEST_SHARE), max(1, MAX_PROGRAMS // chunks)), chunks)
    common = {"HAS_RESIDUAL": residual is not None, "TILE": TILE, "num_warps": NUM_WARPS}
    digits, sampled = compressor.digits, compressor.sampled
    counts = torch.zeros(chunks if digits else 0, 3, 2048, dtype=torch.int32, device=device)
    # a sample is read one by one, which takes registers
    digit_tile, read = (TILE // 2, size // SAMPLE_STRIDE) if sampled else (TILE, size)
    reading = (max(1, min(triton.cdiv(read, digit_tile * SMALLEST_SHARE), counting[0])), chunks)
    for digit in range(digits):
        launch(
            _digit_kernel,
            reading,
            *(*source, counts, numel, step, k, seed),
            DIGIT=digit,
            SAMPLED=sampled,
            **common | {"TILE": digit_tile},
        )
    bounds = torch.empty(chunks, 4, dtype=torch.int32, device=device)
    entries = torch.empty(chunks, 2, tiles, dtype=torch.int32, device=device)
    lowest = 0 if digits else compressor.lowest
    launch(
        _count_kernel,
        counting,
        *(*source, counts if digits else bounds, bounds, entries, numel, step, tiles, k, lowest),
        DIGITS=digits,
        SAMPLED=sampled,
        **common,
    )
    launch(
        _place_kernel,
        (chunks,),
        *(bounds, entries, payload, payload.stride(0), tiles, k),
        STATUS=STATUS_OK,
        TILE=PLACED_TILE,
    )
    launch(
        _emit_kernel,
        (tiles, chunks),
        *(*source, bounds, entries, payload, numel, step, payload.stride(0), tiles, k, index_slots, value_slots),
        values.offset,
        INDICES_OFFSET=indices.offset,
        BF16=values.dtype == torch.bfloat16,
        **common,
    )
