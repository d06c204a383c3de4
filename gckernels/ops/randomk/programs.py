"""The work of one program of each kernel of :mod:`~gckernels.ops.randomk`.

Encoding takes two kernels. The first adds the gradient to the residual, except at the positions of entries, and checks
that all elements are finite. The second can then send the entries and take them out of the residual. The first kernel
and the decoder work on tiles of elements, and on the groups that overlap a tile.

A program gets its arguments from the launch (``kernels.py``) or from a table (``batch_kernels.py``).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...toolkit.kernels.exchange import exchange_barrier
from ...toolkit.numeric import is_finite, to_fp32
from ...toolkit.random import philox_tile
from ...toolkit.tiles import load_tile, remaining, store_tile
from .header import HEADER_NUMEL, MAX_WORLD, PART_BITS

_HEADER_NUMEL, _PART_BITS = tl.constexpr(HEADER_NUMEL), tl.constexpr(PART_BITS)
_MAX_WORLD = tl.constexpr(MAX_WORLD)


def reciprocal(divisor: int) -> int:
    """The number that :func:`_quotient` multiplies with, as int64: ``(2**64 - 1) // divisor``, two's complement.

    ``divisor`` is positive, or 0, whose quotients are not used.
    """
    inverse = (2**64 - 1) // max(divisor, 1)
    return inverse - 2**64 if inverse >= 2**63 else inverse


@triton.jit
def _shift(seed, size, k, least):
    """The shift of the groups' starts, in ``k``-ths of an element."""
    word, _, _, _ = philox_tile(seed, tl.zeros((1,), tl.uint32) + k.to(tl.uint32))
    drawn = tl.sum(tl.umulhi(word, tl.zeros((1,), tl.uint32) + size.to(tl.uint32)).to(tl.int64), 0)
    return tl.where(least * k == size, 0, drawn)


@triton.jit
def _quotient(numbers, divisor, inverse):
    """``numbers // divisor``, of int64 in ``0 .. 2**62 - 1``, by a product with :func:`reciprocal`."""
    quotient = tl.umulhi(numbers.to(tl.uint64), _unsigned(inverse)).to(tl.int64)
    return quotient + (numbers - quotient * divisor >= divisor).to(tl.int64)  # at most one too small


@triton.jit
def _unsigned(inverse):
    return inverse.to(tl.int64).to(tl.uint64, bitcast=True)  # the interpreter passes small numbers as int32


@triton.jit
def _first_group(shift, tile_first, size, k, inverse_size):
    """The group of a tile's first element; -1 is the last group, which wraps around."""
    return _quotient(k * (tile_first + 1) - 1 - shift + size, tl.maximum(size, 1), inverse_size) - 1


@triton.jit
def _start_of(group, shift, size, k, inverse_k):
    """``(element, k-ths of the next element)`` at which a group starts, which may be -1."""
    around = tl.where(group < 0, 1, 0).to(tl.int64)
    start = (group + around * k) * size + shift  # in k-ths of an element
    begin = _quotient(start, tl.maximum(k, 1), inverse_k)
    return begin - around * size, start - begin * k


@triton.jit
def _places(seed, groups, lanes, begin, rest, size, k, least, inverse_k):
    """The positions of the entries of some groups, uint32, exact modulo ``2**32``.

    Everything about a group is computed with 32 bits, from the start of a first group, which takes half of the
    instructions of 64 bits. Compilers leave out the upper halves of sums that are cut to 32 bits.

    Args:
        seed, size, k, least, inverse_k: int64 scalars. A group has ``least = size // k`` elements, or one more.
        groups: the groups' numbers, uint32.
        lanes: how far the groups are behind the first one, int64 in ``0 .. 2**20``.
        begin, rest: the start of the first group, see :func:`_start_of`; int64 scalars.
    """
    more = size - least * k  # k-ths of an element that are missing in each group of `least` elements
    inverse = _unsigned(inverse_k)
    # k-ths as fractions of 32 bits, at most two units too small
    fraction, fractions = (rest.to(tl.uint64) * inverse) >> 32, (more.to(tl.uint64) * inverse) >> 32
    elements = (lanes.to(tl.uint64) * fractions + fraction) >> 32  # at most one too small
    rests = (lanes * more + rest - elements.to(tl.int64) * k).to(tl.uint32)  # below 2k
    late = rests >= k.to(tl.uint32)
    rests -= tl.where(late, k.to(tl.uint32), 0)
    length = least.to(tl.uint32) + (rests + more.to(tl.uint32) >= k.to(tl.uint32)).to(tl.uint32)
    word, _, _, _ = philox_tile(seed, groups)
    place = tl.umulhi(word, length).to(tl.int64) + elements.to(tl.int64) + late.to(tl.int64)
    return (lanes * least + place + begin).to(tl.uint32)


