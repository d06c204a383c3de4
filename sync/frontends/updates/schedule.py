"""The steps of a round after which fragments of a model are sent, and the steps until their means arrive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..module.buckets import Bucket


@dataclass(frozen=True)
class Schedule:
    """The order of synchronisations in a round (Streaming DiLoCo, Douillard et al., arXiv:2501.18512, section 2).

    Each fragment is sent once in a round, after steps with about the same distance. At most one is on its way at a
    time: its mean arrives before the next one is sent, or with it.

    Attributes:
        every: the number of steps of a round.
        fragments: the number of fragments, at most ``every``.
        delay: the number of steps between the sending of a fragment and the arrival of its mean, at most
            ``every // fragments``.
    """

    every: int = 1
    fragments: int = 1
    delay: int = 0

    def check(self, caller: str) -> None:
        """Raise a ValueError, in the name of a function, unless the attributes are numbers that are allowed."""
        every, fragments, delay = self.every, self.fragments, self.delay
        if type(every) is not int or every < 1:
            raise ValueError(f"{caller}: every must be an int from 1 up, got {every!r}")
        if type(fragments) is not int or not 1 <= fragments <= every:
            raise ValueError(f"{caller}: fragments must be an int from 1 to every, {every}, got {fragments!r}")
        longest = every // fragments
        if type(delay) is not int or not 0 <= delay <= longest:
            raise ValueError(
                f"{caller}: delay must be an int from 0 to every // fragments, {longest}, so that one fragment arrives "
                f"before the next one is sent, got {delay!r}"
            )

    def sent_after(self, taken: int) -> int | None:
        """The number of the fragment that is sent after as many steps of a round; ``None`` if there is none."""
        number = taken * self.fragments // self.every - 1
        ends = -(-(number + 1) * self.every // self.fragments)
        return number if number >= 0 and ends == taken else None


def cut_fragments(buckets: Sequence[Bucket], number: int) -> list[list[Bucket]]:
    """The buckets in runs of about the same number of bytes. A run is empty if there are too few buckets."""
    fragments: list[list[Bucket]] = [[] for _ in range(number)]
    total, before = sum(bucket.vector.nbytes for bucket in buckets), 0
    for bucket in buckets:
        middle = before + bucket.vector.nbytes / 2
        fragments[min(int(middle * number / total), number - 1)].append(bucket)
        before += bucket.vector.nbytes
    return fragments
