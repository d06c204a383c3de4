"""Search for a few cuts with an expensive time, as MergeComp does.

MergeComp (Wang et al., 2021) treats the time of a step as a function of one cut that first falls and then rises. So it
halves the range of the cut, comparing the times of two cuts that are close to each other. Its published code cuts once;
the paper raises the number of groups as long as that helps.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

MIN_GAIN = 0.03
"""The least relative improvement for which the search goes on with one more group."""
STRIDE = 2
"""The distance of the two cuts that are compared."""


@dataclass(frozen=True)
class Cuts:
    """The result of a search.

    Attributes:
        cuts: where the second group and all later ones start, ascending.
        step_s: the time of a step.
        probes: how many different cuts were timed.
    """

    cuts: tuple[int, ...]
    step_s: float
    probes: int


def best_cuts(
    num: int,
    step_s: Callable[[tuple[int, ...]], float],
    max_groups: int = 2,
    min_gain: float = MIN_GAIN,
    places: int = 12,
) -> Cuts:
    """The best cuts of ``num`` gradients that the search has timed.

    Args:
        num: the number of gradients, at least 1.
        step_s: returns the time of a step for given cuts.
        max_groups: the largest number of groups. With 2 the search is that of MergeComp's published code.
        min_gain: as :data:`MIN_GAIN`; the search stops at a smaller improvement.
        places: all cuts but the last one are tried at up to this many places, evenly spaced. The paper tries all.
    """
    known: dict[tuple[int, ...], float] = {}

    def probe(cuts: tuple[int, ...]) -> float:
        if cuts not in known:
            known[cuts] = step_s(cuts)
        return known[cuts]

    probe(())
    before_s = min(known.values())
    for groups in range(2, min(max_groups, num) + 1):
        stride = max(1, -(-(num - 1) // places))
        for first in itertools.combinations(range(1, num - 1, stride), groups - 2):
            _halve(first, first[-1] + 1 if first else 1, num - 1, probe)
        now_s = min(known.values())
        if now_s > before_s * (1 - min_gain):
            break
        before_s = now_s
    best = min(known, key=lambda cuts: (known[cuts], len(cuts)))
    return Cuts(best, known[best], len(known))


def _halve(first: tuple[int, ...], low: int, high: int, probe: Callable[[tuple[int, ...]], float]) -> None:
    """Probe one more cut from ``low`` to ``high``, behind the cuts ``first``, in ever smaller ranges."""
    last = high
    if low == high:
        probe((*first, low))
    while low < high - 1:
        middle = (low + high) // 2
        beside = min(middle + STRIDE, last)
        if probe((*first, middle)) > probe((*first, beside)):
            low = beside
        else:
            high = middle
    if low < high:  # a range of two cuts has no middle
        probe((*first, low))
        probe((*first, high))
