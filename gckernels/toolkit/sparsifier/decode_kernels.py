"""The kernel that decodes and merges for :mod:`~gckernels.toolkit.sparsifier`.

A program reads its tile's part of the string of every source (``find_starts``) and adds up the entries, one source
after the other: the output is written once, nothing is atomic, and the order is the same everywhere.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...compressor import Decoding
from ..kernels.exchange import exchange_barrier
from ..kernels.launch import launch, temporary
from ..kernels.places import place_of
from ..linear import dequantize_codes
from ..numeric import bf16_value
from ..payload import STATUS_OK
from ..tiles import chunk_step, load_tile, remaining, store_tile
from .entries import BLOCK, SPAN
from .entries_kernels import find_starts

TILE, NUM_WARPS, MAXNREG = SPAN, 4, 128
MIN_STEP, MAX_STEP = 128, 512  # bits of a string that are read at a time
_SCRATCH_NUMEL = 4 * 1024 * 1024  # 16 MiB, which a large GPU keeps in its L2 cache


@triton.jit
def _place_of(words_ptr, first, WIDTH: tl.constexpr, WORD: tl.constexpr):
    """The pointer to the word of ``WORD`` bits in which entry ``first``, of ``WIDTH`` bits, begins, and its first bit.

    Positions in a tile that are counted from there fit 32 bits.
    """
    place = first * WIDTH
    return words_ptr + place // WORD, (place % WORD).to(tl.int32)


@triton.jit
def _load_lows(lows_ptr, lows_bit, entries, mask, LOW: tl.constexpr):
    """The low bits of ``entries``, int32."""
    if LOW == 0:
        return tl.zeros(entries.shape, tl.int32)
    else:
        bits = lows_bit + entries * LOW
        words_ptr, shifts = lows_ptr + bits // 32, bits % 32
        words = tl.load(words_ptr, mask=mask, other=0).to(tl.int64) & 0xFFFFFFFF
        if 32 % LOW != 0:  # some lie in two words
            more = tl.load(words_ptr + 1, mask=mask & (shifts > 32 - LOW), other=0)
            words |= more.to(tl.int64) << 32
        return (words >> shifts).to(tl.int32) & (2**LOW - 1)


@triton.jit
def _load_values(
    values_ptr, values_bit, scales_ptr, scales_entry, entries, mask, BITS: tl.constexpr, BLOCK: tl.constexpr
):
    """The values of ``entries``, fp32."""
    if BITS == 32:
        return tl.load(values_ptr.to(tl.pointer_type(tl.float32)) + entries, mask=mask, other=0.0)
    elif BITS == 16:
        bits = tl.load(values_ptr.to(tl.pointer_type(tl.int16)) + entries, mask=mask, other=0)
        return bf16_value(bits.to(tl.int32) & 0xFFFF)
    else:
        scales = tl.load(scales_ptr + (scales_entry + entries) // BLOCK, mask=mask, other=0.0)
        bits = values_bit + entries * BITS
        packed = tl.load(values_ptr + bits // 8, mask=mask, other=0).to(tl.int32)
        return dequantize_codes((packed >> (bits % 8)) & (2**BITS - 1), scales, BITS)


@triton.jit(do_not_specialize=["tiles", "num_items", "chunks", "k"])
def _decode_kernel(
    payload_ptr,
    starts_ptr,  # int64 [sources, chunks, tiles + 1]
    out_ptr,
    scratch_ptr,  # fp32 [programs, TILE]
    numel,
    chunk_numel,
    tiles,  # per chunk
    num_items,  # chunks * tiles
    num_sources,
    source_stride,
    chunk_stride,
    chunks,
    k,
    lows_offset,
    scales_offset,
    values_offset,
    scale,
    STATUS: tl.constexpr,
    HIGHS_OFFSET: tl.constexpr,
    LOW: tl.constexpr,
    BITS: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    WAITS: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    TILE: tl.constexpr,
    place=None,
):
    program, programs, _chunk = place_of(place)
    GROUPS: tl.constexpr = TILE >> LOW
    offsets, lanes = tl.arange(0, TILE), tl.arange(0, STEP)
    scratch_ptr += program.to(tl.int64) * TILE
    for item in range(program, num_items, programs):
        chunk = (item // tiles).to(tl.int64)
        tile = (item % tiles).to(tl.int64)
        source_ptr = payload_ptr + chunk * chunk_stride
        tile_starts_ptr = starts_ptr + chunk * (tiles + 1) + tile
        tl.store(scratch_ptr + offsets, tl.zeros((TILE,), tl.float32))
        exchange_barrier(WAITS)
        wrong = tl.zeros((STEP,), tl.int32)
        for _ in range(num_sources):
            wrong |= (tl.load(source_ptr.to(tl.pointer_type(tl.int32))) != STATUS).to(tl.int32)
            begin = tl.load(tile_starts_ptr)
            length = tl.load(tile_starts_ptr + 1) - begin
            wrong |= (length > TILE + GROUPS).to(tl.int32)  # more entries than elements
            length = tl.where(length > TILE + GROUPS, 0, length).to(tl.int32)
            first = begin - tile * GROUPS  # entry
            room = tl.minimum(k - first, TILE).to(tl.int32)
            int32_ptr = source_ptr.to(tl.pointer_type(tl.int32))
            highs_ptr, highs_bit = _place_of(int32_ptr + HIGHS_OFFSET // 4, begin, 1, 32)
            lows_ptr, lows_bit = _place_of(int32_ptr + lows_offset // 4, first, LOW, 32)
            values_ptr, values_bit = _place_of(source_ptr + values_offset, first, BITS, 8)
            float_ptr = source_ptr.to(tl.pointer_type(tl.float32))
            scales_ptr, scales_entry = _place_of(float_ptr + scales_offset // 4, first, 1, BLOCK)
            done, group = 0, 0
            while done < length:
                bits = highs_bit + done + lanes
                words_ptr, shifts = highs_ptr + bits // 32, bits % 32
                word = tl.load(words_ptr, mask=done + lanes < length, other=0)
                ones = (word >> shifts) & 1
                of_step = tl.cumsum(ones, 0) - ones
                entries = done - group + of_step
                is_entry = (ones > 0) & (entries < room)
                low = _load_lows(lows_ptr, lows_bit, entries, is_entry, LOW)
                # the entry before, in the same group
                has_before = is_entry & ((begin > 0) | (done + lanes > 0))
                word_before = tl.load(words_ptr - 1, mask=has_before & (shifts == 0), other=0)
                before = tl.where(shifts == 0, word_before >> 31, word >> tl.maximum(shifts - 1, 0)) & 1
                follows = has_before & (before > 0)
                descends = follows & (low <= _load_lows(lows_ptr, lows_bit, entries - 1, follows, LOW))
                wrong |= (descends | ((ones > 0) & ~is_entry)).to(tl.int32)
                slots = scratch_ptr + tl.where(is_entry, ((group + lanes - of_step) << LOW) | low, 0)
                values = _load_values(values_ptr, values_bit, scales_ptr, scales_entry, entries, is_entry, BITS, BLOCK)
                # no two slots are equal unless one is wrong, and the barrier separates the sources
                tl.store(slots, tl.load(slots, mask=is_entry, other=0.0) + values, mask=is_entry)
                done += STEP
                group += STEP - tl.sum(ones, 0)
            exchange_barrier(WAITS)
            source_ptr += source_stride
            tile_starts_ptr += chunks * (tiles + 1).to(tl.int64)
        total = tl.load(scratch_ptr + offsets)
        total = tl.where(tl.max(wrong, 0) > 0, float("nan"), total) * scale
        chunk_first = chunk * chunk_numel
        here = remaining(tl.minimum(chunk_numel, numel - chunk_first), tile * TILE, TILE)
        target_ptr = out_ptr + chunk_first + tile * TILE
        if ACCUMULATE:
            total += load_tile(target_ptr, offsets, here, TILE)
        store_tile(target_ptr, offsets, total, here, TILE)
        exchange_barrier(WAITS)  # the scratch is read before the next tile clears it


def decode(unit: Decoding, scale: float = 1.0, accumulate: bool = False) -> None:
    """Launch the decoding and merging of a unit."""
    compressor, payloads, out, size = unit.compressor, unit.payloads, unit.out, unit.size
    sources, chunks, _ = payloads.shape
    layout, entries = compressor.layout(size), compressor.entries
    offsets = {field.name: field.offset for field in layout.fields}
    tiles = triton.cdiv(min(size, out.numel()), TILE)
    programs = min(chunks * tiles, _SCRATCH_NUMEL // TILE)
    starts = find_starts(compressor, payloads, size, tiles)
    scratch = temporary(programs, TILE, dtype=torch.float32, device=out.device)
    bits_of_tile = compressor.capacity(TILE) + (TILE >> entries.low)
    launch(
        _decode_kernel,
        (programs,),
        *(payloads, starts, out, scratch, out.numel(), chunk_step(size, chunks), tiles, chunks * tiles),
        *(sources, payloads.stride(0), payloads.stride(1), chunks, compressor.capacity(size)),
        *(offsets["lows"], offsets.get("scales", 0), offsets["values"], scale),
        STATUS=STATUS_OK,
        HIGHS_OFFSET=offsets["highs"],
        LOW=entries.low,
        BITS=entries.value_bits,
        ACCUMULATE=accumulate,
        BLOCK=BLOCK,
        STEP=max(MIN_STEP, min(triton.next_power_of_2(bits_of_tile), MAX_STEP)),
        TILE=TILE,
        num_warps=NUM_WARPS,
        maxnreg=MAXNREG,
        exchanges=True,
    )
