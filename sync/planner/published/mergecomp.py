"""The policy ``mergecomp``: gradients merged into two or three groups."""

from __future__ import annotations

import itertools

from ...plans.plan import Plan
from ..drafts.drafts import Launches, Option, plan_of
from ..drafts.problem import Problem
from ..machines.machine import MachineError
from ..policies.messages import codecs, preselected, uniform_draft, usual_programs
from ..policies.none import none
from ..search.cut_search import best_cuts
from ..search.search import Search

MAX_GROUPS = 3
PLACES = 2
"""Places that are tried for the first of two cuts."""


def mergecomp(problem: Problem) -> Plan:
    """The plan of MergeComp's search, whose steps are estimated instead of timed in training.

    It merges all gradients, then cuts once as the published code does, and twice if the first cut has made steps
    faster by 3 percent, as in the paper. Every group is a launch. The compressor and the usual program are those that
    are fastest with two groups of the same number of gradients.

    With DDP the groups are DDP's buckets, which a plan cannot change. Without compressors it is the plan of ``none``.
    """
    num = len(problem.trace.tensors)
    whole = problem.buckets or cut_at(problem, (num // 2,) if num > 1 else ())
    options = [
        Option(program, compressor) for compressor in codecs(problem) for program in usual_programs(problem, compressor)
    ]
    timed = []
    drafts = [uniform_draft(problem, whole, option) for option in options]
    for option in [options[at] for at in preselected(problem, drafts)]:
        plan = plan_of(problem, uniform_draft(problem, whole, option))
        try:
            timed.append((problem.step_s(plan), plan, option))
        except MachineError:
            continue
    if not timed:
        return none(problem)
    _, plan, option = min(timed, key=lambda each: each[0])
    if problem.buckets:
        return plan

    def merged(cuts: tuple[int, ...]) -> Plan:
        return plan_of(problem, uniform_draft(problem, cut_at(problem, cuts), option))

    def estimate(cuts: tuple[int, ...]) -> float:
        return search.estimate(uniform_draft(problem, cut_at(problem, cuts), option))

    search = Search(problem)
    found = best_cuts(num, estimate, MAX_GROUPS, places=PLACES)
    return merged(found.cuts)


def cut_at(problem: Problem, cuts: tuple[int, ...]) -> Launches:
    """The tensors in groups; each cut starts another group, and so does each tensor of another dtype."""
    dtypes = [tensor.dtype for tensor in problem.trace.tensors]
    others = {index for index in range(1, len(dtypes)) if dtypes[index] != dtypes[index - 1]}
    starts = sorted({0, *cuts} | others)
    return tuple(tuple(range(start, stop)) for start, stop in itertools.pairwise((*starts, len(dtypes))))
