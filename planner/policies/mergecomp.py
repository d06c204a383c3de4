"""The policy ``mergecomp``: gradients merged into two or three groups, by a search with an expensive time.

MergeComp (Wang et al., 2021) treats the time of a step as a function of one cut that first falls and then rises. So it
halves the range of the cut, comparing the times of two cuts that are close to each other. Its published code cuts once;
the paper raises the number of groups as long as that helps.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

from gckernels.sync.plans.plan import Plan

from ..drafts.drafts import Draft, Launches, plan_of
from ..drafts.problem import Problem
from ..machines.machine import MachineError
from ..search.search import Search
from .baselines import none
from .messages import preselected, uniform_draft, usual_options

MAX_GROUPS = 3
PLACES = 2
"""Places that are tried for the first of two cuts."""
MIN_GAIN = 0.03
"""The least relative improvement for which the search goes on with one more group."""
STRIDE = 2
"""The distance of the two cuts that are compared."""


def mergecomp(problem: Problem) -> Plan:
    """The plan of MergeComp's search, whose steps are estimated instead of timed in training.

    It merges all gradients, then cuts once as the published code does, and twice if the first cut has made steps
    faster by 3 percent, as in the paper. Every group is a launch. The compressor and the usual program are those that
    are fastest with two groups of the same number of gradients.

    With DDP the groups are DDP's buckets, which a plan cannot change. Without compressors it is the plan of ``none``.
    """
    num = len(problem.trace.tensors)
    whole = problem.buckets or cut_at(problem, (num // 2,) if num > 1 else ())
    options, timed = usual_options(problem), []
    drafts = [uniform_draft(problem, whole, option) for option in options]
    for at in preselected(problem, drafts):
        plan = plan_of(problem, drafts[at])
        try:
            timed.append((problem.step_s(plan), plan, options[at]))
        except MachineError:
            continue
    if not timed:
        return none(problem)
    _, plan, option = min(timed, key=lambda each: each[0])
    if problem.buckets:
        return plan
    search = Search(problem)

    def merged(cuts: tuple[int, ...]) -> Draft:
        return uniform_draft(problem, cut_at(problem, cuts), option)

    return plan_of(problem, merged(best_cuts(num, lambda cuts: search.estimate(merged(cuts)), MAX_GROUPS, PLACES)))


def cut_at(problem: Problem, cuts: tuple[int, ...]) -> Launches:
    """The tensors in groups; each cut starts another group, and so does each tensor of another dtype."""
    dtypes = [tensor.dtype for tensor in problem.trace.tensors]
    others = {index for index in range(1, len(dtypes)) if dtypes[index] != dtypes[index - 1]}
    starts = sorted({0, *cuts} | others)
    return tuple(tuple(range(start, stop)) for start, stop in itertools.pairwise((*starts, len(dtypes))))


def best_cuts(
    num: int,
    step_s: Callable[[tuple[int, ...]], float],
    max_groups: int = 2,
    places: int = 12,
    min_gain: float = MIN_GAIN,
) -> tuple[int, ...]:
    """The best cuts of ``num`` gradients that the search has timed: where all groups but the first start, ascending.

    Args:
        num: the number of gradients, at least 1.
        step_s: returns the time of a step for given cuts.
        max_groups: the largest number of groups. With 2 the search is that of MergeComp's published code.
        places: all cuts but the last one are tried at up to this many places, evenly spaced. The paper tries all.
        min_gain: as :data:`MIN_GAIN`; the search stops at a smaller improvement.
    """
    known: dict[tuple[int, ...], float] = {}

    def probe(cuts: tuple[int, ...]) -> float:
        if cuts not in known:
            known[cuts] = step_s(cuts)
        return known[cuts]

    before_s = probe(())
    for groups in range(2, min(max_groups, num) + 1):
        stride = max(1, -(-(num - 1) // places))
        for first in itertools.combinations(range(1, num - 1, stride), groups - 2):
            _halve(first, first[-1] + 1 if first else 1, num - 1, probe)
        now_s = min(known.values())
        if now_s > before_s * (1 - min_gain):
            break
        before_s = now_s
    return min(known, key=lambda cuts: (known[cuts], len(cuts)))


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
