"""The policy ``exhaustive``: the best product of options, for small problems."""

from __future__ import annotations

import math

from ...plans.plan import Plan
from ..drafts.drafts import Option, draft_of_launches, plan_of, usual_launches
from ..drafts.options import all_options
from ..drafts.problem import Problem, ProblemError
from ..policies.none import none
from ..search.search import Search, with_options

_UNIFORM = 20  # plans with the same option for all launches that are judged first
MAX_BITS = 20
"""The largest problem, as the number of launches times the binary logarithm of the number of options."""


def exhaustive(problem: Problem) -> Plan:
    """The fastest plan in which every launch is one message with any of the options on the device.

    The timeline judges them in the order of bounds from below, until no bound is below the best of them.

    Raises:
        ProblemError: there are too many plans.
    """
    launches = usual_launches(problem)
    draft = draft_of_launches(launches, Option())
    search = Search(problem, sharing=False)
    options = search.worthwhile(draft, all_options(problem))
    bits = len(launches) * math.log2(len(options))
    if bits > MAX_BITS:
        raise ProblemError(
            f"exhaustive: {len(launches)} launches with {len(options)} options are {bits:.0f} bits, at most {MAX_BITS} "
            "are tried"
        )
    plans = [none(problem), *(plan_of(problem, each) for each in search.uniform(launches, options, _UNIFORM))]
    best = min(plans, key=problem.step_s)
    base_s = problem.trace.forward_s + problem.trace.optimizer_s
    for bound_s, choice in search.products(draft, options, problem.step_s(best) - base_s):
        if base_s + bound_s >= problem.step_s(best):
            break
        plan = plan_of(problem, with_options(draft, [options[at] for at in choice]))
        best = min(best, plan, key=problem.step_s)
    return best
