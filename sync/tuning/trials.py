"""Trials of plans in turns of real training steps: which plan runs next, and which one has won.

An *arm* is a plan on trial. Arm 0 is plain: it compresses nothing. Nothing here measures, so everything is tested with
numbers.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

PLAIN = 0
"""The arm that compresses nothing."""
TURN = 10
"""Steps of a turn."""
UNCOUNTED = 1
"""Steps at the beginning of a turn that are not counted: buckets, messages and buffers are new in them."""
SHORTEST = 4
"""Steps of the shortest turn that is worth its changes of plan."""
LEAST_GAIN = 0.02
"""The share of the plain step that a plan must save. Below it the cost of a hook is not worth its risk."""
CLOSE = 0.05
"""The relative distance from the best arm within which an arm gets another turn."""


@dataclass(frozen=True)
class Turn:
    """The next turn.

    Attributes:
        arm: the arm that runs.
        steps: for how many steps.
    """

    arm: int
    steps: int


@dataclass(frozen=True)
class Trials:
    """The trials so far.

    Attributes:
        step_s: for every arm the seconds of its counted steps, in all of its turns.
    """

    step_s: tuple[tuple[float, ...], ...]

    @staticmethod
    def of(arms: int) -> Trials:
        """The trials of a number of arms, plain included, before the first turn."""
        return Trials(((),) * arms)

    def after(self, arm: int, step_s: Sequence[float]) -> Trials:
        """The trials after a turn of an arm.

        Args:
            arm: the arm.
            step_s: the seconds of its counted steps, of the slowest rank each.
        """
        return Trials(tuple((*each, *step_s) if index == arm else each for index, each in enumerate(self.step_s)))

    def median_s(self, arm: int) -> float:
        """The median step of an arm, in seconds; infinity before its first turn."""
        return statistics.median(self.step_s[arm]) if self.step_s[arm] else math.inf

    def noise(self, arm: int) -> float:
        """The standard error of the arm's median, relative to it; infinity before its first turn."""
        times = self.step_s[arm]
        if not times:
            return math.inf
        median_s = statistics.median(times)
        if not median_s:
            return 0.0
        deviation_s = statistics.median(abs(each - median_s) for each in times)
        # a normal distribution has 1.48 times the median deviation as its standard deviation, and 1.25 times as large
        # an error of the median as of the mean
        return 1.48 * 1.25 * deviation_s / math.sqrt(len(times)) / median_s

    @property
    def least_gain(self) -> float:
        """The share of the plain step that an arm must save to win: 2 %, or the noise of the plain steps if that is
        more."""
        return max(LEAST_GAIN, self.noise(PLAIN))

    @property
    def winner(self) -> int:
        """The fastest arm if it gains enough, otherwise plain."""
        best = min(range(len(self.step_s)), key=self.median_s)
        return best if self.median_s(best) < self.median_s(PLAIN) * (1.0 - self.least_gain) else PLAIN

    def next_turn(self, left: int) -> Turn | None:
        """The next turn; ``None`` if nothing is left to find out, or no time for it.

        Every arm has a turn first, plain before the others. Then those have one more that may still be the best, the
        one with the fewest steps first.

        Args:
            left: how many steps all turns may still take.
        """
        if left < SHORTEST:
            return None
        steps = min(TURN, left)
        waiting = [arm for arm, times in enumerate(self.step_s) if not times]
        if waiting:
            return Turn(waiting[0], steps)
        best = min(range(len(self.step_s)), key=self.median_s)
        close = [arm for arm in range(len(self.step_s)) if self._is_close(arm, best)]
        if len(close) < 2:
            return None
        return Turn(min(close, key=lambda arm: (len(self.step_s[arm]), self.median_s(arm))), steps)

    def _is_close(self, arm: int, best: int) -> bool:
        """Whether an arm may be as good as the best one, or is the best one."""
        margin = max(CLOSE, 2.0 * (self.noise(arm) + self.noise(best)))
        return self.median_s(arm) <= self.median_s(best) * (1.0 + margin)
