"""The policies from whose plans ``auto`` starts, and their plans."""

from __future__ import annotations

import time
from collections.abc import Mapping

from ..plans.plan import Plan, PlanError
from ..programs.spans import MEAN
from .drafts.problem import Found, Policy, Problem, ProblemError
from .machines.machine import MachineError
from .policies.baselines import all_, none, threshold
from .policies.cupcake import cupcake
from .policies.espresso import espresso
from .policies.every_tensor import byteps, hitopkcomm
from .policies.mergecomp import mergecomp
from .policies.secopa import secopa

STARTS: Mapping[str, Policy] = {
    "none": none,
    "all": all_,
    "threshold": threshold,
    "secopa": secopa,
    "mergecomp": mergecomp,
    "cupcake": cupcake,
    "espresso": espresso,
    "byteps": byteps,
    "hitopkcomm": hitopkcomm,
}

_OF_ALL_SPANS = ("none", "all", "threshold")
"""The policies that are not of systems with data parallelism alone."""


def found_plans(problem: Problem) -> dict[str, Plan]:
    """The plans of these policies, by name. A policy is missing that finds none, or one without a price."""
    found = {}
    for name in STARTS:
        try:
            plan = found_by(name, problem).plan
            problem.step_s(plan)  # the machine may lack a price that the policy has not asked for
            found[name] = plan
        except (MachineError, PlanError, ProblemError):
            if name == "none":
                raise
    return found


def found_by(name: str, problem: Problem) -> Found:
    """The plan of one of these policies. It is kept with the problem.

    Raises:
        ProblemError: the policy has no plan for the problem.
    """
    if problem.frontend.span() != MEAN and name not in _OF_ALL_SPANS:
        raise ProblemError(f"policy: {name} plans for models whose ranks all get the mean of the gradients")
    if name not in problem.found:
        start_s = time.perf_counter()
        plan = STARTS[name](problem)
        problem.found[name] = Found(plan, time.perf_counter() - start_s)
    return problem.found[name]
