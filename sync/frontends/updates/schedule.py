"""The steps of a round after which fragments of a model are sent, and the steps until their means arrive."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

Every: TypeAlias = int | Mapping[int, int]
"""The number of steps of every round, or those of the rounds from some steps on."""

_ALPHA, _ALPHA_BOTH = 1.2, 1.4
"""The defaults of ``alpha`` over the highest learning rate: about 0.3 of the steps' bits with a rate that falls by a
cosine, and a quarter with rounds that follow the rate before its highest value, too (``bench/training/updates.py``)."""
_LONGEST_RISING = 8
"""The longest round before the highest rate, where gradients change fastest."""


def quadratic_rounds(
    rates: Sequence[float], every: int = 2, alpha: float | None = None, both: bool = False
) -> dict[int, int]:
    """Rounds that are longer where the learning rate is lower, for ``every`` of :class:`~gckernels.sync.Updates`.

    A round has ``max(every, floor((alpha / rate) ** 2))`` steps, where ``rate`` is the learning rate of its first step
    (quadratic synchronisation rule, Gu et al., arXiv:2310.14423, section 2). Before the highest rate rounds have
    ``every`` steps, or with ``both`` what the rule says, at most 8. The last one ends with the training.

    >>> from gckernels.sync import quadratic_rounds
    >>> quadratic_rounds([1.0] * 4 + [0.5] * 14)
    {0: 2, 4: 5, 14: 4, 18: 2}
    >>> quadratic_rounds([0.5] * 7 + [1.0] * 4 + [0.5] * 14, both=True)
    {0: 7, 7: 2, 11: 7, 25: 2}

    Args:
        rates: the learning rate of every step.
        every: the number of steps of the shortest rounds.
        alpha: the learning rate with which a round would have one step. The default is 1.2 times the highest rate, and
            1.4 times with ``both``.
        both: whether rounds follow the rate on both sides of its highest value.

    Raises:
        TypeError, ValueError: an argument is not valid.
    """
    if not rates or not all(isinstance(rate, int | float) and 0 <= rate < math.inf for rate in rates):
        raise ValueError(f"quadratic_rounds: rates must be finite numbers from 0 up, one or more, got {rates!r:.80}")
    if not max(rates) > 0:
        raise ValueError("quadratic_rounds: rates must have one above 0")
    if type(every) is not int or every < 1:
        raise ValueError(f"quadratic_rounds: every must be an int from 1 up, got {every!r}")
    if type(both) is not bool:
        raise TypeError(f"quadratic_rounds: both must be True or False, got {both!r}")
    alpha = (_ALPHA_BOTH if both else _ALPHA) * max(rates) if alpha is None else alpha
    if not (isinstance(alpha, int | float) and 0 < alpha < math.inf):
        raise ValueError(f"quadratic_rounds: alpha must be a number above 0, got {alpha!r}")
    highest, rounds, step = rates.index(max(rates)), {0: 0}, 0
    while step < len(rates):
        longest = len(rates) - step
        if step <= highest:
            longest = min(longest, _LONGEST_RISING) if both else every
        ratio = alpha / rates[step] if rates[step] else math.inf
        length = max(every, int(min(ratio**2, longest)))
        if length != rounds[max(rounds)]:
            rounds[step] = length
        step += length
    rounds[len(rates)] = every
    return rounds


@dataclass(frozen=True)
class Round:
    """The order of synchronisations in a round (Streaming DiLoCo, Douillard et al., arXiv:2501.18512, section 2).

    Each fragment is sent once in a round, after steps with about the same distance. At most one is on its way at a
    time: its mean arrives before the next one is sent, or with it.

    Attributes:
        every: the number of steps of the round.
        fragments: the number of fragments, at most ``every``.
        delay: the number of steps between the sending of a fragment and the arrival of its mean, at most
            ``every // fragments``.
    """

    every: int = 1
    fragments: int = 1
    delay: int = 0

    def check(self) -> None:
        """Raise a ValueError, in the name of a function, unless the attributes are numbers that are allowed."""
        every, fragments, delay = self.every, self.fragments, self.delay
        if type(every) is not int or every < 1:
            raise ValueError(f"Updates: every must be an int from 1 up, or have such ints by steps, got {every!r}")
        if type(fragments) is not int or not 1 <= fragments <= every:
            raise ValueError(f"Updates: fragments must be an int from 1 to every, {every}, got {fragments!r}")
        longest = every // fragments
        if type(delay) is not int or not 0 <= delay <= longest:
            raise ValueError(
                f"Updates: delay must be an int from 0 to every // fragments, {longest}, so that one fragment arrives "
                f"before the next one is sent, got {delay!r}"
            )

    def sent_after(self, taken: int) -> int | None:
        """The number of the fragment that is sent after as many steps of a round; ``None`` if there is none."""
        number = taken * self.fragments // self.every - 1
        ends = -(-(number + 1) * self.every // self.fragments)
        return number if number >= 0 and ends == taken else None


@dataclass(frozen=True)
class Schedule:
    """The rounds of a training.

    Attributes:
        every: the number of steps of a round; or those of the rounds that begin from some steps on, by the number of
            steps made before. A round ends where the next number begins.
        fragments: the number of fragments of each round.
        delay: the number of steps until the mean of a fragment arrives.
    """

    every: Every = 1
    fragments: int = 1
    delay: int = 0

    def check(self) -> None:
        """Raise a ValueError, in the name of a function, unless all rounds are allowed."""
        if isinstance(self.every, Mapping):
            begins = list(self.every)
            if not (begins[:1] == [0] and all(type(each) is int for each in begins) and begins == sorted(begins)):
                raise ValueError(
                    f"Updates: every must have rounds by the number of steps made before, in order from 0 on, such as "
                    f"{{0: 2, 1000: 8}}, got {dict(self.every)!r}"
                )
            for begin, end in itertools.pairwise(begins):
                length = self.every[begin]
                if type(length) is int and length > 0 and (rest := (end - begin) % length):
                    Round(rest, self.fragments, self.delay).check()
        for length in self._lengths:
            Round(length, self.fragments, self.delay).check()

    @property
    def _lengths(self) -> Sequence[int]:
        return list(self.every.values()) if isinstance(self.every, Mapping) else [self.every]

    def has_rounds_of(self, most: int) -> bool:
        """Whether there are rounds of at most as many steps."""
        return any(length in range(1, most + 1) for length in self._lengths)

    def round_at(self, step: int) -> Round:
        """The round that begins when a number of steps has been made."""
        if not isinstance(self.every, Mapping):
            return Round(self.every, self.fragments, self.delay)
        begins = list(self.every)
        index = bisect.bisect_right(begins, step)
        length = self.every[begins[index - 1]]
        if index < len(begins):
            length = min(length, begins[index] - step)
        return Round(length, self.fragments, self.delay)
