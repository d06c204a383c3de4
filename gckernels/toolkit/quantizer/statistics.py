"""Statistics that quantisers share."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..constants import Constants
from . import MAX, SUM, Dual, Statistic


@triton.jit
def _magnitude(values, C: tl.constexpr):
    return (tl.abs(values),)


@triton.jit
def _first(partials, count, C: tl.constexpr):
    return (partials[0],)


@triton.jit
def _mean(partials, count, C: tl.constexpr):
    return (tl.div_rn(partials[0], count),)


MAGNITUDE = Dual(lambda values, C: (values.abs(),), _magnitude)

LARGEST_MAGNITUDE = Statistic((MAX,), MAGNITUDE, Dual(lambda partials, count, C: (partials[0],), _first))
MEAN_MAGNITUDE = Statistic((SUM,), MAGNITUDE, Dual(lambda partials, count, C: (partials[0] / count,), _mean))


# Squares of all finite values, without overflow or underflow, as in Blue, "A Portable Fortran Program to Find the
# Euclidean Norm of a Vector" (ACM TOMS, 1978): large and small magnitudes are scaled by a power of two into the middle
# range, [2**-62, 2**43), and have sums of their own. Up to 2**41 squares of that range add up to at most 2**127. Of
# the three sums the first that is not 0 counts, and the one after it, scaled back.


@triton.jit
def scaled_squares(values, C: tl.constexpr):
    """The squares of large, middle and small magnitudes, 0 where a magnitude is none of these; NaN is a large one."""
    size = tl.abs(values)
    large = tl.where(size < 2.0**43, 0.0, size) * 2.0**-85
    middle = tl.where((size < 2.0**43) & (size >= 2.0**-62), size, 0.0)
    small = tl.where(size < 2.0**-62, size, 0.0) * 2.0**105
    return (large * large, middle * middle, small * small)


@triton.jit
def root_of_squares(large, middle, small):
    """The root of the sum of squares, from the sums of :func:`scaled_squares`; inf where it exceeds fp32."""
    from_large = tl.sqrt_rn(large + middle * 2.0**-85 * 2.0**-85) * 2.0**85
    from_middle = tl.sqrt_rn(middle + small * 2.0**-105 * 2.0**-105)
    from_small = tl.sqrt_rn(small) * 2.0**-105
    return tl.where(large != 0.0, from_large, tl.where(middle != 0.0, from_middle, from_small))


def scaled_squares_torch(values: torch.Tensor, C: Constants) -> tuple[torch.Tensor, ...]:
    """See :func:`scaled_squares`."""
    size = values.abs()
    large = torch.where(size < 2.0**43, 0.0, size) * 2.0**-85
    middle = torch.where((size < 2.0**43) & (size >= 2.0**-62), size, 0.0)
    small = torch.where(size < 2.0**-62, size, 0.0) * 2.0**105
    return large * large, middle * middle, small * small


def root_of_squares_torch(large: torch.Tensor, middle: torch.Tensor, small: torch.Tensor) -> torch.Tensor:
    """See :func:`root_of_squares`."""
    from_large = (large + middle * 2.0**-85 * 2.0**-85).sqrt() * 2.0**85
    from_middle = (middle + small * 2.0**-105 * 2.0**-105).sqrt()
    from_small = small.sqrt() * 2.0**-105
    return torch.where(large != 0.0, from_large, torch.where(middle != 0.0, from_middle, from_small))


@triton.jit
def _norm(partials, count, C: tl.constexpr):
    return (root_of_squares(partials[0], partials[1], partials[2]),)


NORM = Statistic(
    (SUM, SUM, SUM),
    Dual(scaled_squares_torch, scaled_squares),
    Dual(lambda partials, count, C: (root_of_squares_torch(partials[0], partials[1], partials[2]),), _norm),
)
