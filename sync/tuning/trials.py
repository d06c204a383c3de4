"""Trials of plans in turns of real training steps: which plan runs next, and which one has won.

An *arm* is a plan on trial. Arm 0 is plain: it compresses nothing. Nothing here measures, so everything is tested with
numbers.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

PLAIN = 0
"""The arm that compresses nothing."""
TURN = 10
"""Steps of a turn."""
UNCOUNTED = 2
"""Steps at the beginning of a turn that are not counted: messages, buffers and connections are new in the first, and
after a change to plain steps DDP makes its buckets anew in the second. Later turns of a plan are no different.
At 200 Mbit/s the first step takes 1.5 to 2.5 times as long as later ones, and the second as long as they do."""
SHORTEST = 5
"""Steps of the shortest turn that is worth its changes of plan."""
LEAST_GAIN = 0.02
"""The share of the plain step that a plan must save. Below it the cost of a hook is not worth its risk."""
SURE = 1.5
"""How many standard errors the saving must be. A plan that takes 2 % longer than plain steps is then seldom chosen by
chance, and one that saves 5 % seldom missed; steps that turn out to be slower are tried against plain ones again."""
CLOSE = 0.1
"""The relative distance from the best arm within which an arm gets another turn."""
PROMISING = 0.15
"""The relative distance from the best arm within which an arm must be expected to get its first turn before others get
their second one. It must also be expected to save half as much of the plain step as the best arm does."""


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
        turns: for every arm and each of its turns the seconds of the counted steps.
        predicted_s: for every arm the predicted seconds of a step; ``None`` without a prediction.
        left_out: the arms that get no further turn, and do not win.
    """

    turns: tuple[tuple[tuple[float, ...], ...], ...]
    predicted_s: tuple[float | None, ...]
    left_out: frozenset[int] = frozenset()

    @staticmethod
    def of(arms: int, predicted_s: Sequence[float | None] = ()) -> Trials:
        """The trials of some arms before the first turn.

        Args:
            arms: the number of arms, plain included.
            predicted_s: for every arm the predicted seconds of a step; by default none is predicted.
        """
        return Trials(((),) * arms, tuple(predicted_s) or (None,) * arms)

    def after(self, arm: int, step_s: Sequence[float]) -> Trials:
        """The trials after a turn of an arm.

        Args:
            arm: the arm.
            step_s: the seconds of its counted steps, of the slowest rank each.
        """
        turn = (tuple(step_s),)
        return replace(self, turns=tuple(each + turn if at == arm else each for at, each in enumerate(self.turns)))

    def without(self, arm: int) -> Trials:
        """The trials that go on without an arm."""
        return replace(self, left_out=self.left_out | {arm})

    @property
    def arms(self) -> tuple[int, ...]:
        """The arms that are not left out."""
        return tuple(arm for arm in range(len(self.turns)) if arm not in self.left_out)

    @property
    def step_s(self) -> tuple[tuple[float, ...], ...]:
        """For every arm the seconds of its counted steps, in all of its turns."""
        return tuple(tuple(itertools.chain.from_iterable(each)) for each in self.turns)

    def median_s(self, arm: int) -> float:
        """The median step of an arm, in seconds; infinity before its first turn."""
        times = self.step_s[arm]
        return statistics.median(times) if times else math.inf

    def noise(self, arm: int) -> float:
        """The standard error of the arm's median, relative to it; infinity before its first turn.

        Steps of a turn may be alike and those of another turn not, as when another program comes and goes. So it is at
        least the error that the turns of all arms have.
        """
        times = self.step_s[arm]
        if not times:
            return math.inf
        median_s = statistics.median(times)
        if not median_s:
            return 0.0
        deviation_s = statistics.median(abs(each - median_s) for each in times)
        # a normal distribution has 1.48 times the median deviation as its standard deviation, and 1.25 times as large
        # an error of the median as of the mean
        within = 1.48 * 1.25 * deviation_s / math.sqrt(len(times)) / median_s
        return max(within, self._between / math.sqrt(len(self.turns[arm])))

    @property
    def _between(self) -> float:
        """The standard deviation of the medians of turns of the same arm, relative to them; 0 if no arm has several."""
        squares, freedom = 0.0, 0
        for turns in self.turns:
            medians_s = [statistics.median(turn) for turn in turns]
            if len(medians_s) > 1 and (mean_s := statistics.fmean(medians_s)):
                squares += sum((each / mean_s - 1.0) ** 2 for each in medians_s)
                freedom += len(medians_s) - 1
        return math.sqrt(squares / freedom) if freedom else 0.0

    def gains(self, arm: int) -> bool:
        """Whether an arm saves enough of the plain step: 2 %, and more than the difference may be wrong by."""
        plain_s, arm_s = self.median_s(PLAIN), self.median_s(arm)
        if math.inf in (plain_s, arm_s):
            return arm_s < plain_s
        error_s = math.hypot(self.noise(PLAIN) * plain_s, self.noise(arm) * arm_s)
        return arm_s < plain_s - max(LEAST_GAIN * plain_s, SURE * error_s)

    @property
    def winner(self) -> int:
        """The fastest of the arms that gain enough, otherwise plain."""
        return min(filter(self.gains, self.arms), key=self.median_s, default=PLAIN)

    @property
    def is_doubtful(self) -> bool:
        """Whether plain has won although some arm seems to save enough: that may be noise, or not."""
        worth_s = self.median_s(PLAIN) * (1.0 - LEAST_GAIN)
        return self.winner == PLAIN and any(self.median_s(arm) < worth_s for arm in self.arms)

    def next_turn(self, left: int) -> Turn | None:
        """The next turn; ``None`` if nothing is left to find out, or no time for it.

        Every arm that may be the best has a turn first, plain before the others. Then those have one more that may
        still be the best, the one with the fewest steps first. If there is no doubt, the arms follow that are predicted
        to be slower, because predictions can be wrong.

        Args:
            left: how many steps all turns may still take.
        """
        if left < SHORTEST:
            return None
        steps = min(TURN, left)
        waiting = [arm for arm in self.arms if not self.turns[arm]]
        tried = [arm for arm in self.arms if self.turns[arm]]
        if not tried:
            return Turn(PLAIN, steps)
        best = min(tried, key=self.median_s)
        best_s, plain_s = self.median_s(best), self.median_s(PLAIN)
        worth_s = min(best_s * (1.0 + PROMISING), (best_s + plain_s) / 2)
        if promising := [arm for arm in waiting if self._expected_s(arm) <= worth_s]:
            return Turn(promising[0], steps)
        close = [arm for arm in tried if self._is_close(arm, best)]
        if len(close) > 1:
            return Turn(min(close, key=lambda arm: (len(self.turns[arm]), self.median_s(arm))), steps)
        return Turn(waiting[0], steps) if waiting else None

    def _expected_s(self, arm: int) -> float:
        """The least step that an arm without a turn may have, in seconds; 0 without a prediction.

        A prediction counts as too long as the most pessimistic of those that have had a turn. An optimistic one says
        little about the others: its arm may compress much where another one compresses little.
        """
        predicted_s = self.predicted_s[arm]
        ratios = [self.median_s(at) / each for at, each in enumerate(self.predicted_s) if each and self.turns[at]]
        return 0.0 if predicted_s is None or not ratios else min(ratios) * predicted_s

    def _is_close(self, arm: int, best: int) -> bool:
        """Whether an arm may be as good as the best one, or is the best one."""
        margin = max(CLOSE, 2.0 * (self.noise(arm) + self.noise(best)))
        return self.median_s(arm) <= self.median_s(best) * (1.0 + margin)
