"""The kernels that encode for :mod:`~gckernels.toolkit.sparse`: count digits, count tiles, place tiles, emit entries.

The k-th largest key is found digit by digit: a kernel counts the values of a digit among the keys that begin with the
digits found before, and every program of the next kernel finds the digit from these 2048 counts by itself. Where a
sampled key is trimmed this happens twice, in the sample and, after a count of what passes, among all; the second time
every program ends at once if no more than k pass. Then the entries of every tile are counted, one program per chunk
says where each tile's entries go, and the emitting kernel puts them side by side and leaves what is not sent in the
residual; ``sparse_entries_kernels.py`` writes them. Counters are the only thing that is added to atomically: integers,
whose order does not show.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from . import sparse_entries_kernels
from .launch import launch
from .map_kernels import chunk_step
from .map_tiles import load_tile, remaining, store_tile
from .numeric import is_finite, to_fp32
from .payload import STATUS_OK
from .sparse_keys import LARGEST_FINITE, NAN_KEY, SAMPLE_STRIDE, SMALLEST_SAMPLE
from .sparse_memory import accumulate, launch_factor

if TYPE_CHECKING:
    from .sparse import Sparsifier
    from .sparse_memory import Memory

TILE, NUM_WARPS = 4096, 8
MAX_PROGRAMS = 512  # that count, per launch: each has a share in a constant effort
SMALLEST_SHARE = 4  # tiles
PLACED_TILE = 1024  # tiles that are given their places at once
_SMALLEST_SAMPLE, _SAMPLE_STRIDE = tl.constexpr(SMALLEST_SAMPLE), tl.constexpr(SAMPLE_STRIDE)
_LARGEST_FINITE, _NAN_KEY = tl.constexpr(LARGEST_FINITE), tl.constexpr(NAN_KEY)
_BINS = tl.constexpr(2048)


@triton.jit
def _keys(values):
    return tl.minimum(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, _NAN_KEY)


@triton.jit
def _load_values(
    grad_ptr,
    residual_ptr,
    velocity_ptr,
    factor_ptr,
    momentum,
    first,
    offsets,
    here,
    HAS_RESIDUAL: tl.constexpr,
    HAS_VELOCITY: tl.constexpr,
    NESTEROV: tl.constexpr,
    CLIPPED: tl.constexpr,
    TILE: tl.constexpr,
):
    """``(what is selected from, new velocity, old residual, old velocity)`` of a tile; the gradient for what is not."""
    gradient = load_tile(grad_ptr + first, offsets, here, TILE)
    kept = gradient
    velocity = gradient
    if HAS_RESIDUAL:
        kept = load_tile(residual_ptr + first, offsets, here, TILE)
    if HAS_VELOCITY:
        velocity = load_tile(velocity_ptr + first, offsets, here, TILE)
    values, new_velocity = accumulate(
        gradient, kept, velocity, factor_ptr, momentum, HAS_RESIDUAL, HAS_VELOCITY, NESTEROV, CLIPPED
    )
    return values, new_velocity, kept, velocity


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
    velocity_ptr,
    factor_ptr,
    momentum,
    counts_ptr,  # int32 [chunks, 3, 2048], zero at first
    numel,
    chunk_numel,
    k,
    seed: tl.int64,
    passing_ptr,
    DIGIT: tl.constexpr,
    SAMPLED: tl.constexpr,
    TRIMMING: tl.constexpr,  # work only if more than k pass
    HAS_RESIDUAL: tl.constexpr,
    HAS_VELOCITY: tl.constexpr,
    NESTEROV: tl.constexpr,
    CLIPPED: tl.constexpr,
    TILE: tl.constexpr,
):
    chunk = tl.program_id(1).to(tl.int64)
    if TRIMMING:  # noqa: SIM102  one condition is of compile time
        if tl.load(passing_ptr + chunk) <= k:
            return
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
            gradient = to_fp32(tl.load(grad_ptr + places, mask=offsets < here, other=0.0))
            kept = gradient
            velocity = gradient
            if HAS_RESIDUAL:
                kept = tl.load(residual_ptr + places, mask=offsets < here, other=0.0)
            if HAS_VELOCITY:
                velocity = tl.load(velocity_ptr + places, mask=offsets < here, other=0.0)
            values, _ = accumulate(
                gradient, kept, velocity, factor_ptr, momentum, HAS_RESIDUAL, HAS_VELOCITY, NESTEROV, CLIPPED
            )
        else:
            values, _, _, _ = _load_values(
                grad_ptr,
                residual_ptr,
                velocity_ptr,
                factor_ptr,
                momentum,
                chunk_first + tile * TILE,
                offsets,
                here,
                HAS_RESIDUAL,
                HAS_VELOCITY,
                NESTEROV,
                CLIPPED,
                TILE,
            )
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
    velocity_ptr,
    factor_ptr,
    momentum,
    counts_ptr,
    bounds_ptr,  # int32 [chunks, 4]: lower, upper, and what _place_kernel adds
    entries_ptr,  # int32 [chunks, 2, tiles]: above the bounds, between them
    numel,
    chunk_numel,
    tiles,
    k,
    lowest,
    passing_ptr,  # int32 [chunks]: how many elements pass
    DIGITS: tl.constexpr,
    SAMPLED: tl.constexpr,
    TRIMMED: tl.constexpr,  # count what passes
    TRIMMING: tl.constexpr,  # work only if more than k pass
    HAS_RESIDUAL: tl.constexpr,
    HAS_VELOCITY: tl.constexpr,
    NESTEROV: tl.constexpr,
    CLIPPED: tl.constexpr,
    TILE: tl.constexpr,
):
    chunk = tl.program_id(1).to(tl.int64)
    if TRIMMING:  # noqa: SIM102  one condition is of compile time
        if tl.load(passing_ptr + chunk) <= k:
            return
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
    passing = tl.full((), 0, tl.int32)
    tile = tl.program_id(0).to(tl.int64)
    while tile < tiles:
        here = remaining(limit, tile * TILE, TILE)
        values, _, _, _ = _load_values(
            grad_ptr,
            residual_ptr,
            velocity_ptr,
            factor_ptr,
            momentum,
            chunk_first + tile * TILE,
            offsets,
            here,
            HAS_RESIDUAL,
            HAS_VELOCITY,
            NESTEROV,
            CLIPPED,
            TILE,
        )
        keys = _keys(values)
        above = keys > upper
        both = tl.sum(above.to(tl.int32) + ((keys >= lower) & ~above).to(tl.int32) * 65536, 0)
        tl.store(entries_ptr + tile, both & 0xFFFF)
        tl.store(entries_ptr + tiles + tile, both >> 16)
        passing += (both & 0xFFFF) + (both >> 16)
        tile += tl.num_programs(0)
    if TRIMMED:
        tl.atomic_add(passing_ptr + chunk, passing, sem="relaxed")


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
    words = tl.arange(0, 4)  # header
    header_ptr = (payload_ptr + chunk * payload_stride).to(tl.pointer_type(tl.int32))
    tl.store(header_ptr + words, tl.where(words == 0, STATUS, 0))


@triton.jit(do_not_specialize=["k"])
def _emit_kernel(
    grad_ptr,
    residual_ptr,
    velocity_ptr,
    factor_ptr,
    momentum,
    bounds_ptr,
    entries_ptr,
    indices_ptr,  # int32 [chunks, k]
    values_ptr,  # fp32 [chunks, k]
    velocities_ptr,  # fp32 [chunks, k], where there is a velocity and values are not exact
    payload_ptr,
    numel,
    chunk_numel,
    payload_stride,
    tiles,
    k,
    highs_words,  # padding included
    HIGHS_OFFSET: tl.constexpr,
    EXACT: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_VELOCITY: tl.constexpr,
    NESTEROV: tl.constexpr,
    CLIPPED: tl.constexpr,
    TILE: tl.constexpr,
):
    tile = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1).to(tl.int64)
    chunk_first = chunk * chunk_numel
    first = chunk_first + tile * TILE
    here = remaining(tl.minimum(chunk_numel, numel - chunk_first), tile * TILE, TILE)
    offsets = tl.arange(0, TILE)
    values, velocity, old, old_velocity = _load_values(
        grad_ptr,
        residual_ptr,
        velocity_ptr,
        factor_ptr,
        momentum,
        first,
        offsets,
        here,
        HAS_RESIDUAL,
        HAS_VELOCITY,
        NESTEROV,
        CLIPPED,
        TILE,
    )
    lower, upper = tl.load(bounds_ptr + chunk * 4), tl.load(bounds_ptr + chunk * 4 + 1)
    room = tl.load(bounds_ptr + chunk * 4 + 2)
    keys = _keys(values)
    above = keys > upper  # not behind the last element, where the keys are 0
    between = (keys >= lower) & ~above
    ranks = tl.cumsum(above.to(tl.int32) + between.to(tl.int32) * 65536, 0)
    of_above = (ranks & 0xFFFF) + tl.load(entries_ptr + chunk * 2 * tiles + tile)
    of_between = (ranks >> 16) + tl.load(entries_ptr + (chunk * 2 + 1) * tiles + tile)
    sent = (above & (of_above <= k)) | (between & (of_between <= room))
    places = of_above + tl.minimum(of_between, room) - 1

    places += chunk * k
    tl.store(indices_ptr + places, (tile * TILE + offsets).to(tl.int32), mask=sent)
    tl.store(values_ptr + places, values, mask=sent)
    if HAS_RESIDUAL:
        # unless nothing is left, what was remembered is needed when the entries are written
        left = tl.where(sent, 0.0 if EXACT else old, values)
        store_tile(residual_ptr + first, offsets, tl.where(is_finite(values), left, old), here, TILE)
        if HAS_VELOCITY:
            if not EXACT:
                tl.store(velocities_ptr + places, velocity, mask=sent)
            velocity = tl.where(sent, 0.0 if EXACT else old_velocity, velocity)
            store_tile(velocity_ptr + first, offsets, tl.where(is_finite(values), velocity, old_velocity), here, TILE)
    slots = tile * TILE + offsets
    if tile * TILE < highs_words:  # into which the ones are put one by one
        highs_ptr = (payload_ptr + chunk * payload_stride + HIGHS_OFFSET).to(tl.pointer_type(tl.int32))
        tl.store(highs_ptr + slots, tl.zeros((TILE,), tl.int32), mask=slots < highs_words)


# -------------------------------------------------------------------- launchers


def _memory(memory: Memory, grad, residual) -> tuple[tuple[Any, ...], dict[str, bool]]:
    """What the kernels select from: their first arguments, gradient, residual, velocity, factor of the gradient,
    momentum; and the compile-time arguments that say which of them there are."""
    kept = velocity = factor = grad  # what is not read must be something all the same
    if residual is not None:
        velocity, kept = residual[: grad.numel()], residual[residual.numel() - grad.numel() :]
        if memory.largest_norm is not None:
            factor = launch_factor(grad, memory.largest_norm)
    flags = {
        "HAS_RESIDUAL": residual is not None,
        "HAS_VELOCITY": residual is not None and memory.states > 1,
        "NESTEROV": memory.nesterov,
        "CLIPPED": factor is not grad,
    }
    return (grad, kept, velocity, factor, memory.momentum), flags


def encode(compressor: Sparsifier, grad, residual, payload, size: int, seed: int) -> None:
    """Launch the encoding of ``grad`` into ``payload [chunks, nbytes]``, each chunk laid out for ``size`` elements."""
    numel, chunks, device = grad.numel(), payload.shape[0], grad.device
    layout, k = compressor.layout(size), compressor.capacity(size)
    tiles = max(1, triton.cdiv(size, TILE))
    step = chunk_step(size, chunks)
    source, remembering = _memory(compressor.memory, grad, residual)
    counting = (min(triton.cdiv(tiles, SMALLEST_SHARE), max(1, MAX_PROGRAMS // chunks)), chunks)
    common = remembering | {"TILE": TILE, "num_warps": NUM_WARPS}
    digits, sampled = compressor.digits, compressor.sampled
    counts = torch.zeros(chunks if digits else 0, 3, 2048, dtype=torch.int32, device=device)
    trimmed = compressor.trimmed
    passing = torch.zeros(chunks, dtype=torch.int32, device=device) if trimmed else counts
    # a sample is read one by one, which takes registers
    digit_tile, read = (TILE // 2, size // SAMPLE_STRIDE) if sampled else (TILE, size)
    reading = (max(1, min(triton.cdiv(read, digit_tile * SMALLEST_SHARE), counting[0])), chunks)
    for digit in range(digits):
        launch(
            _digit_kernel,
            reading,
            *(*source, counts, numel, step, k, seed, passing),
            DIGIT=digit,
            SAMPLED=sampled,
            TRIMMING=False,
            **common | {"TILE": digit_tile},
        )
    bounds = torch.empty(chunks, 4, dtype=torch.int32, device=device)
    entries = torch.empty(chunks, 2, tiles, dtype=torch.int32, device=device)
    lowest = 0 if digits else compressor.lowest
    launch(
        _count_kernel,
        counting,
        *(*source, counts if digits else bounds, bounds, entries, numel, step, tiles, k, lowest, passing),
        DIGITS=digits,
        SAMPLED=sampled,
        TRIMMED=trimmed,
        TRIMMING=False,
        **common,
    )
    if trimmed:
        exact = torch.zeros_like(counts)
        for digit in range(digits):
            launch(
                _digit_kernel,
                counting,
                *(*source, exact, numel, step, k, seed, passing),
                DIGIT=digit,
                SAMPLED=False,
                TRIMMING=True,
                **common,
            )
        launch(
            _count_kernel,
            counting,
            *(*source, exact, bounds, entries, numel, step, tiles, k, lowest, passing),
            DIGITS=digits,
            SAMPLED=False,
            TRIMMED=False,
            TRIMMING=True,
            **common,
        )
    launch(
        _place_kernel,
        (chunks,),
        *(bounds, entries, payload, payload.stride(0), tiles, k),
        STATUS=STATUS_OK,
        TILE=PLACED_TILE,
    )
    indices = torch.empty(chunks, k, dtype=torch.int32, device=device)
    values = torch.empty(chunks, k, dtype=torch.float32, device=device)
    lossless, highs = compressor.value_bits == 32, layout["highs"]
    velocities = torch.empty_like(values) if remembering["HAS_VELOCITY"] and not lossless else values
    launch(
        _emit_kernel,
        (tiles, chunks),
        *(*source, bounds, entries, indices, values, velocities, payload, numel, step, payload.stride(0), tiles, k),
        highs.nbytes // 4,
        HIGHS_OFFSET=highs.offset,
        EXACT=lossless,
        **common,
    )
    remembered = (source[1], source[2]) if residual is not None else None
    sparse_entries_kernels.write(compressor, indices, values, velocities, bounds, remembered, payload, size)
