"""The kernels that bound the candidates of a chunk from below: a sample, and a key that is found in it.

Where the rule names a sample (``by_sample`` in ``rules.py``), the bound is the key of a rank in that sample. Otherwise
the kernels choose a sample and a rank of their own, so that at least ``k`` elements will reach the key, but not many
more. Where they are too few all the same, the whole chunk is searched (``narrowing_kernels.py``).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..kernels.places import place_of
from ..kernels.seeds import seed_of
from ..random import philox_tile
from .keys import LEADING_SHIFT, MAX_FINITE_KEY, MAX_SAMPLE_STRIDE, MIN_SAMPLE, NAN_KEY
from .states import gather_values

SAMPLES = 2**14
"""Number of samples at most that one program finds a bound in, all in registers."""
BINS = 256
"""Values of a digit of a key."""
DIGITS = 4
"""Digits of a key: three of eight bits and one of seven."""
_ZEROS = tl.constexpr(1024)
_BINS, _DIGITS = tl.constexpr(BINS), tl.constexpr(DIGITS)
_MIN_SAMPLE, _MAX_SAMPLE_STRIDE = tl.constexpr(MIN_SAMPLE), tl.constexpr(MAX_SAMPLE_STRIDE)
_SAMPLES = tl.constexpr(SAMPLES)
_LEADING_SHIFT = tl.constexpr(LEADING_SHIFT)
_MAX_FINITE_KEY, _NAN_KEY = tl.constexpr(MAX_FINITE_KEY), tl.constexpr(NAN_KEY)


@triton.jit
def keys_of(values):
    """The keys of fp32 values, as in ``keys.py``."""
    return tl.minimum(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, _NAN_KEY)


@triton.jit
def leading(keys):
    """Keys without the bits behind the leading 11."""
    return (keys >> _LEADING_SHIFT) << _LEADING_SHIFT


@triton.jit
def sample_size(numel, BY_SAMPLE: tl.constexpr):
    """``(samples, elements per sample)`` of a chunk, int64; see ``sample_positions`` for the specified sample."""
    if BY_SAMPLE:
        stride = tl.maximum(tl.minimum(numel // _MIN_SAMPLE, _MAX_SAMPLE_STRIDE), 1)
    else:
        stride = tl.maximum((numel + _SAMPLES - 1) // _SAMPLES, 1)
    return numel // stride, stride


@triton.jit
def sample_rank(numel, k, BY_SAMPLE: tl.constexpr):
    """The rank of the lower bound in the sample, int32.

    Four standard deviations of the rank in a sample of the kernels' own make it unlikely that fewer than ``k`` elements
    reach its key. If all elements are in the sample the rank is exact.
    """
    size, stride = sample_size(numel, BY_SAMPLE)
    whole = tl.maximum(numel, 1)
    rank = ((size * tl.minimum(k, numel) + whole - 1) // whole).to(tl.int32)
    if not BY_SAMPLE:
        share = rank.to(tl.float32) / (size + 1).to(tl.float32)
        margin = (4.0 * tl.sqrt(rank.to(tl.float32) * (1.0 - share))).to(tl.int32) + 2
        rank += tl.where(stride > 1, margin, 0)
    return rank


@triton.jit
def prefix_of(counts_ptr, rank, DIGITS: tl.constexpr):
    """The first ``DIGITS`` digits of the key of that rank, from counts ``[digits, 256]``; 0 if there are too few."""
    bins = tl.arange(0, _BINS)
    prefix = tl.full((), 0, tl.int32)
    for digit in tl.static_range(DIGITS):
        counts = tl.load(counts_ptr + digit * _BINS + bins)
        reach = tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts  # keys of this digit or a larger one
        found = tl.maximum(tl.sum((reach >= rank).to(tl.int32), 0) - 1, 0)
        rank -= tl.sum(tl.where(bins > found, counts, 0), 0)
        prefix = (prefix << (7 if digit == 3 else 8)) | found
    return prefix


@triton.jit
def count_digits(keys, counted, prefix, DIGIT: tl.constexpr):
    """How many of the ``counted`` keys that begin with the digits ``prefix`` have each value of the next digit."""
    SHIFT: tl.constexpr = 0 if DIGIT == 3 else 23 - 8 * DIGIT
    WIDTH: tl.constexpr = 7 if DIGIT == 3 else 8
    if DIGIT == 0:
        digits = keys >> SHIFT
    else:
        digits = (keys >> SHIFT) & ((1 << WIDTH) - 1)
        counted = counted & ((keys >> (SHIFT + WIDTH)) == prefix)
    return tl.histogram(digits, _BINS, mask=counted)


@triton.jit
def kth_largest(keys, rank, numel):
    """The key of that rank among ``keys``, of which those that do not count are -1; 0 if there are fewer than that.

    Bisection counts: at least ``rank`` keys reach ``low``, fewer reach ``high``.
    """
    low, high = tl.full((), 0, tl.int32), tl.full((), _NAN_KEY + 1, tl.int32)
    while high - low > 1:
        middle = low + (high - low) // 2
        enough = tl.sum((keys >= middle).to(tl.int32), 0) >= rank
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
    return tl.where((rank > 0) & (rank <= numel), low, 0)


@triton.jit
def sample_places(seed, chunk_first, numel, slots, BY_SAMPLE: tl.constexpr):
    """The positions in the unit of the samples ``slots``, int64, of a chunk; and whether there are such samples."""
    size, stride = sample_size(numel, BY_SAMPLE)
    starts = slots.to(tl.int64) * stride
    if BY_SAMPLE:
        word, _, _, _ = philox_tile(seed, (chunk_first + starts).to(tl.uint32))
        word = word.to(tl.int64) & 0xFFFFFFFF
    else:  # the golden ratio spreads evenly
        word = (slots.to(tl.int64) * 0x9E3779B9) & 0xFFFFFFFF
    return chunk_first + starts + (word * stride >> 32), slots < size


@triton.jit(do_not_specialize=["seed"])
def _sample_kernel(
    grad_ptr,
    residual_ptr,
    velocity_ptr,
    factor_ptr,
    momentum,
    samples_ptr,  # fp32 [chunks, samples_stride]
    samples_stride,
    numel,
    chunk_numel,
    seed: tl.int64,
    C: tl.constexpr,
    place=None,
    added_ptr=None,
):
    program, _, chunk = place_of(place)
    chunk_first = chunk * chunk_numel
    limit = tl.maximum(tl.minimum(chunk_numel, numel - chunk_first), 0)
    slots = program.to(tl.int64) * C.tile + tl.arange(0, C.tile)
    places, exists = sample_places(seed_of(seed, added_ptr), chunk_first, limit, slots, C.by_sample)
    source = grad_ptr, residual_ptr, velocity_ptr, factor_ptr, momentum
    values, _, _, _ = gather_values(source, places, exists, C)
    tl.store(samples_ptr + chunk * samples_stride + slots, values, mask=exists)


@triton.jit(do_not_specialize=["k"])
def _sample_digit_kernel(
    samples_ptr,  # fp32 [chunks, samples_stride]
    counts_ptr,  # int32 [chunks, 4, 256], zero at first
    samples_stride,
    numel,
    chunk_numel,
    k,
    C: tl.constexpr,
    place=None,
):
    TILE: tl.constexpr = C.tile
    program, programs, chunk = place_of(place)
    limit = tl.maximum(tl.minimum(chunk_numel, numel - chunk * chunk_numel), 0)
    size, _ = sample_size(limit, True)
    counts_ptr += chunk * (_DIGITS * _BINS)
    prefix = prefix_of(counts_ptr, sample_rank(limit, k, True), C.digit)
    totals = tl.zeros((_BINS,), tl.int32)
    tile = program.to(tl.int64)
    while tile * TILE < size:
        slots = tile * TILE + tl.arange(0, TILE)
        values = tl.load(samples_ptr + chunk * samples_stride + slots, mask=slots < size, other=0.0)
        totals += count_digits(keys_of(values), slots < size, prefix, C.digit)
        tile += programs
    tl.atomic_add(counts_ptr + C.digit * _BINS + tl.arange(0, _BINS), totals, mask=totals > 0, sem="relaxed")


@triton.jit
def _clear(counts_ptr, count, ZEROS: tl.constexpr):
    """Store ``count`` zeros."""
    first = tl.full((), 0, tl.int32)
    while first < count:
        slots = first + tl.arange(0, ZEROS)
        tl.store(counts_ptr + slots, tl.zeros((ZEROS,), tl.int32), mask=slots < count)
        first += ZEROS


@triton.jit(do_not_specialize=["runs", "samples_stride", "k", "lowest"])
def _bound_kernel(
    samples_ptr,  # fp32 [chunks, samples_stride], if there are samples
    sample_counts_ptr,  # int32 [chunks, 4, 256], if they are counted
    bounds_ptr,  # int32 [chunks, 4]: lower, upper, and room for two numbers more
    runs_ptr,  # int32 [chunks, runs], which become 0
    runs,
    counts_ptr,  # int32 [chunks, 4, 256], which become 0
    samples_stride,
    numel,
    chunk_numel,
    k,
    lowest,  # the bound, if there are neither samples nor digits
    C: tl.constexpr,
    place=None,
):
    _, _, chunk = place_of(place)
    limit = tl.maximum(tl.minimum(chunk_numel, numel - chunk * chunk_numel), 0)
    lower = lowest.to(tl.int32)
    if C.counted:
        lower = prefix_of(sample_counts_ptr + chunk * (_DIGITS * _BINS), sample_rank(limit, k, C.by_sample), _DIGITS)
    if C.samples > 0:
        size, _ = sample_size(limit, C.by_sample)
        slots = tl.arange(0, C.samples)
        values = tl.load(samples_ptr + chunk * samples_stride + slots, mask=slots < size, other=0.0)
        keys = tl.where(slots < size, keys_of(values), -1)
        lower = kth_largest(keys, sample_rank(limit, k, C.by_sample), size.to(tl.int32))
    if C.digits == 2:
        lower = leading(lower)
    tl.store(bounds_ptr + chunk * 4, tl.maximum(lower, 1))  # zeros are not sent
    tl.store(bounds_ptr + chunk * 4 + 1, _MAX_FINITE_KEY)
    _clear(runs_ptr + chunk * runs, runs, _ZEROS)
    _clear(counts_ptr + chunk * (_DIGITS * _BINS), _DIGITS * _BINS, _ZEROS)
