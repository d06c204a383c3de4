"""The kernel that decodes and merges for :mod:`~gckernels.toolkit.sparsifier`.

A program reads its tile's part of the string of every source (``find_starts``) and adds up the entries, one source
after the other: the output is written once, nothing is atomic, and the order is the same everywhere.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...codec import Decoding
from ..constants import constants
from ..kernels.exchange import exchange_barrier
from ..kernels.launch import launch, temporary, waits
from ..kernels.places import place_of
from ..linear import dequantize_codes
from ..numeric import bf16_value
from ..payload import HEADER_NBYTES, STATUS_OK
from ..tiles import chunk_step, load_tile, remaining, store_tile
from .entries import BLOCK, SPAN
from .entries_kernels import find_starts

TILE, MAXNREG = SPAN, 128
PIECE = 1024  # elements of a tile that are written at a time
MIN_STEP, MAX_STEP = 32, 512  # bits of a string that are read at a time
MAX_RUN = 4  # by a thread
_BLOCK, _TILE, _PIECE = tl.constexpr(BLOCK), tl.constexpr(TILE), tl.constexpr(PIECE)
_STATUS, _HIGHS_OFFSET = tl.constexpr(STATUS_OK), tl.constexpr(HEADER_NBYTES)  # the string is the first field
_SCRATCH_NUMEL = 4 * 1024 * 1024  # 16 MiB, which a large GPU keeps in its L2 cache


@triton.jit
def _place_of(words_ptr, first, WIDTH: tl.constexpr, WORD: tl.constexpr):
    """The pointer to the word of ``WORD`` bits in which entry ``first``, of ``WIDTH`` bits, begins, and its first bit.

    Positions in a tile that are counted from there fit 32 bits.
    """
    place = (first * WIDTH).to(tl.uint64)  # whose quotients by powers of two are shifts
    return words_ptr + place // WORD, (place % WORD).to(tl.int32)


@triton.jit
def _load_lows(lows_ptr, lows_bit, entries, mask, LOW: tl.constexpr):
    """The low bits of ``entries``, int32."""
    if LOW == 0:
        return tl.zeros(entries.shape, tl.int32)
    else:
        bits = (lows_bit + entries * LOW).to(tl.uint32)
        words_ptr, shifts = lows_ptr + bits // 32, bits % 32
        words = tl.load(words_ptr, mask=mask, other=0).to(tl.uint32, bitcast=True)
        if 32 % LOW != 0:  # some lie in two words
            more = tl.load(words_ptr + 1, mask=mask & (shifts > 32 - LOW), other=0).to(tl.uint32, bitcast=True)
            words = (words.to(tl.uint64) | (more.to(tl.uint64) << 32)) >> shifts.to(tl.uint64)
        else:
            words = words >> shifts
        return words.to(tl.int32) & (2**LOW - 1)


@triton.jit
def _load_values(values_ptr, values_bit, scales_ptr, scales_entry, entries, mask, BITS: tl.constexpr):
    """The values of ``entries``, fp32."""
    if BITS == 32:
        return tl.load(values_ptr.to(tl.pointer_type(tl.float32)) + entries, mask=mask, other=0.0)
    elif BITS == 16:
        bits = tl.load(values_ptr.to(tl.pointer_type(tl.int16)) + entries, mask=mask, other=0)
        return bf16_value(bits.to(tl.int32) & 0xFFFF)
    else:
        scales = tl.load(scales_ptr + (scales_entry + entries).to(tl.uint32) // _BLOCK, mask=mask, other=0.0)
        bits = (values_bit + entries * BITS).to(tl.uint32)
        packed = tl.load(values_ptr + bits // 8, mask=mask, other=0).to(tl.uint32)
        return dequantize_codes((packed >> (bits % 8)).to(tl.int32) & (2**BITS - 1), scales, BITS)


@triton.jit
def _bit_of(words_ptr, places, mask):
    """The bits at ``places`` of a string, 0 or 1, where the mask is set, and 0 elsewhere."""
    places = places.to(tl.uint32)
    words = tl.load(words_ptr + places // 32, mask=mask, other=0).to(tl.uint32, bitcast=True)
    return (words >> (places % 32)).to(tl.int32) & 1


@triton.jit
def _load_entry(
    one,
    one_before,
    low_before,
    entry,
    bit,
    room,
    lows_ptr,
    lows_bit,
    values_ptr,
    values_bit,
    scales_ptr,
    scales_entry,
    LOW: tl.constexpr,
    BITS: tl.constexpr,
):
    """Load the entries of bits of a string.

    ``bit`` is their place in the tile's string, ``one`` and ``one_before`` are the bits and those before them,
    ``entry`` is the number of ones before, and ``low_before`` has the low bits of the last of these.

    Returns:
        Whether it is an entry, the index in the tile, the low bits, the value, and whether it is wrong.
    """
    is_entry = (one > 0) & (entry < room)
    low = _load_lows(lows_ptr, lows_bit, entry, is_entry, LOW)
    value = _load_values(values_ptr, values_bit, scales_ptr, scales_entry, entry, is_entry, BITS)
    index = tl.where(is_entry, ((bit - entry) << LOW) | low, 0)
    descends = is_entry & (one_before > 0) & (low <= low_before)
    return is_entry, index, low, value, descends | ((one > 0) & ~is_entry)


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
    C: tl.constexpr,
    place=None,
):
    LOW: tl.constexpr = C.low
    BITS: tl.constexpr = C.bits
    STEP: tl.constexpr = C.step
    RUN: tl.constexpr = C.run  # bits that a thread reads at a time: 1, 2 or 4
    program, programs, _chunk = place_of(place)
    GROUPS: tl.constexpr = _TILE >> LOW
    offsets, lanes = tl.arange(0, _TILE), tl.arange(0, STEP // RUN)
    scratch_ptr += program.to(tl.int64) * _TILE
    for item in range(program, num_items, programs):
        chunk = (item // tiles).to(tl.int64)
        tile = (item % tiles).to(tl.int64)
        source_ptr = payload_ptr + chunk * chunk_stride
        tile_starts_ptr = starts_ptr + chunk * (tiles + 1) + tile
        tl.store(scratch_ptr + offsets, tl.zeros((_TILE,), tl.float32))
        exchange_barrier(C.waits)
        wrong = tl.zeros((STEP // RUN,), tl.int32)
        for _ in range(num_sources):
            wrong |= (tl.load(source_ptr.to(tl.pointer_type(tl.int32))) != _STATUS).to(tl.int32)
            begin = tl.load(tile_starts_ptr)
            length = tl.load(tile_starts_ptr + 1) - begin
            wrong |= (length > _TILE + GROUPS).to(tl.int32)  # more entries than elements
            length = tl.where(length > _TILE + GROUPS, 0, length).to(tl.int32)
            first = begin - tile * GROUPS  # entry
            room = tl.minimum(k - first, _TILE).to(tl.int32)
            int32_ptr = source_ptr.to(tl.pointer_type(tl.int32))
            highs_ptr, highs_bit = _place_of(int32_ptr + _HIGHS_OFFSET // 4, begin, 1, 32)
            lows_ptr, lows_bit = _place_of(int32_ptr + lows_offset // 4, first, LOW, 32)
            values_ptr, values_bit = _place_of(source_ptr + values_offset, first, BITS, 8)
            float_ptr = source_ptr.to(tl.pointer_type(tl.float32))
            scales_ptr, scales_entry = _place_of(float_ptr + scales_offset // 4, first, 1, _BLOCK)
            # a thread reads the run of neighbouring bits that begins at a multiple of RUN; the tile's string may begin
            # in the first one
            lead = highs_bit % RUN
            done, entries = 0, 0
            while done < lead + length:
                bit = done - lead + lanes * RUN
                of_string = highs_bit + bit
                words = tl.load(highs_ptr + of_string.to(tl.uint32) // 32, mask=bit < length, other=0)
                run = words.to(tl.uint32, bitcast=True) >> (of_string.to(tl.uint32) % 32)
                if RUN > 1:
                    inside = tl.minimum(length - bit, RUN)
                    run = run & ((1 << tl.maximum(inside, 0)) - (1 << tl.maximum(-bit, 0))).to(tl.uint32, bitcast=True)
                run = run.to(tl.int32, bitcast=True)
                ones = run & 1
                for each in tl.static_range(1, RUN):
                    ones += (run >> each) & 1
                entry = entries + tl.cumsum(ones, 0) - ones
                # the entry before the run's first one, in the same group
                before = _bit_of(highs_ptr, of_string - 1, ((run & 1) > 0) & (bit > 0))
                low = _load_lows(lows_ptr, lows_bit, entry - 1, before > 0, LOW)
                found, indices, values = (), (), ()
                for each in tl.static_range(RUN):
                    one = (run >> each) & 1
                    is_entry, index, low, value, is_wrong = _load_entry(
                        one, before, low, entry, bit + each, room, lows_ptr, lows_bit, values_ptr, values_bit,
                        scales_ptr, scales_entry, LOW, BITS
                    )  # fmt: skip
                    # Triton's tuples may grow
                    found, indices, values = found + (is_entry,), indices + (index,), values + (value,)  # type: ignore[assignment]
                    wrong |= is_wrong.to(tl.int32)
                    entry, before = entry + one, one
                # after all loads; no two indices of a source are equal unless one is wrong, and the barrier separates
                # the sources
                for each in tl.static_range(RUN):
                    slots = scratch_ptr + indices[each]
                    total = tl.load(slots, mask=found[each], other=0.0) + values[each]
                    tl.store(slots, total, mask=found[each])
                done += STEP
                if done < lead + length:
                    entries += tl.sum(ones, 0)
            exchange_barrier(C.waits)
            source_ptr += source_stride
            tile_starts_ptr += chunks * (tiles + 1).to(tl.int64)
        factor = tl.where(tl.max(wrong, 0) > 0, float("nan"), scale)
        chunk_first = chunk * chunk_numel
        here = remaining(tl.minimum(chunk_numel, numel - chunk_first), tile * _TILE, _TILE)
        for piece in tl.static_range(0, _TILE, _PIECE):
            target_ptr = out_ptr + chunk_first + tile * _TILE + piece
            count = tl.minimum(tl.maximum(here - piece, 0), _PIECE)
            total = tl.load(scratch_ptr + piece + tl.arange(0, _PIECE)) * factor
            if C.accumulate:
                total += load_tile(target_ptr, tl.arange(0, _PIECE), count, _PIECE)
            store_tile(target_ptr, tl.arange(0, _PIECE), total, count, _PIECE)
        exchange_barrier(C.waits)  # the scratch is read before the next tile clears it


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
    step = max(MIN_STEP, min(triton.next_power_of_2(bits_of_tile), MAX_STEP))
    # each warp does all that is done once for a source, so there are only as many as read the bits in runs
    run = min(step // 32, MAX_RUN)
    launch(
        _decode_kernel,
        (programs,),
        *(payloads, starts, out, scratch, out.numel(), chunk_step(size, chunks), tiles, chunks * tiles),
        *(sources, payloads.stride(0), payloads.stride(1), chunks, compressor.capacity(size)),
        *(offsets["lows"], offsets.get("scales", 0), offsets["values"], scale),
        C=constants(low=entries.low, bits=entries.value_bits, accumulate=accumulate, step=step, run=run, waits=waits()),
        num_warps=step // (32 * run),
        maxnreg=MAXNREG,
    )
