"""The kernels that find what is sent of the candidates: the k-th largest key, and how many keys reach it.

The key is found digit by digit. A kernel counts the values of a digit among the keys that begin with the digits found
before, and every program of the next kernel finds the digit from these 256 counts by itself. They read the list of
candidates, or all elements of a chunk whose candidates are missing (``candidates_kernels.py``). Only counters are added
to atomically: they are integers, so the order does not matter.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..kernels.places import place_of
from ..tiles import remaining
from .candidates_kernels import is_missing, load_listed, load_marked
from .keys import LEADING_SHIFT, MAX_FINITE_KEY
from .selection_kernels import BINS, DIGITS, count_digits, keys_of, leading, prefix_of

TILE, NUM_WARPS = 2048, 8
MAX_PROGRAMS = 256
COUNT_MAXNREG = 128  # ptxas spills a value without it, for programs that do not exist
_BINS, _DIGITS = tl.constexpr(BINS), tl.constexpr(DIGITS)
LEADING_SIZE = tl.constexpr(2**LEADING_SHIFT)
_FIRST_TWO = tl.constexpr(15)  # bits behind the first two digits
_MAX_FINITE_KEY = tl.constexpr(MAX_FINITE_KEY)


@triton.jit(do_not_specialize=["k", "room"])
def _digit_kernel(
    grad_ptr,
    residual_ptr,
    velocity_ptr,
    factor_ptr,
    momentum,
    bounds_ptr,
    words_ptr,
    totals_ptr,
    indices_ptr,
    listed_ptr,
    digits_ptr,  # int32 [chunks, 4, 256], zero at first
    words_stride,
    numel,
    chunk_numel,
    k,
    room,
    C: tl.constexpr,
    place=None,
):
    TILE: tl.constexpr = C.tile
    DIGIT: tl.constexpr = C.digit
    program, programs, chunk = place_of(place)
    chunk_first = chunk * chunk_numel
    digits_ptr += chunk * (_DIGITS * _BINS)
    source = grad_ptr, residual_ptr, velocity_ptr, factor_ptr, momentum
    prefix = prefix_of(digits_ptr, k.to(tl.int32), DIGIT)
    offsets = tl.arange(0, TILE)
    totals = tl.zeros((_BINS,), tl.int32)
    tile = program.to(tl.int64)
    total = tl.load(totals_ptr + chunk)
    if is_missing(total, bounds_ptr, chunk, k, room, C):
        limit = tl.maximum(tl.minimum(chunk_numel, numel - chunk_first), 0)
        while tile * TILE < limit:
            here = remaining(limit, tile * TILE, TILE)
            first = chunk_first + tile * TILE
            marks_ptr = words_ptr + chunk * words_stride
            values, _, _, _ = load_marked(source, marks_ptr, first, tile * TILE, offsets, here, C)
            totals += count_digits(keys_of(values), offsets < here, prefix, DIGIT)
            tile += programs
    else:
        while tile * TILE < total:
            slots = tile * TILE + offsets
            values = load_listed(
                source, indices_ptr, listed_ptr, chunk, chunk_first, slots, slots < total, room, DIGIT == 0, C
            )
            totals += count_digits(keys_of(values), slots < total, prefix, DIGIT)
            tile += programs
    tl.atomic_add(digits_ptr + DIGIT * _BINS + tl.arange(0, _BINS), totals, mask=totals > 0, sem="relaxed")


@triton.jit
def bounds_of(bounds_ptr, digits_ptr, chunk, k, C: tl.constexpr):
    """``(lower, upper)`` of a chunk: elements above ``upper`` are sent first, then those from ``lower`` on."""
    lower = tl.load(bounds_ptr + chunk * 4)
    upper = tl.full((), _MAX_FINITE_KEY, tl.int32)
    if C.digits > 0:
        prefix = prefix_of(digits_ptr + chunk * (_DIGITS * _BINS), k.to(tl.int32), C.digits)
        first = tl.where(C.by_sample, lower, 1)  # another first bound may be too high
        if C.digits == 2:  # only their leading 11 bits bound the keys
            prefix = leading(prefix << _FIRST_TWO)
            lower = tl.maximum(prefix, first)
            upper = prefix + (LEADING_SIZE - 1)
        else:
            lower = tl.maximum(prefix, first)
            upper = lower
    return lower, upper


@triton.jit
def share_of(numel, program, programs, TILE: tl.constexpr):
    """``(first, last)``, int64, of a program's tiles, if all share the tiles of ``numel`` elements in order."""
    tiles = (numel + TILE - 1) // TILE
    each = (tiles + programs - 1) // programs
    first = program.to(tl.int64) * each
    return first, tl.minimum(first + each, tiles)


@triton.jit
def of_both(keys, lower, upper):
    """``(above the bounds, between them)``, and both as a number, 1 or 65536."""
    above = keys > upper
    between = (keys >= lower) & ~above
    return above, between, above.to(tl.int32) + between.to(tl.int32) * 65536


@triton.jit(do_not_specialize=["k", "room"])
def _count_kernel(
    grad_ptr,
    residual_ptr,
    velocity_ptr,
    factor_ptr,
    momentum,
    bounds_ptr,
    words_ptr,
    totals_ptr,
    indices_ptr,
    listed_ptr,
    digits_ptr,
    entries_ptr,  # int32 [chunks, 2, programs]: elements of every program above the bounds, and between them
    words_stride,
    numel,
    chunk_numel,
    k,
    room,
    C: tl.constexpr,
    place=None,
):
    TILE: tl.constexpr = C.tile
    program, programs, chunk = place_of(place)
    chunk_first = chunk * chunk_numel
    source = grad_ptr, residual_ptr, velocity_ptr, factor_ptr, momentum
    lower, upper = bounds_of(bounds_ptr, digits_ptr, chunk, k, C)
    offsets = tl.arange(0, TILE)
    of_above, of_between = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    total = tl.load(totals_ptr + chunk)
    if is_missing(total, bounds_ptr, chunk, k, room, C):
        limit = tl.maximum(tl.minimum(chunk_numel, numel - chunk_first), 0)
        tile, last = share_of(limit, program, programs, TILE)
        while tile < last:
            here = remaining(limit, tile * TILE, TILE)
            first = chunk_first + tile * TILE
            marks_ptr = words_ptr + chunk * words_stride
            values, _, _, _ = load_marked(source, marks_ptr, first, tile * TILE, offsets, here, C)
            _, _, both = of_both(keys_of(values), lower, upper)
            number = tl.sum(both, 0)
            of_above += number & 0xFFFF
            of_between += number >> 16
            tile += 1
    else:
        tile, last = share_of(total, program, programs, TILE)
        while tile < last:
            slots = tile * TILE + offsets
            values = load_listed(
                source, indices_ptr, listed_ptr, chunk, chunk_first, slots, slots < total, room, C.digits == 0, C
            )
            _, _, both = of_both(keys_of(values), lower, upper)
            number = tl.sum(both, 0)
            of_above += number & 0xFFFF
            of_between += number >> 16
            tile += 1
    entries_ptr += chunk * 2 * programs + program
    tl.store(entries_ptr, of_above)
    tl.store(entries_ptr + programs, of_between)
