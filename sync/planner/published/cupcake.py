"""The policy ``cupcake``: the fastest fusion of a model's gradients."""

from __future__ import annotations

import math

from ...plans.plan import Plan
from ..drafts.drafts import Launches, Option, plan_of
from ..drafts.problem import Problem
from ..policies.messages import JUDGED, codecs, fastest, uniform_draft, usual_programs
from ..policies.none import none
from ..search.fusion import Groups
from ..search.fusion_costs import FusionCosts, exact_groups, fusion_costs


def cupcake(problem: Problem) -> Plan:
    """The plan whose launches are the fastest groups in Cupcake's model (:mod:`~gckernels.sync.planner.search.fusion`).

    In that model, encoding and decoding delay backward, and groups are sent one after the other. The groups are exact
    for prices that are a constant plus a sum; for other prices they are exact to 0.1 percent. The options with the
    fastest groups, a compressor and a program for all tensors, are compared on the timeline.

    With DDP the groups are DDP's buckets, which a plan cannot change; only the option is chosen. Without compressors it
    is the plan of ``none``.
    """
    if problem.buckets:
        options = [
            Option(program, compressor)
            for compressor in codecs(problem)
            for program in usual_programs(problem, compressor)
        ]
        plans = [plan_of(problem, uniform_draft(problem, problem.buckets, option)) for option in options]
        return fastest(problem, plans) if plans else none(problem)
    found = _searched(problem)
    plans = [plan_of(problem, uniform_draft(problem, launches_of(groups), option)) for option, groups in found]
    return fastest(problem, plans) if plans else none(problem)


def launches_of(groups: Groups) -> Launches:
    """The tensors of each group."""
    starts = (0, *groups.ends[:-1])
    return tuple(tuple(range(start, end)) for start, end in zip(starts, groups.ends, strict=True))


_MAX_EXACT = 400
"""Tensors of a model up to which groups with any prices are searched."""


def _searched(problem: Problem) -> list[tuple[Option, Groups]]:
    """The options with the fastest groups, of those that the machine has prices for, and these groups; the fastest one
    first.

    The search for any prices is long, so only the first option goes through it.
    """
    priced: list[tuple[Option, FusionCosts]] = []
    for compressor in codecs(problem):
        programs = usual_programs(problem, compressor)
        priced += [
            (Option(program, compressor), costs)
            for program, costs in zip(programs, fusion_costs(problem, compressor, programs), strict=True)
            if costs is not None
        ]
    found: list[tuple[Option, Groups, FusionCosts]] = []
    for option, costs in sorted(priced, key=lambda each: each[1].bound_s):
        below_s = found[-1][1].step_s if len(found) == JUDGED else math.inf
        if costs.bound_s >= below_s:
            break
        groups = costs.groups(below_s)
        if groups is not None:
            found = sorted([*found, (option, groups, costs)], key=lambda each: each[1].step_s)[:JUDGED]
    if found and not found[0][2].is_affine and len(problem.trace.tensors) <= _MAX_EXACT:
        option, groups, costs = found[0]
        found[0] = (option, exact_groups(problem, option, costs, groups), costs)
    return [(option, groups) for option, groups, _ in found]
