"""The kernels of :mod:`~gckernels.ops.randomk`.

Encoding takes two kernels. The first adds the gradient to the residual, except at the positions of entries, and checks
that all elements are finite. The second can then send the entries and take them out of the residual. The first kernel
and the decoder work on tiles of elements, and on the groups that overlap a tile.

``launchers.py`` launches them. ``C`` holds the compile-time arguments: ``has_residual``; ``accumulate``, whether to add
to the output; ``loops``, whether a program decodes several tiles; ``pieces``, see ``_pieces_of``; and ``waits``, see
``exchange_barrier``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...toolkit.kernels.exchange import exchange_barrier
from ...toolkit.kernels.places import place_of
from ...toolkit.kernels.seeds import seed_of
from ...toolkit.numeric import is_finite, to_fp32
from ...toolkit.tiles import load_tile, remaining, store_tile
from .header import HEADER_NUMEL, MAX_WORLD, PART_BITS
from .positions_kernels import TILE, find_entries, first_group, places_of, shift_of, start_of

EMITTED_TILE = 1024
_TILE, _EMITTED_TILE = tl.constexpr(TILE), tl.constexpr(EMITTED_TILE)
_HEADER_NUMEL, _PART_BITS = tl.constexpr(HEADER_NUMEL), tl.constexpr(PART_BITS)
_MAX_WORLD = tl.constexpr(MAX_WORLD)


@triton.jit(do_not_specialize=["size", "k", "least", "inverse_k", "inverse_size", "seed"])
def _accumulate_kernel(
    grad_ptr,
    residual_ptr,  # the gradient is added to it, except at the positions of entries
    nonfinite_ptr,  # int32 [chunks], set to 1 if an element of the chunk is not finite
    numel,
    chunk_numel,
    size,
    k: tl.int64,
    least: tl.int64,  # elements of a group
    inverse_k: tl.int64,  # see reciprocal
    inverse_size: tl.int64,
    seed: tl.int64,
    scale,
    C: tl.constexpr,
    place=None,
    added_ptr=None,
):

    PIECES: tl.constexpr = C.pieces
    tile, _, chunk = place_of(place)
    tile, chunk, seed = tile.to(tl.int64), chunk.to(tl.int64), seed_of(seed, added_ptr)
    tile_first = tile * _TILE
    chunk_first = chunk * chunk_numel
    here = remaining(tl.minimum(chunk_numel, numel - chunk_first), tile_first, _TILE)
    residual_ptr += chunk_first + tile_first
    offsets = tl.arange(0, _TILE)
    values = load_tile(grad_ptr + chunk_first + tile_first, offsets, here, _TILE)
    if C.has_residual:
        old = load_tile(residual_ptr, offsets, here, _TILE)
        values += old
        shift = shift_of(seed, size, k, least)
        first = first_group(shift, tile_first, size, k, inverse_size)
        begin, rest = start_of(first, shift, size, k, inverse_k)
        places, found, entries = (), (), ()
        for piece in tl.static_range(PIECES):
            _, place, inside = find_entries(seed, first, begin, rest, tile_first, size, k, least, inverse_k, piece)
            inside = inside & (place < here)
            places, found = places + (place,), found + (inside,)
            entries = entries + (tl.load(residual_ptr + place, mask=inside, other=0.0),)
        exchange_barrier(C.waits)
        store_tile(residual_ptr, offsets, tl.where(is_finite(values), values, old), here, _TILE)
        exchange_barrier(C.waits)
        for piece in tl.static_range(PIECES):
            tl.store(residual_ptr + places[piece], entries[piece], mask=found[piece])
    nonfinite = tl.max((is_finite(values * scale) == 0).to(tl.int32), 0)
    tl.store(nonfinite_ptr + chunk, nonfinite, mask=nonfinite > 0)


@triton.jit(do_not_specialize=["size", "k", "least", "inverse_k", "seed"])
def _emit_kernel(
    grad_ptr,
    residual_ptr,
    payload_ptr,  # fp32 [chunks, row_stride]
    nonfinite_ptr,
    numel,
    chunk_numel,
    size: tl.int64,
    # by no name of which shared launches say that it divides by 4: elements of a thread are far apart, so stores of 16
    # bytes would take an exchange
    row_stride: tl.int64,
    payload_count,  # padding included
    k: tl.int64,
    least: tl.int64,  # elements of a group
    inverse_k: tl.int64,
    seed: tl.int64,
    scale,
    C: tl.constexpr,
    place=None,
    added_ptr=None,
):

    tile, _, chunk = place_of(place)
    tile, chunk, seed = tile.to(tl.int64), chunk.to(tl.int64), seed_of(seed, added_ptr)
    first, chunk_first = tile * _EMITTED_TILE, chunk * chunk_numel
    payload_ptr += chunk * row_stride
    begin, rest = start_of(first, shift_of(seed, size, k, least), size, k, inverse_k)
    lanes = tl.arange(0, _EMITTED_TILE)
    groups = first + lanes
    places = places_of(seed, groups.to(tl.uint32), lanes.to(tl.int64), begin, rest, size, k, least, inverse_k)
    places -= tl.where(places >= size.to(tl.uint32), size.to(tl.uint32), 0)  # the last group may wrap around
    is_entry = lanes < tl.minimum(k - first, _EMITTED_TILE).to(tl.int32)
    here = tl.maximum(tl.minimum(chunk_numel, numel - chunk_first), 0)
    inside = is_entry & (places < here.to(tl.uint32))
    values = to_fp32(tl.load(grad_ptr + chunk_first + places, mask=inside, other=0.0))
    residual_ptr += chunk_first
    if C.has_residual:
        values += tl.load(residual_ptr + places, mask=inside, other=0.0)
    sent = values * scale
    bits = tl.where(tl.load(nonfinite_ptr + chunk) > 0, 0x7FC00000, sent.to(tl.int32, bitcast=True))
    if C.has_residual:
        sent = bits.to(tl.float32, bitcast=True)
        left = values - tl.div_rn(sent, tl.zeros((_EMITTED_TILE,), tl.float32) + scale)
        tl.store(residual_ptr + places, left, mask=inside & is_finite(left))
    bits_ptr = payload_ptr.to(tl.pointer_type(tl.int32)) + _HEADER_NUMEL + first
    room = tl.minimum(payload_count - _HEADER_NUMEL - first, _EMITTED_TILE).to(tl.int32)
    tl.store(bits_ptr + lanes, tl.where(is_entry, bits, 0), mask=lanes < room)
    if tile == 0:
        slots = tl.arange(0, _HEADER_NUMEL)
        shifts = tl.minimum(tl.maximum(slots - 1, 0), 5) * _PART_BITS
        parts = ((seed.to(tl.uint64) >> shifts.to(tl.uint64)) & (2**_PART_BITS - 1)).to(tl.int32)
        numbers = tl.where(slots == 0, 1, tl.where(slots < _HEADER_NUMEL - 1, parts, 0)).to(tl.float32)
        tl.store(payload_ptr + slots, numbers)


@triton.jit
def _read_seed(payload_ptr):
    """``(seed, whether there is one)``; see ``seed_of``."""
    words = tl.arange(0, _HEADER_NUMEL)
    numbers = tl.load(payload_ptr + words)
    count = tl.sum(tl.where(words == 0, numbers, 0.0), 0)
    counts = (count >= 1.0) & (count <= _MAX_WORLD)
    count = tl.where(counts, count, 1.0)
    in_range = (numbers >= 0.0) & (numbers < count * 2**_PART_BITS)
    totals = tl.where(in_range, numbers, 0.0).to(tl.int32)
    whole = in_range & (totals.to(tl.float32) == numbers)
    of_count = tl.sum(tl.where(words == 0, totals, 0), 0)
    good = whole & (totals % tl.maximum(of_count, 1) == 0) & ((words != _HEADER_NUMEL - 1) | (totals == 0))
    parts = (totals // tl.maximum(of_count, 1)).to(tl.uint64)
    shifts = (tl.maximum(words - 1, 0) * _PART_BITS).to(tl.uint64)
    is_part = (words > 0) & (words < _HEADER_NUMEL - 1)
    seed = tl.sum(tl.where(is_part, parts << tl.where(is_part, shifts, 0), 0).to(tl.int64), 0)
    return seed, counts & (tl.sum(good.to(tl.int32), 0) == _HEADER_NUMEL)


@triton.jit
def _decode_tile(
    payload_ptr,  # fp32 [sources, chunks, ...]
    out_ptr,
    scratch_ptr,  # fp32 [TILE], of this program alone
    tile,
    chunk,
    numel,
    chunk_numel,
    size,
    num_sources,
    source_stride,
    chunk_stride,
    k,
    least,  # elements of a group
    inverse_k,
    inverse_size,
    scale,
    C: tl.constexpr,
):
    """Decode and merge a tile of a chunk. ``tile``, ``chunk``, ``k``, ``least`` and both reciprocals are int64."""
    PIECES: tl.constexpr = C.pieces
    offsets = tl.arange(0, _TILE)
    tile_first = tile * _TILE
    source_ptr = payload_ptr + chunk * chunk_stride
    tl.store(scratch_ptr + offsets, tl.zeros((_TILE,), tl.float32))
    exchange_barrier(C.waits)
    damaged = tl.full((), 0, tl.int32)
    for _ in range(num_sources):
        seed, good = _read_seed(source_ptr)
        damaged = damaged | (good == 0).to(tl.int32)
        shift = shift_of(seed, size, k, least)
        first = first_group(shift, tile_first, size, k, inverse_size)
        begin, rest = start_of(first, shift, size, k, inverse_k)
        for piece in tl.static_range(PIECES):
            groups, places, found = find_entries(seed, first, begin, rest, tile_first, size, k, least, inverse_k, piece)
            values = tl.load(source_ptr + _HEADER_NUMEL + groups, mask=found, other=0.0)
            slots = scratch_ptr + places
            # positions of one source are distinct, and the barrier separates those of different sources
            tl.store(slots, tl.load(slots, mask=found, other=0.0) + values, mask=found)
        exchange_barrier(C.waits)
        source_ptr += source_stride
    total = tl.load(scratch_ptr + offsets)
    total = tl.where(damaged > 0, float("nan"), total) * scale
    chunk_first = chunk * chunk_numel
    here = remaining(tl.minimum(chunk_numel, numel - chunk_first), tile_first, _TILE)
    target_ptr = out_ptr + chunk_first + tile_first
    if C.accumulate:
        total += load_tile(target_ptr, offsets, here, _TILE)
    store_tile(target_ptr, offsets, total, here, _TILE)


@triton.jit(do_not_specialize=["size", "tiles", "num_sources", "k", "least", "inverse_k", "inverse_size"])
def _decode_kernel(
    payload_ptr,  # fp32 [sources, chunks, ...]
    out_ptr,
    scratch_ptr,  # fp32 [chunks, at once, TILE]
    numel,
    chunk_numel,
    size,
    tiles,  # per chunk
    num_sources,
    source_stride,
    chunk_stride,
    k: tl.int64,
    least: tl.int64,  # elements of a group
    inverse_k: tl.int64,
    inverse_size: tl.int64,
    scale,
    C: tl.constexpr,
    place=None,
):
    program, at_once, chunk = place_of(place)
    scratch_ptr += (chunk * at_once + program) * _TILE
    if C.loops:
        for tile in range(program, tiles, at_once):
            _decode_tile(
                payload_ptr, out_ptr, scratch_ptr, tl.cast(tile, tl.int64), chunk, numel, chunk_numel, size,
                num_sources, source_stride, chunk_stride, k, least, inverse_k, inverse_size, scale, C
            )  # fmt: skip
            exchange_barrier(C.waits)  # all threads have read the scratch before the next tile clears it
    else:
        _decode_tile(
            payload_ptr, out_ptr, scratch_ptr, program.to(tl.int64), chunk, numel, chunk_numel, size, num_sources,
            source_stride, chunk_stride, k, least, inverse_k, inverse_size, scale, C
        )  # fmt: skip
