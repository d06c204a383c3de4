"""The positions of entries in kernels of :mod:`~gckernels.ops.randomk`: of some groups, and of those in a tile."""

from __future__ import annotations

import triton
import triton.language as tl

from ...toolkit.random import philox_tile

TILE, NUM_WARPS = 4096, 4
LANES = 32 * NUM_WARPS  # one group for each thread
_TILE, _LANES = tl.constexpr(TILE), tl.constexpr(LANES)


def reciprocal(divisor: int) -> int:
    """The number that :func:`_quotient` multiplies with, as int64: ``(2**64 - 1) // divisor``, two's complement.

    ``divisor`` is positive, or 0, whose quotients are not used.
    """
    inverse = (2**64 - 1) // max(divisor, 1)
    return inverse - 2**64 if inverse >= 2**63 else inverse


@triton.jit
def shift_of(seed, size, k, least):
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
def first_group(shift, tile_first, size, k, inverse_size):
    """The group of a tile's first element; -1 is the last group, which wraps around."""
    return _quotient(k * (tile_first + 1) - 1 - shift + size, tl.maximum(size, 1), inverse_size) - 1


@triton.jit
def start_of(group, shift, size, k, inverse_k):
    """``(element, k-ths of the next element)`` at which a group starts, which may be -1."""
    around = tl.where(group < 0, 1, 0).to(tl.int64)
    start = (group + around * k) * size + shift  # in k-ths of an element
    begin = _quotient(start, tl.maximum(k, 1), inverse_k)
    return begin - around * size, start - begin * k


@triton.jit
def places_of(seed, groups, lanes, begin, rest, size, k, least, inverse_k):
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
def find_entries(
    seed, first, begin, rest, tile_first, size, k, least, inverse_k, PIECE: tl.constexpr
):  # fmt: skip
    """The entries of a tile in one piece of the groups from ``first`` on, of ``LANES`` groups. They are the groups, the
    entries' positions relative to the tile's start, and a mask of the entries that are in the tile."""
    lanes = (tl.arange(0, _LANES) + PIECE * _LANES).to(tl.int64)
    groups = (first + lanes).to(tl.uint32)
    if PIECE == 0:
        groups = tl.where(groups == 0xFFFFFFFF, (k - 1).to(tl.uint32), groups)
    places = places_of(seed, groups, lanes, begin - tile_first, rest, size, k, least, inverse_k)
    end, count = tl.minimum(size - tile_first, _TILE).to(tl.uint32), tl.minimum(k - first, 2**30).to(tl.int32)
    return groups, places.to(tl.int32, bitcast=True), (lanes.to(tl.int32) < count) & (places < end)
