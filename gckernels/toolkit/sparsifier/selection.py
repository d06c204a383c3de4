"""The ways in which sparsifiers select entries: four, each with its specification, host path and kernels.

The *key* of an element is its magnitude's bits as an integer (``keys.py``). A selection chooses two keys in every
chunk. Elements above ``upper`` are sent, or the first ``k`` of them by index if there are more. Elements from ``lower``
to ``upper`` are sent in the order of their indices, as many as fit. Zeros are never sent.

The set is closed: a selection needs C functions (``selection_host.c``) and Triton kernels (``narrowing_kernels.py``),
not only a class. A subclass of :class:`~gckernels.toolkit.sparsifier.Sparsifier` chooses one of these four.

Every selection has two forms. ``bounds`` is the specification: ``(lower, upper)`` from the keys of a chunk, int32
``[numel]``, whose first element is at position ``first`` of the unit. ``rule`` tells the host path and the kernels how
to find them without sorting all keys: both bound the candidates first, and then look for the k-th largest among these.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .keys import LEADING_SHIFT, MAX_FINITE_KEY, kth_largest, sample_positions, sample_rank
from .rules import BoundRule, Narrowing


@dataclass(frozen=True)
class Exact:
    """The ``k`` largest magnitudes; of equal ones those with lower indices.

    ``lower`` and ``upper`` are the k-th largest key.
    """

    def bounds(self, keys: torch.Tensor, k: int, seed: int, first: int) -> tuple[int, int]:
        key = kth_largest(keys, k)
        return key, key

    @property
    def rule(self) -> BoundRule:
        return BoundRule(Narrowing.EXACT)


@dataclass(frozen=True)
class Leading:
    """The ``k`` largest magnitudes but for those that share the leading 11 bits of the k-th largest key.

    ``lower`` and ``upper`` are the smallest and the largest key with these bits, the exponent and three bits of the
    mantissa: magnitudes between them differ by an eighth at most, subnormal ones aside.
    """

    def bounds(self, keys: torch.Tensor, k: int, seed: int, first: int) -> tuple[int, int]:
        bits = kth_largest(keys, k) >> LEADING_SHIFT
        return bits << LEADING_SHIFT, ((bits + 1) << LEADING_SHIFT) - 1

    @property
    def rule(self) -> BoundRule:
        return BoundRule(Narrowing.LEADING)


@dataclass(frozen=True)
class Sampled:
    """The magnitudes that reach a quantile of a sample (``sample_positions`` in ``keys.py``).

    ``lower`` is the key in the sample whose rank corresponds to ``k`` among all elements, and ``upper`` is the largest
    finite key, so that inf and NaN are sent before all others. Bounds depend on the seed.

    Attributes:
        trim: if more than ``k`` elements reach the sampled key, both bounds are the k-th largest key of all elements,
            else both are the sampled one.
    """

    trim: bool = False

    def bounds(self, keys: torch.Tensor, k: int, seed: int, first: int) -> tuple[int, int]:
        sample = keys[sample_positions(keys.numel(), seed, first)]
        key = kth_largest(sample, sample_rank(k, keys.numel()))
        if not self.trim:
            return key, MAX_FINITE_KEY
        key = max(key, kth_largest(keys, k))
        return key, key

    @property
    def rule(self) -> BoundRule:
        return BoundRule(Narrowing.EXACT if self.trim else Narrowing.NONE, by_sample=True)


@dataclass(frozen=True)
class Fixed:
    """The magnitudes that reach a given one, whatever the gradient is.

    ``lower`` is ``key``, and ``upper`` is the largest finite key, so that inf and NaN are sent before all others.

    Attributes:
        key: the smallest key that is sent, from 1 to the largest finite key plus one.
    """

    key: int

    def bounds(self, keys: torch.Tensor, k: int, seed: int, first: int) -> tuple[int, int]:
        return self.key, MAX_FINITE_KEY

    @property
    def rule(self) -> BoundRule:
        return BoundRule(key=self.key)


Selection = Exact | Leading | Sampled | Fixed
