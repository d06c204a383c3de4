"""The kernels of selections: they count the digits of keys, and the entries of tiles.

The k-th largest key is found digit by digit. A kernel counts the values of a digit among the keys that begin with the
digits found before, and every program of the next kernel finds the digit from these 256 counts by itself. Digits have
eight bits, the last one seven. A histogram costs instructions in proportion to its bins; with 256 they take about as
long as reading the elements. A selection that trims a sampled key does this twice: in the sample, and among all
elements of the chunks in which more than k pass. Only counters are added to atomically: they are integers, so the order
does not matter.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ..kernels.launch import launch, temporary
from ..payload import round_up
from ..tiles import chunk_step, remaining
from .keys import LEADING_SHIFT, MAX_FINITE_KEY, MAX_SAMPLE_STRIDE, MIN_SAMPLE, NAN_KEY
from .states import Inputs, gather_values, load_values

TILE, NUM_WARPS = 2048, 8
MAX_PROGRAMS = 512  # in a launch that counts: each has a constant cost besides its tiles
MIN_SHARE = 4  # tiles of a program
ENTRIES_ALIGN = 16  # rows of counts begin at multiples of it
_MIN_SAMPLE, _MAX_SAMPLE_STRIDE = tl.constexpr(MIN_SAMPLE), tl.constexpr(MAX_SAMPLE_STRIDE)
_MAX_FINITE_KEY, _NAN_KEY = tl.constexpr(MAX_FINITE_KEY), tl.constexpr(NAN_KEY)
_BINS = tl.constexpr(256)
DIGITS = 4  # in a key
_LEADING_SHIFT, _LEADING_SIZE = tl.constexpr(LEADING_SHIFT), tl.constexpr(2**LEADING_SHIFT)
_BEHIND = tl.constexpr(LEADING_SHIFT - 15)  # bits of the first two digits behind the leading 11


@triton.jit
def keys_of(values):
    """The keys of fp32 values, as in ``keys.py``."""
    return tl.minimum(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, _NAN_KEY)


@triton.jit
def _sample_size(numel):
    """``(samples, elements per sample)`` of a chunk, int64; see ``sample_positions``."""
    stride = tl.maximum(tl.minimum(numel // _MIN_SAMPLE, _MAX_SAMPLE_STRIDE), 1)
    return numel // stride, stride


@triton.jit
def _rank(numel, k, SAMPLED: tl.constexpr):
    """The rank of the lower bound among the keys, or in their sample, int32."""
    if SAMPLED:
        size, _ = _sample_size(numel)
        whole = tl.maximum(numel, 1)
        return ((size * tl.minimum(k, numel) + whole - 1) // whole).to(tl.int32)
    else:
        return k.to(tl.int32)


@triton.jit
def _prefix(counts_ptr, rank, DIGITS: tl.constexpr):
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


@triton.jit(do_not_specialize=["k", "seed"])
def _digit_kernel(
    grad_ptr,
    residual_ptr,
    velocity_ptr,
    factor_ptr,
    momentum,
    counts_ptr,  # int32 [chunks, 4, 256], zero at first
    numel,
    chunk_numel,
    k,
    seed: tl.int64,
    passing_ptr,
    DIGIT: tl.constexpr,
    SAMPLED: tl.constexpr,
    TRIMMING: tl.constexpr,  # work only if more than k pass
    INPUTS: tl.constexpr,
    TILE: tl.constexpr,
):
    chunk = tl.program_id(1).to(tl.int64)
    if TRIMMING:  # noqa: SIM102  one condition is of compile time
        if tl.load(passing_ptr + chunk) <= k:
            return
    chunk_first = chunk * chunk_numel
    limit = tl.maximum(tl.minimum(chunk_numel, numel - chunk_first), 0)
    counts_ptr += chunk * (4 * _BINS)
    SHIFT: tl.constexpr = 0 if DIGIT == 3 else 23 - 8 * DIGIT
    WIDTH: tl.constexpr = 7 if DIGIT == 3 else 8
    if DIGIT > 0:
        prefix = _prefix(counts_ptr, _rank(limit, k, SAMPLED), DIGIT)
    source = grad_ptr, residual_ptr, velocity_ptr, factor_ptr, momentum
    offsets, bins = tl.arange(0, TILE), tl.arange(0, _BINS)
    totals = tl.zeros((_BINS,), tl.int32)
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
            values = gather_values(source, places, offsets < here, INPUTS)
        else:
            values, _, _, _ = load_values(source, chunk_first + tile * TILE, offsets, here, INPUTS, TILE)
        keys = keys_of(values)
        counted = offsets < here
        if DIGIT == 0:
            digits = keys >> SHIFT
        else:
            digits = (keys >> SHIFT) & ((1 << WIDTH) - 1)
            counted = counted & ((keys >> (SHIFT + WIDTH)) == prefix)
        totals += tl.histogram(digits, _BINS, mask=counted)
        tile += tl.num_programs(0)
    tl.atomic_add(counts_ptr + DIGIT * _BINS + bins, totals, mask=totals > 0, sem="relaxed")


@triton.jit(do_not_specialize=["tiles", "k", "lowest"])
def _count_kernel(
    grad_ptr,
    residual_ptr,
    velocity_ptr,
    factor_ptr,
    momentum,
    counts_ptr,
    bounds_ptr,  # int32 [chunks, 4]: lower, upper, and what _place_kernel adds
    entries_ptr,  # int32 [chunks, 2, entries_stride]: above the bounds, between them
    entries_stride,
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
    INPUTS: tl.constexpr,
    TILE: tl.constexpr,
):
    chunk = tl.program_id(1).to(tl.int64)
    if TRIMMING:  # noqa: SIM102  one condition is of compile time
        if tl.load(passing_ptr + chunk) <= k:
            return
    chunk_first = chunk * chunk_numel
    limit = tl.maximum(tl.minimum(chunk_numel, numel - chunk_first), 0)
    if DIGITS == 0:
        lower, upper = lowest.to(tl.int32), tl.full((), _MAX_FINITE_KEY, tl.int32)
    else:
        prefix = _prefix(counts_ptr + chunk * (4 * _BINS), _rank(limit, k, SAMPLED), DIGITS)
        lower = prefix
        upper = prefix
        if DIGITS == 2:  # 16 bits, of which the leading 11 bound the keys
            lower = (prefix >> _BEHIND) << _LEADING_SHIFT
            upper = lower + (_LEADING_SIZE - 1)
        if SAMPLED:
            upper = tl.full((), _MAX_FINITE_KEY, tl.int32)
        lower = tl.maximum(lower, 1)
    if tl.program_id(0) == 0:
        tl.store(bounds_ptr + chunk * 4, lower)
        tl.store(bounds_ptr + chunk * 4 + 1, upper)
    source = grad_ptr, residual_ptr, velocity_ptr, factor_ptr, momentum
    offsets = tl.arange(0, TILE)
    entries_ptr += chunk * 2 * entries_stride
    passing = tl.full((), 0, tl.int32)
    tile = tl.program_id(0).to(tl.int64)
    while tile < tiles:
        here = remaining(limit, tile * TILE, TILE)
        values, _, _, _ = load_values(source, chunk_first + tile * TILE, offsets, here, INPUTS, TILE)
        keys = keys_of(values)
        above = keys > upper
        both = tl.sum(above.to(tl.int32) + ((keys >= lower) & ~above).to(tl.int32) * 65536, 0)
        tl.store(entries_ptr + tile, both & 0xFFFF)
        tl.store(entries_ptr + entries_stride + tile, both >> 16)
        passing += (both & 0xFFFF) + (both >> 16)
        tile += tl.num_programs(0)
    if TRIMMED:
        tl.atomic_add(passing_ptr + chunk, passing, sem="relaxed")


def tiles_of(size: int) -> int:
    """Tiles of a chunk of that many elements, at least one."""
    return max(1, triton.cdiv(size, TILE))


class KernelSelection:
    """Launches the kernels that bound the keys that are sent of every chunk, and count what is in the bounds.

    Args:
        compressor: the sparsifier.
        source: the first arguments of all kernels (``kernel_source`` in ``states.py``).
        inputs: which of them there are.
        size: elements of a chunk.
        chunks: number of chunks.
        seed: seed of the samples.

    Attributes:
        bounds: int32 ``[chunks, 4]``: the keys ``lower`` and ``upper``, and room for two numbers more.
        entries: int32 ``[chunks, 2, at least tiles]``: how many elements of each tile are above the bounds, and between
            them.
    """

    def __init__(self, compressor, source: tuple[Any, ...], inputs: Inputs, size: int, chunks: int, seed: int) -> None:
        self._source, self._inputs, self._size, self._chunks, self._seed = source, inputs, size, chunks, seed
        self._k, self._device = compressor.capacity(size), source[0].device
        self._max_programs = max(1, MAX_PROGRAMS // chunks)
        columns = round_up(tiles_of(size), ENTRIES_ALIGN)
        self.bounds = temporary(chunks, 4, dtype=torch.int32, device=self._device)
        self.entries = temporary(chunks, 2, columns, dtype=torch.int32, device=self._device)
        self._passing = self.bounds  # an argument that is not read must still be a tensor

    def select_by_key(self, key: int) -> None:
        """Let ``key`` be the lower bound of all chunks, and count."""
        self._count_entries(self.bounds, digits=0, lowest=key)

    def select_by_digits(
        self, digits: int, sampled: bool = False, counts_passing: bool = False, trimming: bool = False
    ) -> None:
        """Bound the k-th largest key of every chunk by its leading digits, and count.

        Args:
            digits: number of digits: 4 for the key itself, 2 for its leading 11 bits.
            sampled: find the key in the chunk's sample, at the rank that corresponds to ``k``; it is the lower bound
                alone.
            counts_passing: add up how many elements of a chunk are not below the lower bound.
            trimming: do nothing in chunks where at most ``k`` elements were counted so before.
        """
        if counts_passing:
            self._passing = self._zeros(self._chunks)
        counts = self._zeros(self._chunks, DIGITS, _BINS.value)
        # a sample is read one by one, which takes registers
        tile, numel = (TILE // 2, self._size // MAX_SAMPLE_STRIDE) if sampled else (TILE, self._size)
        share = tile if sampled else tile * MIN_SHARE  # a sample is small: its tiles go to all SMs
        programs = max(1, min(triton.cdiv(numel, share), self._max_programs))
        for digit in range(digits):
            launch(
                _digit_kernel,
                (programs, self._chunks),
                *(*self._source, counts, *self._places(), self._k, self._seed, self._passing),
                DIGIT=digit,
                SAMPLED=sampled,
                TRIMMING=trimming,
                INPUTS=self._inputs,
                TILE=tile,
                num_warps=NUM_WARPS,
            )
        self._count_entries(counts, digits, 0, sampled, counts_passing, trimming)

    def _count_entries(
        self,
        counts: torch.Tensor,
        digits: int,
        lowest: int,
        sampled: bool = False,
        counts_passing: bool = False,
        trimming: bool = False,
    ) -> None:
        tiles = tiles_of(self._size)
        launch(
            _count_kernel,
            (min(triton.cdiv(tiles, MIN_SHARE), self._max_programs), self._chunks),
            *(*self._source, counts, self.bounds, self.entries, self.entries.stride(1)),
            *(*self._places(), tiles, self._k, lowest, self._passing),
            DIGITS=digits,
            SAMPLED=sampled,
            TRIMMED=counts_passing,
            TRIMMING=trimming,
            INPUTS=self._inputs,
            TILE=TILE,
            num_warps=NUM_WARPS,
        )

    def _places(self) -> tuple[int, int]:
        """Elements of the unit, and from chunk to chunk."""
        return self._source[0].numel(), chunk_step(self._size, self._chunks)

    def _zeros(self, *shape: int) -> torch.Tensor:
        return temporary(*shape, dtype=torch.int32, device=self._device, zeroed=True)
