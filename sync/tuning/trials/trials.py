"""Trials of plans in turns of real training steps: which plan runs next, and which one stays.

An *arm* is a plan on trial. Arm 0 is plain: it compresses nothing. The *incumbent* is the arm that stays until another
one, its *challenger*, beats it. Every arm becomes slower while other programs run or the link is busy. So arms are
compared in turns that follow one another, each turn of a challenger between two turns of the incumbent. If these two
differ, something else has changed meanwhile, and the comparison does not count.

The rules are generators: a ``yield`` asks for a turn, and returns the seconds of its counted steps on the slowest rank,
or ``None`` if a rank cannot build the arm. Nothing here measures, so the rules are tested in drawn worlds, by the time
that they lose against the arm that is best in hindsight (``tests/support/worlds.py``).
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from .comparison import SURE, Comparison, Times, differ, error_of

T = TypeVar("T")

PLAIN = 0
"""The arm that compresses nothing."""
TURN = 5
"""Steps of a short turn."""
UNCOUNTED = 2
"""Steps at the beginning of a turn that are not counted: messages, buffers and connections are new in the first, and
after a change to plain steps DDP makes its buckets anew in the second. At 200 Mbit/s the first step takes 1.5 to 2.5
times as long as later ones, and the second as long as they do."""
LEAST_GAIN = 0.02
"""The share of the plain step that a plan must save. Below it the cost of a hook is not worth its risk."""
MOST = 80
"""Steps that comparisons take at a time. Turns become twice as long from one to the next, so that arms that differ
little, whose turns cost little, are told apart by more steps."""
DISTURBANCES = 3
"""Disturbed pairs of a comparison after which it goes on at another time."""
RIVAL, RIVALS = 0.1, 2
"""The relative distance from the best arm within which an arm is compared with it, beyond noise, and how many are."""
BASE, SHARE = 8.0, 0.01
"""The cost that comparisons may have after the first race: the time of some steps, and a share of all steps."""
_LEAST_S = 1e-9  # the shortest step, so that ratios are finite


@dataclass(frozen=True)
class Turn:
    """The next turn."""

    arm: int  # the arm that runs
    steps: int  # for how many steps
    uncounted: int = 0  # how many of them are not counted, at the beginning


Rules: TypeAlias = Generator[Turn, Times | None, T]
"""Rules that ask for turns, and return something."""


class Trials:
    """The arms of a training, and how they compare.

    Attributes:
        incumbent: the arm that stays.
        left_out: the arms that no longer take part.
        ratios: for every arm that was compared its step relative to the incumbent's.
        was_disturbed: whether something else has changed in the sweep of the first race.
        steps: the steps of all turns of other arms than the incumbent, and those that changes take.
    """

    def __init__(self) -> None:
        self.incumbent = PLAIN
        self.left_out: set[int] = set()
        self.ratios: dict[int, float] = {}
        self.was_disturbed = False
        self.steps = 0
        self._handicaps = [1.0 - LEAST_GAIN]
        self._medians_s: dict[int, float] = {}  # in the last turn of an arm
        self._least_s: dict[int, float] = {}  # the shortest step of a turn in a sweep
        self._challenges: dict[int, int] = {}  # since the incumbent has won
        self._unfinished: dict[int, Comparison] = {}
        self._running: int | None = None
        self._deviations: deque[float] = deque(maxlen=200)
        self._lost_s, self._total_s = 0.0, 0.0  # since the first race
        self._has_raced = False

    # ---------------------------------------------------------------- arms

    def join(self, handicaps: Iterable[float]) -> None:
        """Let arms take part.

        Args:
            handicaps: for every new arm the factor by which its steps count as longer, for what they do to the
                accuracy.
        """
        self._handicaps += handicaps

    def leave_out(self, arm: int) -> None:
        """Let an arm take no further part."""
        self.left_out.add(arm)

    def renew(self) -> None:
        """Forget the times of the incumbent, whose plan is another one now."""
        self._medians_s.pop(self.incumbent, None)

    def resume(self, incumbent: int, step_s: float, none_s: float) -> None:
        """Continue the trials of a saved job.

        Args:
            incumbent: the arm that has won.
            step_s: the seconds of its step.
            none_s: the seconds of a plain step.
        """
        self._medians_s |= {PLAIN: none_s, incumbent: step_s}
        self.ratios = {PLAIN: self._handicaps[PLAIN] * none_s / step_s, incumbent: 1.0} if step_s else {}
        self._running = self.incumbent = incumbent
        self._has_raced = True

    @property
    def arms(self) -> tuple[int, ...]:
        """The arms that take part."""
        return tuple(arm for arm in range(len(self._handicaps)) if arm not in self.left_out)

    def median_s(self, arm: int) -> float:
        """The median step of the last turn of an arm, in seconds; infinity before its first turn."""
        return self._medians_s.get(arm, math.inf)

    @property
    def plain_s(self) -> float:
        """The seconds of a plain step beside those of the incumbent now, as far as is known; infinity if it is not."""
        ratio = self.ratios.get(PLAIN, math.inf) / self._handicaps[PLAIN]
        return self.median_s(PLAIN) if self.incumbent == PLAIN else ratio * self.median_s(self.incumbent)

    def error(self, steps: int) -> float:
        """The standard error of the median of some steps, relative to it."""
        return error_of(self._deviation, steps)

    @property
    def _deviation(self) -> float:
        return statistics.median(self._deviations) if self._deviations else 0.0

    # ---------------------------------------------------------------- the first race

    def race(self) -> Rules[None]:
        """Let every arm that had no turn have one, and then rivals of the best arm challenge it.

        The turns of this sweep are judged by their shortest step: one disturbed step in a few says nothing. If the best
        arm takes another time afterwards, the sweep was no fair comparison, and is made again.
        """
        waiting = [arm for arm in self.arms if arm not in self._medians_s]
        yield from self._sweep(waiting)
        if waiting == [PLAIN]:
            return
        best, again = self._best, None
        if len(self.arms) > 1:
            before_s = self._least_s[best]
            again = yield from self._take(best, TURN)
            error = self.error(TURN - UNCOUNTED)
            self.was_disturbed = again is not None and differ(before_s, min(again), error)
            if self.was_disturbed and again is not None:
                self._least_s[best] = min(again)
                yield from self._sweep([arm for arm in reversed(self.arms) if arm != best])
                best, again = self._best, None
        best_s = self._weighted_s(best)
        self.incumbent = best
        self.ratios = {arm: self._weighted_s(arm) / best_s for arm in self._least_s} if best_s else {}
        noise = math.sqrt(2.0) * self.error(TURN - UNCOUNTED)
        margin = math.inf if self.was_disturbed else max(RIVAL, SURE * noise)
        near = sorted(self.ratios, key=self.ratios.__getitem__)
        near = [arm for arm in near if self.ratios[arm] < 1.0 + margin]
        if PLAIN in near and best != PLAIN and not self.was_disturbed:  # it stays unless it is beaten
            self._take_over(PLAIN)
            again = None
        yield from self.compare([arm for arm in near if arm != self.incumbent][:RIVALS], again)
        self._challenges.clear()
        self._has_raced = True

    def _sweep(self, arms: Sequence[int]) -> Rules[None]:
        for arm in arms:
            times = yield from self._take(arm, TURN)
            if times is not None:
                self._least_s[arm] = min(times)

    @property
    def _best(self) -> int:
        return min((arm for arm in self.arms if arm in self._least_s), key=self._weighted_s, default=PLAIN)

    def _weighted_s(self, arm: int) -> float:
        return self._handicaps[arm] * self._least_s[arm]

    # ---------------------------------------------------------------- comparisons

    def compare(self, challengers: Sequence[int], before: Times | None = None) -> Rules[None]:
        """Let arms challenge the incumbent, one after the other.

        Args:
            challengers: the arms.
            before: the seconds of the incumbent's steps just before; ``None`` if something else has run.
        """
        left = MOST
        for challenger in challengers:
            incumbent = self.incumbent
            if challenger != incumbent and challenger not in self.left_out and left >= 2 * (TURN + 1):
                if before is None:
                    before = yield from self._take(incumbent, TURN)
                if before is not None:
                    before, left = yield from self._challenge(challenger, before, left)

    def _challenge(self, challenger: int, before: Times, left: int) -> Rules[tuple[Times | None, int]]:
        """Let an arm challenge the incumbent in at most ``left`` steps, and return the incumbent's last steps, or
        ``None`` if it is another arm now, and the steps that are left."""
        incumbent, length, disturbances = self.incumbent, TURN, 0
        handicap = self._handicaps[challenger] / self._handicaps[incumbent]
        comparison = self._unfinished.pop(challenger, None) or Comparison(handicap)
        self._challenges[challenger] = self._challenges.get(challenger, 0) + 1
        while True:
            turn = yield from self._take(challenger, length)
            if turn is None:
                return before, left
            after = yield from self._take(incumbent, length)
            if after is None:
                return None, left
            left -= 2 * (length + 1)
            counts = comparison.add(before, turn, after, self._deviation)
            before = after
            if counts:
                length *= 2
                verdict = comparison.verdict(left < 2 * (length + 1))
                if verdict is not None:
                    self.ratios[challenger] = comparison.ratio
                    if verdict:
                        self._take_over(challenger)
                    return (None if verdict else before), left
            else:
                disturbances += 1
                if disturbances >= DISTURBANCES or left < 2 * (length + 1):
                    self._unfinished[challenger] = comparison  # it goes on another time
                    return before, left

    def _take_over(self, arm: int) -> None:
        """Let an arm be the incumbent, to whose step all ratios are given."""
        ratio = self.ratios.get(arm, 1.0)
        self.ratios = {each: known / ratio for each, known in ({self.incumbent: 1.0} | self.ratios).items()}
        self.incumbent = arm
        self._challenges.clear()
        self._unfinished.clear()

    # ---------------------------------------------------------------- what comparisons cost

    def ran(self, times: Times) -> None:
        """Note some steps with the incumbent between comparisons."""
        self._note(self.incumbent, times)
        self._total_s += sum(times)

    @property
    def may_compare(self) -> bool:
        """Whether another comparison is worth its cost: the time that they have lost is a small share of all time."""
        step_s = self._medians_s.get(self.incumbent, 0.0)
        return self._lost_s <= BASE * step_s + SHARE * self._total_s

    @property
    def lost_s(self) -> float:
        """The estimated seconds that comparisons after the first race have lost. Turns of other arms took longer than
        the incumbent's would have, and so did the exact steps that come with a change."""
        return self._lost_s

    def next_challengers(self, is_news: bool, is_faster: bool = False) -> list[int]:
        """The arms that challenge the incumbent next.

        Args:
            is_news: whether the incumbent's steps take another time than before. Then it is the fastest one of the
                others, as far as is known. Otherwise all others have their turn, one after the other.
            is_faster: whether they take less time than before. Then compression may pay no longer, and plain steps
                challenge it, too.
        """
        others = [arm for arm in self.arms if arm != self.incumbent]
        known = {arm: self.ratios.get(arm, 1.0) for arm in others}
        if not is_news:
            return sorted(others, key=lambda arm: (self._challenges.get(arm, 0), known[arm]))[:1]
        chosen = sorted(others, key=known.__getitem__)[:1]
        return [*chosen, PLAIN] if is_faster and PLAIN in others and PLAIN not in chosen else chosen

    # ---------------------------------------------------------------- turns

    def _take(self, arm: int, steps: int) -> Rules[Times | None]:
        """The seconds of the counted steps of a turn; ``None`` if the arm cannot run, which is left out then."""
        is_first, is_new = self._running is None, arm != self._running
        times = yield Turn(arm, steps, UNCOUNTED if is_new else 0)
        if times is None:
            self.leave_out(arm)
            return None
        times = [max(each, _LEAST_S) for each in times]
        self._running = arm
        incumbent_s = self._medians_s.get(self.incumbent)
        self.steps += (steps if arm != self.incumbent or not self._has_raced else 0) + (is_new and not is_first)
        self._note(arm, times)
        if self._has_raced and incumbent_s is not None:
            exact_s = self.ratios.get(PLAIN, 1.0) * incumbent_s if is_new else 0.0
            if arm != self.incumbent:
                self._lost_s += steps * max(self.median_s(arm) - incumbent_s, 0.0)
            self._lost_s += max(exact_s - incumbent_s, 0.0)
            self._total_s += steps * self.median_s(arm) + exact_s
        return times

    def _note(self, arm: int, times: Times) -> None:
        self._medians_s[arm] = median_s = statistics.median(times)
        if median_s:
            self._deviations += [abs(each / median_s - 1.0) for each in times]
