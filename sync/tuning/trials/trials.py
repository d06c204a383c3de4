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
LONG_TURN = 50
"""Steps of a turn once trials take longer because of a doubt. Changes of plan cost three plain steps or more in a short
step, which is as much as a plan in doubt may save in ten steps."""
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
POSSIBLE, CERTAIN = 1.0, 2.0
"""How many standard errors less or more than 2 % an arm must save so that there is no doubt. Where steps differ by a
tenth, a plan that saves 10 % is then found in nine of ten trainings, and where they differ by a fifth, one that saves
20 %. One that takes 2 % longer than plain steps is chosen in one of forty (300 simulated trainings each)."""
CLOSE = 0.1
"""The relative distance from the best arm within which an arm gets another turn."""
RIVAL = 0.25
"""The relative distance from the best arm within which arms are compared fairly. Where another program runs at times, a
turn may take a fifth longer than the next one."""
FAIR = 3
"""Turns of each in a fair comparison."""


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
        left_out: the arms that get no further turn, and do not win.
        incumbent: the arm that has won earlier trials. It wins again unless it saves too little; noise alone does not
            take that from it. ``None`` if none has.
    """

    turns: tuple[tuple[tuple[float, ...], ...], ...]
    left_out: frozenset[int] = frozenset()
    incumbent: int | None = None

    @staticmethod
    def of(arms: int, incumbent: int | None = None) -> Trials:
        """The trials of some arms before the first turn.

        Args:
            arms: the number of arms, plain included.
            incumbent: the arm that has won earlier trials, if one has.
        """
        return Trials(((),) * arms, incumbent=incumbent)

    def joined(self, arms: int, incumbent: int | None = None) -> Trials:
        """The trials in which some more arms take part.

        Args:
            arms: the number of further arms.
            incumbent: the arm that has won earlier trials; by default the one that is known so far.
        """
        incumbent = self.incumbent if incumbent is None else incumbent
        return replace(self, turns=self.turns + ((),) * arms, incumbent=incumbent)

    def after(self, arm: int, step_s: Sequence[float]) -> Trials:
        """The trials after a turn of an arm.

        Args:
            arm: the arm.
            step_s: the seconds of its counted steps, of the slowest rank each. A long turn counts as several.
        """
        size = math.ceil(len(step_s) / max(1, len(step_s) // TURN))
        new = tuple(tuple(step_s[at : at + size]) for at in range(0, len(step_s), size))
        return replace(self, turns=tuple(each + new if at == arm else each for at, each in enumerate(self.turns)))

    def without(self, arm: int) -> Trials:
        """The trials that go on without an arm."""
        return replace(self, left_out=self.left_out | {arm})

    @property
    def arms(self) -> tuple[int, ...]:
        """The arms that are not left out."""
        return tuple(arm for arm in range(len(self.turns)) if arm not in self.left_out)

    @property
    def step_s(self) -> tuple[tuple[float, ...], ...]:
        """For every arm the seconds of its counted steps, in all of its turns that count."""
        return tuple(tuple(itertools.chain.from_iterable(each)) for each in self._counted)

    @property
    def _counted(self) -> tuple[tuple[tuple[float, ...], ...], ...]:
        """For every arm the turns that count. The first one of plain steps does not if later ones are faster, because
        everything takes longer when a training begins."""
        plain, *others = self.turns
        later = tuple(itertools.chain.from_iterable(plain[1:]))
        is_slower = bool(later) and statistics.median(plain[0]) > statistics.median(later)
        return plain[1:] if is_slower else plain, *others

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
        return max(within, self._between / math.sqrt(len(self._counted[arm])))

    @property
    def _between(self) -> float:
        """The standard deviation of the medians of turns of the same arm, relative to them; 0 if no arm has several."""
        squares, freedom = 0.0, 0
        for turns in self._counted:
            medians_s = [statistics.median(turn) for turn in turns]
            if len(medians_s) > 1 and (mean_s := statistics.fmean(medians_s)):
                squares += sum((each / mean_s - 1.0) ** 2 for each in medians_s)
                freedom += len(medians_s) - 1
        return math.sqrt(squares / freedom) if freedom else 0.0

    def gains(self, arm: int) -> bool:
        """Whether an arm saves enough of the plain step: 2 %, and, unless it is the incumbent, more than the difference
        may be wrong by."""
        plain_s, arm_s = self.median_s(PLAIN), self.median_s(arm)
        if math.inf in (plain_s, arm_s):
            return arm_s < plain_s
        wrong_s = 0.0 if arm == self.incumbent else SURE * self._error_s(arm)
        return arm_s < plain_s - max(LEAST_GAIN * plain_s, wrong_s)

    @property
    def winner(self) -> int:
        """The fastest of the arms that gain enough, otherwise plain."""
        return min(filter(self.gains, self.arms), key=self.median_s, default=PLAIN)

    @property
    def is_doubtful(self) -> bool:
        """Whether noise may hide that some arm saves enough, or that none does."""
        surpluses = [self._surplus(arm) for arm in self.arms if arm != PLAIN and self.turns[arm]]
        return bool(surpluses and self.turns[PLAIN]) and -POSSIBLE < max(surpluses) < CERTAIN

    def _surplus(self, arm: int) -> float:
        """How many standard errors an arm saves beyond 2 % of the plain step."""
        plain_s = self.median_s(PLAIN)
        surplus_s = (1.0 - LEAST_GAIN) * plain_s - self.median_s(arm)
        return surplus_s / error_s if (error_s := self._error_s(arm)) else math.copysign(math.inf, surplus_s)

    def _error_s(self, arm: int) -> float:
        """The standard error of what an arm saves, in seconds."""
        return math.hypot(self.noise(PLAIN) * self.median_s(PLAIN), self.noise(arm) * self.median_s(arm))

    def next_turn(self, left: int, more: int = 0) -> Turn | None:
        """The next turn; ``None`` if nothing is left to find out, or no time for it.

        Every arm has a turn first, plain before the others. These turns are shorter if there are many arms. Then those
        have one more that may still be the best, the one with the fewest steps first. At last rivals of the best arm
        have as many turns as make a fair comparison, and in doubt, noise that hides whether some arm saves enough is
        averaged over long turns.

        Args:
            left: how many steps all turns may take. First turns do not wait for it.
            more: how many steps rivals and long turns may take beyond them.
        """
        if waiting := [arm for arm in self.arms if not self.turns[arm]]:
            share = left // len(waiting) - 1  # each takes a change as well
            return Turn(waiting[0], max(SHORTEST, min(TURN, share)))
        if left >= SHORTEST and len(self._close) > 1:
            return Turn(self._least_tried(self._close), min(TURN, left))
        left += more
        if left < SHORTEST or not self._tried:
            return None
        if len(rivals := self._rivals) > 1 and min(len(self.turns[arm]) for arm in rivals) < FAIR:
            return Turn(self._least_tried(rivals), min(TURN, left))
        if not self.is_doubtful:
            return None
        pair = (PLAIN, min((arm for arm in self._tried if arm != PLAIN), key=self.median_s))
        is_first = len({len(self.turns[arm]) for arm in pair}) == 1  # the other one follows with as many steps
        return Turn(self._least_tried(pair), min(LONG_TURN, max(left // 2, SHORTEST) if is_first else left))

    @property
    def _tried(self) -> list[int]:
        """The arms that have had a turn and are not left out."""
        return [arm for arm in self.arms if self.turns[arm]]

    @property
    def _best(self) -> int:
        return min(self._tried, key=self.median_s)

    @property
    def _close(self) -> list[int]:
        """The arms that may be as good as the best one, with it."""
        return [arm for arm in self._tried if self._is_close(arm, self._best)]

    @property
    def _rivals(self) -> list[int]:
        """The arms that one disturbed turn may have kept from being the best one, with it, if all gain enough. Plain
        steps are among them."""
        near_s = self.median_s(self._best) * (1.0 + RIVAL)
        near = [arm for arm in self._tried if self.median_s(arm) <= near_s]
        return [arm for arm in near if self.gains(arm) or (arm == PLAIN != self._best)]

    def _least_tried(self, arms: Sequence[int]) -> int:
        return min(arms, key=lambda arm: (len(self.turns[arm]), self.median_s(arm)))

    def _is_close(self, arm: int, best: int) -> bool:
        """Whether an arm may be as good as the best one, or is the best one."""
        margin = max(CLOSE, 2.0 * (self.noise(arm) + self.noise(best)))
        return self.median_s(arm) <= self.median_s(best) * (1.0 + margin)
