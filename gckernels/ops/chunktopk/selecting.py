"""Selection of the entries of a group by the kernels of :mod:`~gckernels.ops.chunktopk`.

A group is cut into parts. At least ``K`` elements reach the ``K``-th largest of the parts' largest magnitudes, and
seldom twice as many do: these are candidates, and only they are searched for the ``K``-th largest magnitude. If there
are more candidates than there is room for, as with many equal magnitudes, the whole group is searched.

Elements are marked by bits of words, in the order of their indices, so that only few of them have to be counted and put
in order. Threads exchange words and indices through memory, because a Triton program cannot do it otherwise.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...toolkit.bitpack import lowest_one, num_ones, ones_of
from ...toolkit.kernels.exchange import exchange_barrier
from ...toolkit.numeric import INF_BITS, max_along, to_fp32

MIN_GROUP = 1024  # elements from which on candidates pay
MIN_PART = 4  # elements


def parts_of(group: int, k: int) -> int:
    """The number of parts of a group, and of candidates at most; 0 if all of the group is searched at once."""
    parts = 4 * triton.next_power_of_2(k)
    return parts if group >= max(MIN_GROUP, MIN_PART * parts) else 0


def list_numel(group: int, k: int) -> int:
    """Length of a program's list of indices, which has a bit for every element, candidates, and entries at last."""
    return max(group // 16, parts_of(group, k), k)


@triton.jit
def _magnitudes(values):
    """Magnitudes as int32, in the same order, with NaN as infinity."""
    return tl.minimum(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, INF_BITS)


@triton.jit
def _search(keys, low, high, count_low, wanted, enough, SHIFT: tl.constexpr):
    """Narrow ``low <= v < high`` for the ``wanted``-th largest key ``v``: ``(low, high, count of keys >= high)``.

    It ends when at most ``enough`` keys are ``>= low``, or when ``low`` is ``v``. All keys and bounds are multiples of
    ``2**SHIFT``.
    """
    count_high = tl.full((), 0, tl.int32)
    share = tl.full((), SHIFT + 3, tl.int32)  # an eighth at first, because most keys are hardly larger than `low`
    while (count_low > enough) & ((high - low) >> SHIFT > 1):
        middle = low + tl.maximum((high - low) >> share << SHIFT, 1 << SHIFT)
        share = tl.full((), SHIFT + 1, tl.int32)
        count = tl.sum((keys >= middle).to(tl.int32))
        reached = count >= wanted
        low, high = tl.where(reached, middle, low), tl.where(reached, high, middle)
        count_low, count_high = tl.where(reached, count, count_low), tl.where(reached, count_high, count)
    return low, high, count_high


@triton.jit
def _list(words, list_ptr, WORDS: tl.constexpr, WAITS: tl.constexpr):
    """List the indices of the ones among the bits of ``words``, in order."""
    first = tl.arange(0, WORDS) * 32
    ones = num_ones(words)
    places = tl.cumsum(ones, 0) - ones
    exchange_barrier(WAITS)  # all threads have read what was there
    for _ in range(tl.max(ones, 0)):  # every word loses its lowest one
        tl.store(list_ptr + places, (first + lowest_one(words)).to(tl.int16), mask=words != 0)
        places += 1
        words = words & (words - 1)
    exchange_barrier(WAITS)


@triton.jit
def _list_largest(values, list_ptr, GROUP: tl.constexpr, K: tl.constexpr, SHIFT: tl.constexpr, WAITS: tl.constexpr):
    """List the entries of a group; ``values`` are all its elements, ``[GROUP / 32, 32]``."""
    keys = _magnitudes(values)
    high = tl.max(keys) + (1 << SHIFT)
    low, high, count = _search(keys, tl.full((), 0, tl.int32), high, tl.full((), GROUP, tl.int32), K, K, SHIFT)
    # all keys >= `high`, and as many of the lowest indices between `low` and `high` as are missing
    words, _ = ones_of(keys >= high, GROUP // 32)
    ties, _ = ones_of((keys >= low) & (keys < high), GROUP // 32)
    ones = num_ones(ties)
    missing = K - count - (tl.cumsum(ones, 0) - ones)
    for _ in range(tl.max(ones, 0)):
        words = words | tl.where(missing > 0, ties & -ties, 0)
        ties = ties & (ties - 1)
        missing -= 1
    _list(words, list_ptr, GROUP // 32, WAITS)


@triton.jit
def select(
    values,  # [GROUP / 32, 32], all elements of the group
    grad_ptr,  # the group's first element, like the next
    residual_ptr,
    here,  # elements in the tensors; all others are 0
    list_ptr,  # int16 [list_numel], of this program alone
    GROUP: tl.constexpr,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    SHIFT: tl.constexpr,  # lowest bits of all values that are 0
    HAS_RESIDUAL: tl.constexpr,
    WAITS: tl.constexpr,
):
    """List the indices of the ``K`` entries, and return the largest magnitude, as int32."""
    if PARTS == 0:
        _list_largest(values, list_ptr, GROUP, K, SHIFT, WAITS)
        return tl.max(_magnitudes(values))
    else:
        maxima = _magnitudes(max_along(tl.reshape(tl.abs(values), (GROUP // PARTS, PARTS)), 0))
        largest = tl.max(maxima, 0)
        high = largest + (1 << SHIFT)
        parts = tl.full((), PARTS, tl.int32)
        low, _, _ = _search(maxima, tl.min(maxima, 0), high, parts, K, K + K // 2, SHIFT)
        words, listed = ones_of(tl.abs(values) >= low.to(tl.float32, bitcast=True), GROUP // 32)
        # through memory, or all threads that have set bits of a word would go on with it; in an order in which threads
        # load one word at a time, as they list them
        places = tl.arange(0, GROUP // 32)
        words_ptr = list_ptr.to(tl.pointer_type(tl.int32)) + places % 32 * (GROUP // 1024) + places // 32
        tl.store(words_ptr, words)
        exchange_barrier(WAITS)
        words = tl.load(words_ptr)
        if (listed <= PARTS) & (largest < INF_BITS):
            _list(words, list_ptr, GROUP // 32, WAITS)
            slots = tl.arange(0, PARTS)
            mask = slots < listed
            indices = tl.load(list_ptr + slots).to(tl.int32)  # any numbers behind those that are listed
            inside = mask & (indices < here)
            entries = to_fp32(tl.load(grad_ptr + indices, mask=inside, other=0.0))
            if HAS_RESIDUAL:
                entries += tl.load(residual_ptr + indices, mask=inside, other=0.0)
            keys = tl.where(mask, _magnitudes(entries), -1)
            low, high, count = _search(keys, low, high, listed, K, K, SHIFT)
            # all keys >= `high`, and as many of the first between `low` and `high` as are missing
            is_tie = (keys >= low) & (keys < high)
            ranks = tl.cumsum((keys >= high).to(tl.int32) + is_tie.to(tl.int32) * 65536, 0)
            ties = ranks >> 16
            slots = (ranks & 0xFFFF) + tl.minimum(ties, K - count) - 1
            exchange_barrier(WAITS)  # all threads have read the candidates
            chosen = (keys >= high) | (is_tie & (ties <= K - count))
            tl.store(list_ptr + slots, indices.to(tl.int16), mask=chosen)
            exchange_barrier(WAITS)
        else:
            _list_largest(values, list_ptr, GROUP, K, SHIFT, WAITS)
        return largest
