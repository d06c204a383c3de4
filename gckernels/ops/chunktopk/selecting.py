"""Selection of the entries of groups by the kernels of :mod:`~gckernels.ops.chunktopk`.

A large group is cut into parts. At least ``K`` elements reach the ``K``-th largest of the parts' largest magnitudes,
and seldom twice as many do: these are candidates, and only they are searched for the ``K``-th largest magnitude. If
there are more candidates than there is room for, as with many equal magnitudes, the whole group is searched. So are
groups that are small (``groups.py``) or of which a large share is sent.

Elements are marked by bits of words, in the order of their indices, so that only few of them have to be counted and put
in order. Threads exchange words and indices through memory, because a Triton program cannot do it otherwise.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...toolkit.bitpack import lowest_one, lowest_ones, num_ones, ones_of
from ...toolkit.kernels.exchange import exchange_barrier
from ...toolkit.numeric import INF_BITS, max_along, to_fp32
from .groups import (
    NUMEL_OF_PROGRAM,
    any_of,
    as_groups,
    bounds_of,
    count_of,
    for_elements,
    for_rows,
    groups_per_program,
    words_of,
)

MIN_PART = 4  # elements


def parts_of(group: int, k: int) -> int:
    """The number of parts of a group, and of candidates at most; 0 if all of the group is searched at once."""
    parts = 4 * triton.next_power_of_2(k)
    return parts if group > NUMEL_OF_PROGRAM.value and group >= MIN_PART * parts else 0


def list_numel(group: int, k: int) -> int:
    """Length of a program's list of indices, which has a bit for every element, candidates, and entries at last."""
    groups = groups_per_program(group)
    return max(groups * group // 16, parts_of(group, k), groups * k)


@triton.jit
def _bits(values):
    return values.to(tl.int32, bitcast=True)


@triton.jit
def _magnitudes(values):
    """Magnitudes with NaN as infinity. Their bits are in the same order."""
    return tl.minimum(_bits(values) & 0x7FFFFFFF, INF_BITS).to(tl.float32, bitcast=True)


@triton.jit
def _reach(keys, bounds):
    """Whether each key is at least its group's bound, which is given as bits."""
    return keys >= for_elements(bounds.to(tl.float32, bitcast=True))


@triton.jit
def _search(keys, low, high, count_low, wanted, enough, SHIFT: tl.constexpr, FIRST_SHARE: tl.constexpr):
    """Narrow ``low <= v < high`` for the ``wanted``-th largest key ``v`` of every group.

    It ends when at most ``enough`` keys are ``>= low``, or when ``low`` is ``v``. Bounds are bits of magnitudes; these
    and bits of keys are multiples of ``2**SHIFT``. The first step is a part in ``2**FIRST_SHARE`` of the range.

    Returns:
        ``low``, ``high``, the number of keys that reach ``low``, and of those that reach ``high``.
    """
    count_high = count_low * 0
    share = tl.full((), SHIFT + FIRST_SHARE, tl.int32)
    while any_of((count_low > enough) & ((high - low) >> SHIFT > 1)):
        middle = low + tl.maximum((high - low) >> share << SHIFT, 1 << SHIFT)
        share = tl.full((), SHIFT + 1, tl.int32)
        count = count_of(_reach(keys, middle))
        reached = count >= wanted
        low, high = tl.where(reached, middle, low), tl.where(reached, high, middle)
        count_low, count_high = tl.where(reached, count, count_low), tl.where(reached, count_high, count)
    return low, high, count_low, count_high


@triton.jit
def _one_per_thread(words, list_ptr, C: tl.constexpr):
    """All words as a vector, such that no two threads have the same one.

    Before, all threads that have set a word's bits have it.
    """
    WORDS: tl.constexpr = C.groups * C.group // 32
    exchange_barrier(C.waits)  # all threads have read what was there
    places = tl.arange(0, WORDS)
    # in an order in which threads load one word at a time
    words_ptr = list_ptr.to(tl.pointer_type(tl.int32)) + places % 32 * (WORDS // 32) + places // 32
    tl.store(words_ptr, tl.reshape(words, (WORDS,)))
    exchange_barrier(C.waits)
    return tl.load(words_ptr)


@triton.jit
def _list(words, list_ptr, C: tl.constexpr):
    """List the indices of the ones among the bits of all words, in order."""
    WORDS: tl.constexpr = C.groups * C.group // 32
    first = tl.arange(0, WORDS) * 32
    ones = num_ones(words)
    places = tl.cumsum(ones, 0) - ones
    exchange_barrier(C.waits)  # all threads have read what was there
    AT_ONCE: tl.constexpr = 4 if WORDS == 32 else 1
    for _ in range(tl.cdiv(tl.max(ones, 0), AT_ONCE)):
        for _ in tl.static_range(AT_ONCE):  # every word loses its lowest one
            tl.store(list_ptr + places, (first + lowest_one(words)).to(tl.int16), mask=words != 0)
            places += 1
            words = words & (words - 1)
    exchange_barrier(C.waits)


@triton.jit
def _list_largest(keys, low, high, list_ptr, C: tl.constexpr):
    """List the entries of groups, one group after the other; ``keys`` are the magnitudes of all their elements."""
    GROUP: tl.constexpr = C.group
    GROUPS: tl.constexpr = C.groups
    K: tl.constexpr = C.k
    low, high, count_low, count_high = _search(keys, low, high, low * 0 + GROUP, K, K, C.shift, 1)
    words = _one_per_thread(words_of(_reach(keys, low)), list_ptr, C)
    if any_of(count_low > K):  # the first ones among those that are equal are entries
        equal = _reach(keys, low) & ~_reach(keys, high) & for_elements(count_low > K)
        ties = _one_per_thread(words_of(equal), list_ptr, C)
        ones = tl.reshape(num_ones(ties), (GROUPS, GROUP // 32))
        missing = K - for_rows(count_high) - (tl.cumsum(ones, 1) - ones)
        words = (words & ~ties) | lowest_ones(ties, tl.reshape(missing, (GROUPS * GROUP // 32,)))
    _list(words, list_ptr, C)


@triton.jit
def select(
    values,  # all elements of the groups, as they are loaded
    grad_ptr,  # the first element, like the next
    residual_ptr,
    here,  # elements in the tensors; all others are 0
    list_ptr,  # int16 [list_numel], of this program alone
    C: tl.constexpr,  # ``C.shift`` is how many of the lowest bits of all values are 0
):
    """List the indices of the ``C.k`` entries of each group, and return its largest magnitude, as int32."""
    GROUP: tl.constexpr = C.group
    GROUPS: tl.constexpr = C.groups
    K: tl.constexpr = C.k
    PARTS: tl.constexpr = C.parts
    SHIFT: tl.constexpr = C.shift
    values = as_groups(values, GROUP, GROUPS)
    if len(values.shape) == 4:
        keys = _magnitudes(values)
        low, largest = bounds_of(keys, 2**C.log2_k_pad)
        low, largest = _bits(low), _bits(largest)
        _list_largest(keys, low, largest + (1 << SHIFT), list_ptr, C)
    elif PARTS == 0:
        keys = _magnitudes(values)
        largest = _bits(tl.max(keys))
        _list_largest(keys, largest * 0, largest + (1 << SHIFT), list_ptr, C)
    else:
        maxima = _magnitudes(max_along(tl.reshape(tl.abs(values), (GROUP // PARTS, PARTS)), 0))
        largest = _bits(tl.max(maxima, 0))
        high = largest + (1 << SHIFT)
        parts = tl.full((), PARTS, tl.int32)
        low, _, _, _ = _search(maxima, _bits(tl.min(maxima, 0)), high, parts, K, K + K // 2, SHIFT, 3)
        words, listed = ones_of(_reach(tl.abs(values), low), GROUP // 32)
        if (listed <= PARTS) & (largest < INF_BITS):
            words = _one_per_thread(words, list_ptr, C)
            _list(words, list_ptr, C)
            slots = tl.arange(0, PARTS)
            mask = slots < listed
            indices = tl.load(list_ptr + slots).to(tl.int32)  # any numbers behind those that are listed
            inside = mask & (indices < here)
            entries = to_fp32(tl.load(grad_ptr + indices, mask=inside, other=0.0))
            if C.has_residual:
                entries += tl.load(residual_ptr + indices, mask=inside, other=0.0)
            keys = tl.where(mask, _magnitudes(entries), -1.0)
            low, high, _, count = _search(keys, low, high, listed, K, K, SHIFT, 3)
            # all keys >= `high`, and as many of the first between `low` and `high` as are missing
            is_sure = _reach(keys, high)
            is_tie = _reach(keys, low) & ~is_sure
            ranks = tl.cumsum(is_sure.to(tl.int32) + is_tie.to(tl.int32) * 65536, 0)
            ties = ranks >> 16
            slots = (ranks & 0xFFFF) + tl.minimum(ties, K - count) - 1
            exchange_barrier(C.waits)  # all threads have read the candidates
            chosen = is_sure | (is_tie & (ties <= K - count))
            tl.store(list_ptr + slots, indices.to(tl.int16), mask=chosen)
            exchange_barrier(C.waits)
        else:
            _list_largest(_magnitudes(values), low * 0, high, list_ptr, C)
    return largest
