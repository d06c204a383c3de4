"""The groups of one program of :mod:`~gckernels.ops.chunktopk`: a large one, or small ones side by side.

A program works on all small groups among ``NUMEL_OF_PROGRAM`` elements. One warp encodes them: each thread has
``NUMEL_OF_THREAD`` elements of one group, so that threads seldom have to exchange anything.

The elements of a large group are ``[GROUP / 32, 32]``, and a number about the group is a scalar. The elements of small
groups are ``[runs, groups, threads, run]``: every thread has some runs of neighbours. A number per group is
``[groups]``. Functions tell the two by the number of dimensions.

Small groups are loaded and stored as ``[runs * groups * threads, run]``, because releases of Triton disagree about the
dimension along which neighbouring threads lie if there are several.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...toolkit.bitpack import ones_of

NUMEL_OF_PROGRAM = tl.constexpr(1024)  # as many as its small groups have; a large one has a program of its own
NUMEL_OF_THREAD = tl.constexpr(32)


def groups_per_program(group: int) -> int:
    """How many groups of this size a program encodes or decodes."""
    return max(1, NUMEL_OF_PROGRAM.value // group)


@triton.jit
def offsets_of(GROUP: tl.constexpr, GROUPS: tl.constexpr, RUN: tl.constexpr):
    """Offsets of all elements of a program from the first one, as they are loaded; see :func:`as_groups`."""
    if GROUP > NUMEL_OF_PROGRAM:
        return tl.arange(0, GROUP // 32)[:, None] * 32 + tl.arange(0, 32)[None, :]
    else:
        THREADS: tl.constexpr = GROUP // NUMEL_OF_THREAD
        WARP: tl.constexpr = GROUPS * THREADS
        rows = tl.arange(0, GROUP * GROUPS // RUN)
        thread = rows % WARP
        first = rows // WARP * (THREADS * RUN) + thread // THREADS * GROUP + thread % THREADS * RUN
        return first[:, None] + tl.arange(0, RUN)[None, :]


@triton.jit
def as_groups(values, GROUP: tl.constexpr, GROUPS: tl.constexpr):
    """Values of all elements of a program, in the shape in which functions of this module take them."""
    if GROUP > NUMEL_OF_PROGRAM:
        return values
    else:
        RUN: tl.constexpr = values.shape[1]
        return tl.reshape(values, (NUMEL_OF_THREAD // RUN, GROUPS, GROUP // NUMEL_OF_THREAD, RUN))


@triton.jit
def for_elements(numbers):
    """A number per group, in a shape that goes with the groups' elements."""
    if len(numbers.shape) == 0:
        return numbers
    else:
        return numbers[None, :, None, None]


@triton.jit
def for_rows(numbers):
    """A number per group as ``[groups, 1]``, which goes with a row per group."""
    if len(numbers.shape) == 0:
        return tl.broadcast_to(numbers, (1, 1))
    else:
        return numbers[:, None]


@triton.jit
def any_of(conditions):
    """Whether a condition holds for any group."""
    if len(conditions.shape) == 0:
        return conditions
    else:
        return tl.max(conditions.to(tl.int32), 0) > 0


@triton.jit
def count_of(mask):
    """How many elements of each group are in a mask, int32.

    It adds fp32 numbers, which is exact. A GPU makes 1.0 or 0.0 of a comparison with one instruction, and the pipe that
    adds them is not the one that compares.
    """
    ones = tl.where(mask, 1.0, 0.0)
    if len(mask.shape) == 4:
        return tl.sum(tl.sum(tl.sum(ones, 3), 0), 1).to(tl.int32)
    else:
        return tl.sum(ones).to(tl.int32)


@triton.jit
def words_of(mask):
    """Words of 32 elements, in order, with a bit for every element that is in a mask, lowest bits first, int32."""
    if len(mask.shape) == 4:
        GROUPS: tl.constexpr = mask.shape[1]
        RUN: tl.constexpr = mask.shape[3]
        WORDS: tl.constexpr = mask.shape[0] * mask.shape[2] * RUN // 32
        bits = tl.sum(tl.where(mask, (1 << tl.arange(0, RUN))[None, None, None, :], 0), 3).to(tl.uint32)
        bits = tl.reshape(tl.permute(bits, (1, 0, 2)), (GROUPS, WORDS, 32 // RUN))
        shifts = (tl.arange(0, 32 // RUN) * RUN).to(tl.uint32)
        return tl.sum(bits << shifts[None, None, :], 2).to(tl.int32, bitcast=True)
    else:
        words, _ = ones_of(mask, mask.shape[0])
        return words


@triton.jit
def bounds_of(keys, PARTS: tl.constexpr):
    """Two keys per small group: the smallest of the largest keys of its parts, of which there are at least ``PARTS``,
    and the largest key."""
    GROUPS: tl.constexpr = keys.shape[1]
    THREADS: tl.constexpr = keys.shape[2]
    RUN: tl.constexpr = keys.shape[3]
    if PARTS > THREADS * RUN:  # every element is a part
        return tl.min(tl.min(tl.min(keys, 3), 0), 1), tl.max(tl.max(tl.max(keys, 3), 0), 1)
    else:  # a part has elements of one thread
        OWN: tl.constexpr = (PARTS + THREADS - 1) // THREADS
        maxima = tl.max(tl.reshape(tl.max(keys, 0), (GROUPS, THREADS, OWN, RUN // OWN)), 3)
        return tl.min(tl.min(maxima, 2), 1), tl.max(tl.max(maxima, 2), 1)
