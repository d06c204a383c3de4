"""Round numbers for the axes of pictures."""

from __future__ import annotations

import math


def ticks(last: float, count: int) -> list[float]:
    """Round numbers from 0 to ``last``, at equal distances of 1, 2 or 5 times a power of ten.

    Args:
        last: the end of the axis, above 0; of an axis without an extent only 0 is marked.
        count: how many distances there are about.
    """
    if not 0 < last < math.inf:
        return [0.0]
    power = 10.0 ** math.floor(math.log10(last / count))
    steps = [power * factor for factor in (1, 2, 5, 10)]
    step = next((step for step in steps if step * count >= last * 0.9), steps[-1])
    if step > last:  # 0 alone would be no scale
        step = steps[steps.index(step) - 1]
    return [round(step * number, 12) for number in range(math.floor(last / step * (1 + 1e-9)) + 1)]


def top_of(largest: float) -> float:
    """The end of an axis that shows ``largest`` with some space above it; 1 if there is nothing to show."""
    if not 0 < largest < math.inf:
        return 1.0
    return largest * 1.12
