"""The kernels that find the candidates of chunks, in one pass over the gradient, and list them in order.

The pass sets a bit for every element that reaches the lower bound. Where entries are sent exactly it leaves all other
elements in the states, so that nothing has to be read again but the candidates. A second kernel reads the bits alone
and lists the indices of the ones. Whether the list may be used follows from the number of candidates, which the pass
counts: if they are too few, or more than there is room for, the whole chunk is searched instead.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..bitpack import lowest_one, num_ones, ones_of
from ..kernels.places import place_of
from ..numeric import INF_BITS
from ..tiles import remaining, store_tile
from .states import gather_values, load_values

TILE, PLAIN_TILE, NUM_WARPS = 2048, 4096, 4  # with and without a residual, which takes registers
MAXNREG_WITH_VELOCITY = 96  # without a limit, ptxas takes as many and spills a value
MAX_RUNS = 2048  # runs of tiles whose candidates are listed by one program each
WORD = 32  # bits
LISTED_WORDS = 256  # words whose candidates are listed at a time
_MAX_RUNS, _WORD, _LISTED_WORDS = tl.constexpr(MAX_RUNS), tl.constexpr(WORD), tl.constexpr(LISTED_WORDS)


@triton.jit
def is_missing(total, bounds_ptr, chunk, k, room, C: tl.constexpr):
    """Whether a chunk's candidates, ``total`` of them, are too few, or too many to be listed."""
    missing = total > room
    if C.digits > 0 and not C.by_sample:  # fewer than k that are not zero are all sent
        missing = missing | ((total < k) & (tl.load(bounds_ptr + chunk * 4) > 1))
    return missing


@triton.jit(do_not_specialize=["tiles_per_run", "k", "room"])
def _mark_kernel(
    grad_ptr,
    residual_ptr,
    velocity_ptr,
    factor_ptr,
    momentum,
    bounds_ptr,  # int32 [chunks, 4]
    words_ptr,  # int32 [chunks, words_stride]: a bit for every element, one if it is a candidate
    counts_ptr,  # int32 [chunks, counts_stride]: candidates of every run, 0 at first
    totals_ptr,  # int32 [chunks]: candidates, unless C.marks
    words_stride,
    counts_stride,
    numel,
    chunk_numel,
    tiles_per_run,
    k,
    room,
    C: tl.constexpr,
    place=None,
):
    TILE: tl.constexpr = C.tile
    tile, _, chunk = place_of(place)
    tile = tile.to(tl.int64)
    if not C.marks:  # noqa: SIM102  one condition is of compile time
        if is_missing(tl.load(totals_ptr + chunk), bounds_ptr, chunk, k, room, C):
            return
    chunk_first = chunk * chunk_numel
    first = chunk_first + tile * TILE
    here = remaining(tl.minimum(chunk_numel, numel - chunk_first), tile * TILE, TILE)
    WORDS: tl.constexpr = TILE // _WORD
    lanes, rows = tl.arange(0, _WORD), tl.arange(0, WORDS)
    offsets = rows[:, None] * _WORD + lanes[None, :]
    source = grad_ptr, residual_ptr, velocity_ptr, factor_ptr, momentum
    # inf and NaN are always candidates, as the states keep nothing of them
    lower = tl.minimum(tl.load(bounds_ptr + chunk * 4), INF_BITS).to(tl.float32, bitcast=True)
    values, velocity, old, old_velocity = load_values(source, first, offsets, here, C)
    reaches = ~(tl.abs(values) < lower)  # not behind the end, where values are 0
    if C.marks:  # set the bits
        words, number = ones_of(reaches, WORDS)
        tl.store(words_ptr + chunk * words_stride + tile * WORDS + rows, words)
        tl.atomic_add(counts_ptr + chunk * counts_stride + tile // tiles_per_run, number, sem="relaxed")
    if C.leaves:  # leave all but the candidates in the states
        store_tile(residual_ptr + first, offsets, tl.where(reaches, old, values), here, TILE)
        if C.has_velocity:
            store_tile(velocity_ptr + first, offsets, tl.where(reaches, old_velocity, velocity), here, TILE)


@triton.jit(do_not_specialize=["run_words", "k", "room"])
def _list_kernel(
    bounds_ptr,
    words_ptr,
    counts_ptr,
    totals_ptr,  # becomes the number of candidates
    indices_ptr,  # int32 [chunks, room]
    words_stride,
    counts_stride,
    run_words,  # words of a run
    k,
    room,
    C: tl.constexpr,
    place=None,
):
    run, num_runs, chunk = place_of(place)
    run = run.to(tl.int64)
    runs = tl.arange(0, _MAX_RUNS)
    counts = tl.load(counts_ptr + chunk * counts_stride + runs, mask=runs < num_runs, other=0)
    total = tl.sum(counts, 0)
    if run == 0:
        tl.store(totals_ptr + chunk, total)
    if is_missing(total, bounds_ptr, chunk, k, room, C):
        return
    place = chunk * room + tl.sum(tl.where(runs < run, counts, 0), 0)
    first = run * run_words
    last = tl.minimum(first + run_words, words_stride)
    words_ptr += chunk * words_stride
    while first < last:
        slots = first + tl.arange(0, _LISTED_WORDS)
        words = tl.load(words_ptr + slots, mask=slots < last, other=0)
        ones = num_ones(words)
        places = place + tl.cumsum(ones, 0) - ones
        for _ in range(tl.max(ones, 0)):  # every word loses its lowest one
            exists = words != 0
            tl.store(indices_ptr + places, (slots * _WORD + lowest_one(words)).to(tl.int32), mask=exists)
            places += exists.to(tl.int64)
            words = words & (words - 1)
        place += tl.sum(ones, 0)
        first += _LISTED_WORDS


@triton.jit
def load_listed(
    source, indices_ptr, listed_ptr, chunk, chunk_first, slots, mask, room, GATHER: tl.constexpr, C: tl.constexpr
):
    """``v'`` of the candidates at places ``slots`` of the list; with ``GATHER`` it is read from the unit and listed."""
    if GATHER:
        indices = tl.load(indices_ptr + chunk * room + slots, mask=mask, other=0)
        values, _, _, _ = gather_values(source, chunk_first + indices, mask, C)
        tl.store(listed_ptr + chunk * room + slots, values, mask=mask)
    else:
        values = tl.load(listed_ptr + chunk * room + slots, mask=mask, other=0.0)
    return values


@triton.jit
def load_marked(source, words_ptr, first, tile_first, offsets, here, C: tl.constexpr):
    """The same as ``load_values``, of a tile; if ``C.left``, all but the candidates have been left in the states."""
    values, velocity, old, old_velocity = load_values(source, first, offsets, here, C)
    if C.left:
        places = tile_first + offsets
        words = tl.load(words_ptr + places // _WORD, mask=offsets < here, other=0)
        marked = ((words >> (places % _WORD).to(tl.int32)) & 1) > 0
        values, velocity = tl.where(marked, values, old), tl.where(marked, velocity, old_velocity)
    return values, velocity, old, old_velocity