@triton.jit
def _find_entries(
    seed, first, begin, rest, tile_first, size, k, least, inverse_k, PIECE: tl.constexpr, LANES: tl.constexpr,
    TILE: tl.constexpr
):  # fmt: skip
    """The entries of a tile in one piece of the groups from ``first`` on, of ``LANES`` groups. They are the groups, the
    entries' positions relative to the tile's start, and a mask of the entries that are in the tile."""
    lanes = (PIECE * LANES + tl.arange(0, LANES)).to(tl.int64)
    groups = (first + lanes).to(tl.uint32)
    if PIECE == 0:
        groups = tl.where(groups == 0xFFFFFFFF, (k - 1).to(tl.uint32), groups)
    places = _places(seed, groups, lanes, begin - tile_first, rest, size, k, least, inverse_k)
    end, count = tl.minimum(size - tile_first, TILE).to(tl.uint32), tl.minimum(k - first, 2**30).to(tl.int32)
    return groups, places.to(tl.int32, bitcast=True), (lanes.to(tl.int32) < count) & (places < end)


@triton.jit
def accumulate_program(
    grad_ptr,
    residual_ptr,  # the gradient is added to it, except at the positions of entries
    nonfinite_ptr,  # int32 [chunks], set to 1 if an element of the chunk is not finite
    tile,
    chunk,
    numel,
    chunk_numel,
    size,
    k,
    least,  # elements of a group
    inverse_k,  # see reciprocal
    inverse_size,
    seed,
    scale,
    HAS_RESIDUAL: tl.constexpr,
    WAITS: tl.constexpr,
    PIECES: tl.constexpr,
    LANES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Accumulate a tile of a chunk. ``PIECES`` times ``LANES`` groups overlap the tile, or fewer.

    ``tile``, ``chunk``, ``k``, ``least``, both reciprocals and ``seed`` are int64, here and below.
    """
    tile_first = tile * TILE
    chunk_first = chunk * chunk_numel
    here = remaining(tl.minimum(chunk_numel, numel - chunk_first), tile_first, TILE)
    residual_ptr += chunk_first + tile_first
    offsets = tl.arange(0, TILE)
    values = load_tile(grad_ptr + chunk_first + tile_first, offsets, here, TILE)
    if HAS_RESIDUAL:
        old = load_tile(residual_ptr, offsets, here, TILE)
        values += old
        shift = _shift(seed, size, k, least)
        first = _first_group(shift, tile_first, size, k, inverse_size)
        begin, rest = _start_of(first, shift, size, k, inverse_k)
        places, found, entries = (), (), ()
        for piece in tl.static_range(PIECES):
            _, place, inside = _find_entries(
                seed, first, begin, rest, tile_first, size, k, least, inverse_k, piece, LANES, TILE
            )
            inside = inside & (place < here)
            places, found = places + (place,), found + (inside,)
            entries = entries + (tl.load(residual_ptr + place, mask=inside, other=0.0),)
        exchange_barrier(WAITS)
        store_tile(residual_ptr, offsets, tl.where(is_finite(values), values, old), here, TILE)
        exchange_barrier(WAITS)
        for piece in tl.static_range(PIECES):
            tl.store(residual_ptr + places[piece], entries[piece], mask=found[piece])
    nonfinite = tl.max((is_finite(values * scale) == 0).to(tl.int32), 0)
    tl.store(nonfinite_ptr + chunk, nonfinite, mask=nonfinite > 0)


@triton.jit
def emit_program(
    grad_ptr,
    residual_ptr,
    payload_ptr,  # fp32 [chunks, payload_stride]
    nonfinite_ptr,
    tile,
    chunk,
    numel,
    chunk_numel,
    size,
    payload_stride,
    payload_count,  # padding included
    k,
    least,  # elements of a group
    inverse_k,
    seed,
    scale,
    HAS_RESIDUAL: tl.constexpr,
    TILE: tl.constexpr,
):
    """Send the entries of ``TILE`` groups of a chunk. ``payload_count`` is the length of the payload, with padding."""
    first, chunk_first = tile * TILE, chunk * chunk_numel
    payload_ptr += chunk * payload_stride
    begin, rest = _start_of(first, _shift(seed, size, k, least), size, k, inverse_k)
    lanes = tl.arange(0, TILE)
    groups = first + lanes
    places = _places(seed, groups.to(tl.uint32), lanes.to(tl.int64), begin, rest, size, k, least, inverse_k)
    places -= tl.where(places >= size.to(tl.uint32), size.to(tl.uint32), 0)  # the last group may wrap around
    is_entry = lanes < tl.minimum(k - first, TILE).to(tl.int32)
    here = tl.maximum(tl.minimum(chunk_numel, numel - chunk_first), 0)
    inside = is_entry & (places < here.to(tl.uint32))
    values = to_fp32(tl.load(grad_ptr + chunk_first + places, mask=inside, other=0.0))
    residual_ptr += chunk_first
    if HAS_RESIDUAL:
        values += tl.load(residual_ptr + places, mask=inside, other=0.0)
    sent = values * scale
    bits = tl.where(tl.load(nonfinite_ptr + chunk) > 0, 0x7FC00000, sent.to(tl.int32, bitcast=True))
    if HAS_RESIDUAL:
        sent = bits.to(tl.float32, bitcast=True)
        left = values - tl.div_rn(sent, tl.zeros((TILE,), tl.float32) + scale)
        tl.store(residual_ptr + places, left, mask=inside & is_finite(left))
    bits_ptr = payload_ptr.to(tl.pointer_type(tl.int32)) + _HEADER_NUMEL + first
    room = tl.minimum(payload_count - _HEADER_NUMEL - first, TILE).to(tl.int32)
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
def decode_tile(
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
    ACCUMULATE: tl.constexpr,
    WAITS: tl.constexpr,
    PIECES: tl.constexpr,
    LANES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Decode and merge a tile of a chunk."""
    offsets = tl.arange(0, TILE)
    tile_first = tile * TILE
    source_ptr = payload_ptr + chunk * chunk_stride
    tl.store(scratch_ptr + offsets, tl.zeros((TILE,), tl.float32))
    exchange_barrier(WAITS)
    damaged = tl.full((), 0, tl.int32)
    for _ in range(num_sources):
        seed, good = _read_seed(source_ptr)
        damaged = damaged | (good == 0).to(tl.int32)
        shift = _shift(seed, size, k, least)
        first = _first_group(shift, tile_first, size, k, inverse_size)
        begin, rest = _start_of(first, shift, size, k, inverse_k)
        for piece in tl.static_range(PIECES):
            groups, places, found = _find_entries(
                seed, first, begin, rest, tile_first, size, k, least, inverse_k, piece, LANES, TILE
            )
            values = tl.load(source_ptr + _HEADER_NUMEL + groups, mask=found, other=0.0)
            slots = scratch_ptr + places
            # positions of one source are distinct, and the barrier separates those of different sources
            tl.store(slots, tl.load(slots, mask=found, other=0.0) + values, mask=found)
        exchange_barrier(WAITS)
        source_ptr += source_stride
    total = tl.load(scratch_ptr + offsets)
    total = tl.where(damaged > 0, float("nan"), total) * scale
    chunk_first = chunk * chunk_numel
    here = remaining(tl.minimum(chunk_numel, numel - chunk_first), tile_first, TILE)
    target_ptr = out_ptr + chunk_first + tile_first
    if ACCUMULATE:
        total += load_tile(target_ptr, offsets, here, TILE)
    store_tile(target_ptr, offsets, total, here, TILE)
    exchange_barrier(WAITS)  # all threads have read the scratch before the next tile clears it
