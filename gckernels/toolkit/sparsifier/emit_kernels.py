"""The kernels that put the entries of a chunk side by side, in the order of their indices.

One of them emits what has been found among the candidates. The other selects in chunks that one program holds in its
registers, which takes no candidates, and emits at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..kernels.places import place_of
from ..kernels.seeds import seed_of
from ..numeric import is_finite
from ..payload import HEADER_NBYTES, STATUS_OK
from ..tiles import remaining, store_tile
from .candidates_kernels import is_missing, load_listed, load_marked
from .keys import MAX_FINITE_KEY
from .narrowing_kernels import LEADING_SIZE, MAX_PROGRAMS, bounds_of, of_both, share_of
from .selection_kernels import keys_of, kth_largest, leading, sample_places, sample_rank
from .states import gather_values, load_values

MAX_FINITE = tl.constexpr(MAX_FINITE_KEY)
_MAX_PROGRAMS, _STATUS = tl.constexpr(MAX_PROGRAMS), tl.constexpr(STATUS_OK)
_HIGHS_OFFSET = tl.constexpr(HEADER_NBYTES)  # the string is the first field


@triton.jit
def _places(keys, lower, upper, of_above, of_between, k, room):
    """``(whether an element is sent, its place among the entries)``, given the numbers of elements before; and these
    numbers behind the last one."""
    above, between, both = of_both(keys, lower, upper)
    ranks = tl.cumsum(both, 0)
    total = tl.sum(both, 0)
    above_before, between_before = of_above + (ranks & 0xFFFF), of_between + (ranks >> 16)
    sent = (above & (above_before <= k)) | (between & (between_before <= room))
    places = above_before + tl.minimum(between_before, room) - 1
    return sent, places, of_above + (total & 0xFFFF), of_between + (total >> 16)


@triton.jit
def _begin(payload_ptr, highs_words, program, programs, TILE: tl.constexpr):
    """Write the header, and clear the string, into which ones are written later."""
    if program == 0:
        words = tl.arange(0, 4)
        tl.store(payload_ptr.to(tl.pointer_type(tl.int32)) + words, tl.where(words == 0, _STATUS, 0))
    highs_ptr = (payload_ptr + _HIGHS_OFFSET).to(tl.pointer_type(tl.int32))
    slots = program.to(tl.int64) * TILE + tl.arange(0, TILE)
    for _ in range((highs_words + programs * TILE - 1) // (programs * TILE)):
        tl.store(highs_ptr + slots, tl.zeros((TILE,), tl.int32), mask=slots < highs_words)
        slots += programs * TILE


@triton.jit
def _emit_tile(
    tile_values,  # as load_values returns them
    sent,
    places,
    indices,
    sent_ptrs,
    states_ptrs,  # at the tile's first element
    here,
    C: tl.constexpr,
):
    """Store the entries of a tile of elements, and its states."""
    values, velocity, old, old_velocity = tile_values
    finite = keys_of(values) <= MAX_FINITE  # the keys are there already: a comparison of values takes more registers
    indices_ptr, values_ptr, velocities_ptr = sent_ptrs
    residual_ptr, velocity_ptr = states_ptrs
    TILE: tl.constexpr = C.tile
    offsets = tl.arange(0, TILE)
    tl.store(indices_ptr + places, indices.to(tl.int32), mask=sent)
    tl.store(values_ptr + places, values, mask=sent)
    if C.has_residual:
        # unless values are exact, the old states are needed when the entries are written
        left = tl.where(sent, 0.0 if C.exact else old, values)
        store_tile(residual_ptr, offsets, tl.where(finite, left, old), here, TILE)
        if C.has_velocity:
            if not C.exact:
                tl.store(velocities_ptr + places, velocity, mask=sent)
            left = tl.where(sent, 0.0 if C.exact else old_velocity, velocity)
            store_tile(velocity_ptr, offsets, tl.where(finite, left, old_velocity), here, TILE)


@triton.jit(do_not_specialize=["k", "room", "highs_words"])
def _emit_kernel(
    grad_ptr,
    residual_ptr,
    velocity_ptr,
    factor_ptr,
    momentum,
    bounds_ptr,  # int32 [chunks, 4]; the last column becomes the number of entries
    words_ptr,
    totals_ptr,
    indices_ptr,
    listed_ptr,
    digits_ptr,
    entries_ptr,
    sent_indices_ptr,  # int32 [chunks, k]
    sent_values_ptr,  # fp32 [chunks, k]
    sent_velocities_ptr,  # fp32 [chunks, k], where there is a velocity and values are not exact
    payload_ptr,  # uint8 [chunks, payload_stride]
    words_stride,
    numel,
    chunk_numel,
    k,
    room,
    payload_stride,
    highs_words,  # padding included
    C: tl.constexpr,
    place=None,
):
    TILE: tl.constexpr = C.tile
    program, programs, chunk = place_of(place)
    chunk_first = chunk * chunk_numel
    source = grad_ptr, residual_ptr, velocity_ptr, factor_ptr, momentum
    sent_ptrs = sent_indices_ptr + chunk * k, sent_values_ptr + chunk * k, sent_velocities_ptr + chunk * k
    lower, upper = bounds_of(bounds_ptr, digits_ptr, chunk, k, C)
    offsets = tl.arange(0, TILE)
    _begin(payload_ptr + chunk * payload_stride, highs_words, program, programs, TILE)

    each = tl.arange(0, _MAX_PROGRAMS)
    entries_ptr += chunk * 2 * programs + each
    above = tl.load(entries_ptr, mask=each < programs, other=0)
    between = tl.load(entries_ptr + programs, mask=each < programs, other=0)
    of_above = tl.sum(tl.where(each < program, above, 0), 0)  # before those of this program
    of_between = tl.sum(tl.where(each < program, between, 0), 0)
    all_above = tl.sum(above, 0)
    left_over = tl.maximum(k - all_above, 0).to(tl.int32)  # room for those between
    if program == 0:
        count = tl.minimum(all_above, k).to(tl.int32) + tl.minimum(tl.sum(between, 0), left_over)
        tl.store(bounds_ptr + chunk * 4 + 3, count)

    total = tl.load(totals_ptr + chunk)
    if is_missing(total, bounds_ptr, chunk, k, room, C):
        limit = tl.maximum(tl.minimum(chunk_numel, numel - chunk_first), 0)
        tile, last = share_of(limit, program, programs, TILE)
        while tile < last:
            here = remaining(limit, tile * TILE, TILE)
            first = chunk_first + tile * TILE
            marks_ptr = words_ptr + chunk * words_stride
            loaded = load_marked(source, marks_ptr, first, tile * TILE, offsets, here, C)
            sent, places, of_above, of_between = _places(
                keys_of(loaded[0]), lower, upper, of_above, of_between, k, left_over
            )
            states_ptrs = residual_ptr + first, velocity_ptr + first
            indices = tile * TILE + offsets
            _emit_tile(loaded, sent, places, indices, sent_ptrs, states_ptrs, here, C)
            tile += 1
    else:
        indices_of_sent_ptr, values_of_sent_ptr, velocities_of_sent_ptr = sent_ptrs
        tile, last = share_of(total, program, programs, TILE)
        while tile < last:
            slots = tile * TILE + offsets
            exists = slots < total
            indices = tl.load(indices_ptr + chunk * room + slots, mask=exists, other=0)
            values = load_listed(source, indices_ptr, listed_ptr, chunk, chunk_first, slots, exists, room, False, C)
            sent, places, of_above, of_between = _places(
                keys_of(values), lower, upper, of_above, of_between, k, left_over
            )
            tl.store(indices_of_sent_ptr + places, indices, mask=sent)
            tl.store(values_of_sent_ptr + places, values, mask=sent)
            if C.has_residual:
                kept = exists & is_finite(values)
                if not C.exact:  # the states of entries are left when these are written
                    kept = kept & (sent == 0)
                if C.has_velocity:
                    _, velocity, _, _ = gather_values(source, chunk_first + indices, exists, C)
                    if not C.exact:
                        tl.store(velocities_of_sent_ptr + places, velocity, mask=sent)
                    tl.store(velocity_ptr + chunk_first + indices, tl.where(sent, 0.0, velocity), mask=kept)
                tl.store(residual_ptr + chunk_first + indices, tl.where(sent, 0.0, values), mask=kept)
            tile += 1


@triton.jit(do_not_specialize=["k", "highs_words", "lowest", "seed"])
def _select_kernel(
    grad_ptr,
    residual_ptr,
    velocity_ptr,
    factor_ptr,
    momentum,
    bounds_ptr,  # int32 [chunks, 4]; the last column becomes the number of entries
    sent_indices_ptr,  # int32 [chunks, k]
    sent_values_ptr,  # fp32 [chunks, k]
    sent_velocities_ptr,  # fp32 [chunks, k], where there is a velocity and values are not exact
    payload_ptr,  # uint8 [chunks, payload_stride]
    numel,
    chunk_numel,
    k,
    payload_stride,
    highs_words,  # padding included
    lowest,  # the first bound, if there is no sample
    seed: tl.int64,
    C: tl.constexpr,
    place=None,
    added_ptr=None,
):
    TILE: tl.constexpr = C.tile
    program, _, chunk = place_of(place)
    first = chunk * chunk_numel
    source = grad_ptr, residual_ptr, velocity_ptr, factor_ptr, momentum
    here = remaining(tl.minimum(chunk_numel, numel - first), 0, TILE)
    offsets = tl.arange(0, TILE)
    lower, upper = tl.maximum(lowest, 1).to(tl.int32), tl.full((), MAX_FINITE, tl.int32)
    if C.samples > 0:
        size = here.to(tl.int64)
        places, exists = sample_places(seed_of(seed, added_ptr), first, size, tl.arange(0, C.samples), True)
        sample, _, _, _ = gather_values(source, places, exists, C)
        keys = tl.where(exists, keys_of(sample), -1)
        lower = tl.maximum(kth_largest(keys, sample_rank(size, k, True), tl.sum(exists.to(tl.int32), 0)), 1)
    loaded = load_values(source, first, offsets, here, C)
    keys = tl.where(offsets < here, keys_of(loaded[0]), -1)
    if C.digits > 0:
        key = kth_largest(keys, k.to(tl.int32), here)
        if C.digits == 2:
            upper = leading(key) + (LEADING_SIZE - 1)
            lower = tl.maximum(leading(key), lower)
        else:
            lower = tl.maximum(key, lower)
            upper = lower
    _begin(payload_ptr + chunk * payload_stride, highs_words, program, 1, TILE)
    above, between, _ = of_both(keys, lower, upper)
    all_above = tl.sum(above.to(tl.int32), 0)
    left_over = tl.maximum(k - all_above, 0).to(tl.int32)
    count = tl.minimum(all_above, k).to(tl.int32) + tl.minimum(tl.sum(between.to(tl.int32), 0), left_over)
    tl.store(bounds_ptr + chunk * 4 + 3, count)
    sent, places, _, _ = _places(keys, lower, upper, 0, 0, k, left_over)
    sent_ptrs = sent_indices_ptr + chunk * k, sent_values_ptr + chunk * k, sent_velocities_ptr + chunk * k
    states_ptrs = residual_ptr + first, velocity_ptr + first
    _emit_tile(loaded, sent, places, offsets, sent_ptrs, states_ptrs, here, C)
