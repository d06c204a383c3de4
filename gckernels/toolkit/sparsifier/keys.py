"""How many entries sparsifiers send, the keys that they select entries by, and the positions of samples.

The key of an element is its magnitude's bits as an integer. Keys are ordered like magnitudes, with inf and NaN above
all numbers.
"""

from __future__ import annotations

import torch

from ..random import philox

MAGNITUDE = 0x7FFFFFFF
"""The bits of an fp32 number without its sign."""
MAX_FINITE_KEY = 0x7F7FFFFF
"""Key of the largest number; the keys of inf and NaN are larger."""
NAN_KEY = 0x7F800001
"""Key of every NaN: the bits that an addition gives to a NaN are not the same everywhere."""
LEADING_SHIFT = 20
"""Bits of a key behind the leading 11 bits."""
MAX_SIZE = 2**31 - 1
"""Largest number of elements in a chunk, for indices of 32 bits."""
MAX_SAMPLE_STRIDE, MIN_SAMPLE = 100, 1024
"""Largest number of elements of which one is sampled; smallest number of samples, where there are as many elements."""

RATIO_PARTS = 10**9
"""Ratios are counted in units of ``1 / RATIO_PARTS``."""


def ratio_parts(ratio: float) -> int:
    """``ratio`` in units of ``1 / RATIO_PARTS``, at least one."""
    return max(1, round(ratio * RATIO_PARTS))


def capacity(numel: int, parts: int) -> int:
    """The number of entries for ``numel`` elements and a ratio in ``parts``, rounded up: at least one if there are
    any elements."""
    # in integers, so that 100 times 0.07 is 7, and so that a symbol may stand for numel
    return -(-numel * parts // RATIO_PARTS)


def keys_of(values: torch.Tensor) -> torch.Tensor:
    """The keys of fp32 ``values``, int32 of the same shape."""
    return (values.view(torch.int32) & MAGNITUDE).clamp(max=NAN_KEY)


def kth_largest(keys: torch.Tensor, k: int) -> int:
    """The k-th largest of ``keys``; 0 if there are fewer than ``k``, or ``k`` is 0."""
    return int(keys.sort(descending=True).values[k - 1]) if 0 < k <= keys.numel() else 0


def sample_positions(numel: int, seed: int, first: int) -> torch.Tensor:
    """The positions of a sample of ``numel`` elements, int64 ``[samples]``.

    The elements are cut into rows of ``numel / 1024``, but at most 100, and one of every row is sampled. Elements
    behind the last whole row are left out. The counter of a row's Philox block (``toolkit/random.py``) is the position
    of its first element in the unit, where the first element of all is at ``first``; the block's first word times the
    length of the row, over ``2**32``, is the position in the row.
    """
    stride = sample_stride(numel)
    starts = torch.arange(numel // stride, dtype=torch.int64, device="cpu") * stride
    return starts + (philox(seed, first + starts)[:, 0] * stride >> 32)


def sample_stride(numel: int) -> int:
    """The number of elements of which one is sampled."""
    return max(1, min(MAX_SAMPLE_STRIDE, numel // MIN_SAMPLE))


def sample_rank(k: int, numel: int) -> int:
    """The rank in the sample of ``numel`` elements that corresponds to rank ``k`` among all, rounded up."""
    return -(-(numel // sample_stride(numel)) * min(k, numel) // max(1, numel))


def require_size(name: str, size: int) -> None:
    """Raise ValueError if ``size`` elements are more than indices of 32 bits reach."""
    if size > MAX_SIZE:
        raise ValueError(f"{name}.encode: size must be below 2**31, the reach of an index, got {size}")
