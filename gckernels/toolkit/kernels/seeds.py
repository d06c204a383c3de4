"""The seeds of bound units: a number of the unit, plus a number in memory that changes from step to step.

A bound launch has the same arguments in every step, so that a CUDA graph can repeat it. Kernels that need a seed
therefore get, besides the number, a pointer to what is added to it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...codec import SEED_MASK

_MASK = tl.constexpr(SEED_MASK)


@triton.jit
def seed_of(seed, added_ptr):
    """``seed`` plus the int64 at ``added_ptr``, modulo 2**63; ``seed`` itself if ``added_ptr`` is None.

    A kernel that calls this has the argument ``added_ptr`` behind its other numbers and pointers (``launch.py``).
    """
    if added_ptr is None:
        return seed
    else:
        return (seed + tl.load(added_ptr)) & _MASK
