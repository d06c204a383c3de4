"""How many entries sparsifiers send; their keys, integers ordered like the magnitudes that they are the bits of; and
where keys are sampled."""

from __future__ import annotations

import torch

from ..random import philox

MAGNITUDE = 0x7FFFFFFF
"""Of the bits of an element, those that are its key."""
LARGEST_FINITE = 0x7F7FFFFF
"""Key of the largest number; those of inf and NaN are larger."""
NAN_KEY = 0x7F800001
"""Key of every NaN: which one an addition makes of another is not the same everywhere."""
LARGEST_SIZE = 2**31 - 1
"""Elements of a chunk, for an index of 32 bits."""
SAMPLE_STRIDE, SMALLEST_SAMPLE = 100, 1024
"""At most so many elements in a row of which one is sampled; as many samples, if there are as many elements."""

RATIO_PARTS = 10**9
"""What ratios are counted in."""


def ratio_parts(ratio: float) -> int:
    """``ratio`` in units of ``1 / RATIO_PARTS``, at least one."""
    return max(1, round(ratio * RATIO_PARTS))


def capacity(numel: int, ratio: float) -> int:
    """``ceil(numel * ratio)``; at least one if there are any elements."""
    # in integers, so that 100 times 0.07 is 7, and so that a symbol may stand for numel
    return -(-numel * ratio_parts(ratio) // RATIO_PARTS)


def keys_of(values: torch.Tensor) -> torch.Tensor:
    """The keys of fp32 ``values``, int32 of the same shape."""
    return (values.view(torch.int32) & MAGNITUDE).clamp(max=NAN_KEY)


def kth_largest(keys: torch.Tensor, k: int) -> int:
    """The key of rank ``k``, counted from the largest on; 0 if there are fewer."""
    return int(keys.sort(descending=True).values[k - 1]) if 0 < k <= keys.numel() else 0


def sample_positions(numel: int, seed: int, first: int) -> torch.Tensor:
    """Where ``numel`` elements are sampled: one of every ``numel / 1024`` in a row, but of at most 100. int64.

    ``first`` is the position of the first of them in the unit. Which one of a row it is says the Philox block with its
    position as the counter (``toolkit/random.py``), the first word times the length of the row, over ``2**32``. What is
    behind the last whole row is left out.
    """
    stride = sample_stride(numel)
    starts = torch.arange(numel // stride) * stride
    return starts + (philox(seed, first + starts)[:, 0] * stride >> 32)


def sample_stride(numel: int) -> int:
    """Elements in a row of which one is sampled."""
    return max(1, min(SAMPLE_STRIDE, numel // SMALLEST_SAMPLE))


def sample_rank(k: int, numel: int) -> int:
    """The rank in the sample of ``numel`` elements that is rank ``k`` among all, rounded up."""
    return -(-(numel // sample_stride(numel)) * min(k, numel) // max(1, numel))
