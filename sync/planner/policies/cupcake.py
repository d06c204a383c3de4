"""The policy ``cupcake``: the fastest fusion of a model's gradients."""

from __future__ import annotations

from ...plans.plan import Plan
from ..drafts import Option, plan_of
from ..fusion import Groups
from ..fusion_costs import exact_groups, fusion_costs
from ..machine import MachineError
from ..option_tables import Launches
from ..problem import Problem
from .messages import codecs, fastest, uniform_draft, usual_programs
from .none import none

FINALISTS = 3
"""The number of options whose groups are compared on the timeline."""


def cupcake(problem: Problem) -> Plan:
    """The plan whose launches are the fastest groups in Cupcake's model (:mod:`~gckernels.sync.planner.fusion`).

    In that model, encoding and decoding delay backward, and groups are sent one after the other. The groups are exact
    for prices that are a constant plus a sum; for other prices they are exact to 0.1 percent. The options with the
    fastest groups, a compressor and a program for all tensors, are compared on the timeline.

    With DDP the groups are DDP's buckets, which a plan cannot change; only the option is chosen. Without compressors it
    is the plan of ``none``.
    """
    options = [
        Option(program, compressor) for compressor in codecs(problem) for program in usual_programs(problem, compressor)
    ]
    if problem.buckets:
        plans = [plan_of(problem, uniform_draft(problem, problem.buckets, option)) for option in options]
        return fastest(problem, plans) if plans else none(problem)
    found = sorted(_searched(problem, options), key=lambda each: each[1].step_s)[:FINALISTS]
    plans = [plan_of(problem, uniform_draft(problem, launches_of(groups), option)) for option, groups in found]
    return fastest(problem, plans) if plans else none(problem)


def launches_of(groups: Groups) -> Launches:
    """The tensors of each group."""
    starts = (0, *groups.ends[:-1])
    return tuple(tuple(range(start, end)) for start, end in zip(starts, groups.ends, strict=True))


_MAX_EXACT = 400
"""Tensors of a model up to which groups with any prices are searched."""


def _searched(problem: Problem, options: list[Option]) -> list[tuple[Option, Groups]]:
    """The groups of every option that the machine has prices for.

    The search for any prices is long, so only the option that promises most goes through it.
    """
    priced = []
    for option in options:
        try:
            costs = fusion_costs(problem, option)
        except MachineError:
            continue
        priced.append((option, costs, costs.groups()))
    found = [(option, groups) for option, _, groups in priced]
    if priced:
        option, costs, _ = min(priced, key=lambda each: each[2].step_s)
        if not costs.is_affine and len(problem.trace.tensors) <= _MAX_EXACT:
            found.append((option, exact_groups(problem, option, costs)))
    return found
