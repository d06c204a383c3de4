"""Statistics that several quantisers use."""

from __future__ import annotations

import torch

from ..constants import Constants
from ..numeric import sqrt_torch
from .maps import LARGEST, SUM, Function, Shortcut, Statistic

MAGNITUDE: Function = lambda values, C: (values.abs(),)

LARGEST_MAGNITUDE = Statistic((LARGEST,), MAGNITUDE, lambda partials, count, C: partials)
MEAN_MAGNITUDE = Statistic((SUM,), MAGNITUDE, lambda partials, count, C: (partials[0] / count,))


# The norm of any finite values, without overflow or underflow, as in Blue, "A Portable Fortran Program to Find the
# Euclidean Norm of a Vector" (ACM TOMS, 1978). Large and small magnitudes are scaled by a power of two into the middle
# range, [2**-62, 2**43). Large, middle and small magnitudes have separate sums. Up to 2**41 squares of the middle range
# add up to at most 2**127. The result is made of the first of the three sums that is not 0, and of the next one, both
# scaled back.


def scaled_squares(values: torch.Tensor, C: Constants) -> tuple[torch.Tensor, ...]:
    """The squares of large, of middle and of small magnitudes, 0 for all other magnitudes; NaN counts as large."""
    size = values.abs()
    large = torch.where(size < 2.0**43, 0.0, size) * 2.0**-85
    middle = torch.where((size < 2.0**43) & (size >= 2.0**-62), size, 0.0)
    small = torch.where(size < 2.0**-62, size, 0.0) * 2.0**105
    return large * large, middle * middle, small * small


def root_of_squares(large: torch.Tensor, middle: torch.Tensor, small: torch.Tensor) -> torch.Tensor:
    """The root of the sum of squares, from the sums of :func:`scaled_squares`; inf where it exceeds fp32."""
    from_large = sqrt_torch(large + middle * 2.0**-85 * 2.0**-85) * 2.0**85
    from_middle = sqrt_torch(middle + small * 2.0**-105 * 2.0**-105)
    from_small = sqrt_torch(small) * 2.0**-105
    return torch.where(large != 0.0, from_large, torch.where(middle != 0.0, from_middle, from_small))


def plain_squares_suffice(total: torch.Tensor) -> torch.Tensor:
    """Whether the sum of all squares, as they are, is as precise as :func:`root_of_squares`; not for NaN.

    Squares below 2**-149 are lost. Their loss changes a sum above 2**-100 by less than rounding does.
    """
    return (total > 2.0**-100) & (total < 2.0**126)


NORM = Statistic(
    (SUM, SUM, SUM),
    scaled_squares,
    lambda partials, count, C: (root_of_squares(*partials),),
    shortcut=Shortcut(
        Statistic((SUM,), lambda values, C: (values * values,), lambda partials, count, C: (sqrt_torch(partials[0]),)),
        holds=lambda partials, C: plain_squares_suffice(partials[0]),
    ),
)
