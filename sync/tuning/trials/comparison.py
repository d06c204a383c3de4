"""The comparison of a plan with another one, which it challenges, in turns of steps that follow one another.

Each turn of the challenger is between two turns of the incumbent. If these two differ, something else has changed
meanwhile, and the pair says nothing. Nothing here measures.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import TypeAlias

Times: TypeAlias = Sequence[float]
"""The seconds of the counted steps of a turn, on the slowest rank."""

GAIN = 0.02
"""The share of the incumbent's step that a challenger must save beyond doubt. A challenger that is this close to the
incumbent is not worth a change."""
SURE = 2.0
"""How many standard errors a gain must be beyond, or a loss within, to end a comparison early."""
PAIRS = 2
"""The fewest pairs after which a challenger wins. One alone may be an accident."""
DISTURBED = 0.2
"""The relative difference of two turns of the same plan from which something else has changed between them."""
LEAST_NOISE = 0.01
"""The relative deviation of steps at least. Few steps may be alike by chance."""


def error_of(deviation: float, steps: int) -> float:
    """The standard error of the median of some steps, relative to it.

    Args:
        deviation: the median deviation of a step from the median, relative to it.
        steps: their number.
    """
    # a normal distribution has 1.48 times the median deviation as its standard deviation, and 1.25 times as large an
    # error of the median as of the mean
    return 1.25 * max(1.48 * deviation, LEAST_NOISE) / math.sqrt(steps)


def differ(first_s: float, second_s: float, error: float) -> bool:
    """Whether two turns of the same plan differ by more than noise, whose standard error is ``error``."""
    margin = max(DISTURBED, 3.0 * math.sqrt(2.0) * error)
    return min(first_s, second_s) * (1.0 + margin) < max(first_s, second_s)


class Comparison:
    """A challenger's turns so far.

    Args:
        handicap: the factor by which the challenger's steps count as longer than the incumbent's.
    """

    def __init__(self, handicap: float) -> None:
        self._handicap = math.log(handicap)
        self._gains: list[tuple[float, float]] = []  # logarithms of ratios, and their errors

    def add(self, before: Times, turn: Times, after: Times, deviation: float) -> bool:
        """Take a turn of the challenger, and those of the incumbent around it, and return whether the pair counts.

        Args:
            before, turn, after: the turns.
            deviation: the median deviation of steps, relative to their median.
        """
        before_s, turn_s, after_s = map(statistics.median, (before, turn, after))
        errors = [error_of(deviation, len(each)) for each in (before, turn, after)]
        if differ(before_s, after_s, errors[2]):
            return False
        gain = 0.5 * math.log(before_s * after_s) - math.log(turn_s) - self._handicap
        self._gains.append((gain, math.hypot(0.5 * errors[0], errors[1], 0.5 * errors[2])))
        return True

    @property
    def _mean(self) -> tuple[float, float]:
        """The mean gain, and its standard error."""
        weights = [error**-2 for _, error in self._gains]
        mean = sum(gain * weight for (gain, _), weight in zip(self._gains, weights, strict=True)) / sum(weights)
        return mean, 1.0 / math.sqrt(sum(weights))

    @property
    def ratio(self) -> float:
        """The challenger's step relative to the incumbent's, with its handicap."""
        return math.exp(-self._mean[0])

    def verdict(self, is_last: bool) -> bool | None:
        """Whether the challenger wins; ``None`` if another pair must show it.

        Args:
            is_last: whether there is no other pair. Then the greater part of the evidence decides.
        """
        mean, error = self._mean
        if mean < GAIN - SURE * error or mean < -0.5 * error:
            return False
        if is_last:
            return mean >= 0.5 * (GAIN + error)
        wins = mean > GAIN + SURE * error and all(gain > 0.0 for gain, _ in self._gains)
        return True if wins and len(self._gains) >= PAIRS else None
