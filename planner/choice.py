"""Choices: all policies by name, and the plan of one, judged beside those of the others."""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from gckernels.sync.accuracy.accuracy import relative_error
from gckernels.sync.plans.arguments import as_method
from gckernels.sync.plans.plan import Plan, PlanError
from gckernels.sync.plans.prediction import Alternative, Prediction, Source
from gckernels.sync.programs.spans import MEAN

from .auto import auto, free_problem, uncollected
from .drafts.problem import Found, Policy, Problem, ProblemError
from .machines.machine import MachineError
from .policies.baselines import all_, exhaustive, none, threshold, uniform
from .policies.cupcake import cupcake
from .policies.espresso import espresso
from .policies.every_tensor import byteps, hitopkcomm
from .policies.mergecomp import mergecomp
from .policies.secopa import secopa
from .timeline.timeline import Timeline

BOUND = "bound"

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
"""The policies from whose plans ``auto`` starts."""

_OF_ALL_SPANS = ("none", "all", "threshold")
"""The policies that are not of systems with data parallelism alone."""


@dataclass(frozen=True)
class Row:
    """The plan of a policy.

    Attributes:
        policy: the name of the policy.
        plan: its plan.
        step_s: the predicted time of a step; for ``bound`` on a machine whose codecs take no time.
        exposed_s: the part of it from the end of backward until all gradients are averaged.
        error: the relative error of the gradients.
        found_s: how long the search has taken, with that of the policies from which it starts.
    """

    policy: str
    plan: Plan
    step_s: float
    exposed_s: float
    error: float
    found_s: float


@dataclass(frozen=True)
class Choice:
    """The plan of a policy, and those of others.

    Attributes:
        policy: the name of the policy.
        plan: its plan, with a prediction.
        timeline: the predicted timeline of a step with the plan.
        rows: the policies with a plan, ``none`` first.
        pays: whether a step with the plan saves more than predictions may be wrong by.
    """

    policy: str
    plan: Plan
    timeline: Timeline
    rows: tuple[Row, ...]
    pays: bool

    @property
    def row(self) -> Row:
        """The row of the policy."""
        return next(row for row in self.rows if row.policy == self.policy)

    @property
    def is_limit(self) -> bool:
        """Whether the plan is a limit only, which no training reaches: its codecs cost nothing."""
        return self.policy == BOUND

    @property
    def none(self) -> Row:
        """The row of the policy ``none``."""
        return next(row for row in self.rows if row.policy == "none")


def choose(problem: Problem, policy: str = "auto", compared: Iterable[str] = STARTS) -> Choice:
    """The plan of a policy, and a row for each policy that it is compared with.

    Args:
        problem: the problem.
        policy: the name of the policy, as for :func:`policy_of`.
        compared: the names of other policies. A policy that has no plan for the problem is left out.

    Raises:
        ProblemError: there is no policy of this name, or it has no plan for the problem.
        PlanError, MachineError: no plan of the policy fits the trace or the machine.
    """
    policy_of(policy)
    rows = []
    for name in dict.fromkeys(("none", *compared, policy)):
        try:
            rows.append(_row(problem, name))
        except (MachineError, PlanError, ProblemError):
            if name in ("none", policy):
                raise
    chosen, none = next(row for row in rows if row.policy == policy), rows[0]
    machine, trace = problem.machine, problem.trace
    prediction = Prediction(
        step_s=chosen.step_s,
        none_s=none.step_s,
        policy=policy,
        estimated=machine.estimated,
        margin=machine.margin,
        machine=Source(machine.name, hashlib.sha256(repr(machine).encode()).hexdigest()),
        trace=Source(trace.model, trace.fingerprint()),
        error=chosen.error,
        alternatives=tuple(Alternative(row.policy, row.step_s, row.error) for row in rows if row.policy != policy),
    )
    pays = problem.is_gain(chosen.step_s, none.step_s)
    plan = replace(chosen.plan, prediction=prediction)
    return Choice(policy, plan, _judging(problem, policy).timeline(plan), tuple(rows), pays)


def policy_of(name: str) -> Policy:
    """The policy of a name.

    Args:
        name: one of :data:`POLICIES`, or ``"all:"`` and a compressor's spec, such as ``"all:EFSignSGD"``.

    Raises:
        ProblemError: there is no such policy or compressor.
    """
    if name in POLICIES:
        return POLICIES[name]
    if name.startswith("all:"):
        try:
            return functools.partial(uniform, compressor=as_method("policy: all", name.removeprefix("all:")))
        except ValueError as error:
            raise ProblemError(str(error)) from error
    raise ProblemError(f"policy: must be {', '.join(POLICIES)} or all:COMPRESSOR, got {name!r}")


def _judging(problem: Problem, policy: str) -> Problem:
    """The problem with the machine on which the plan of a policy is judged."""
    return free_problem(problem) if policy == BOUND else problem


def _row(problem: Problem, name: str) -> Row:
    if name in STARTS:
        found = _found_by(name, problem)
    else:
        before_s = sum(each.search_s for each in problem.found.values()) if name == "auto" else 0.0
        start_s = time.perf_counter()
        plan = policy_of(name)(problem)
        found = Found(plan, before_s + time.perf_counter() - start_s)
    judged = _judging(problem, name).timeline(found.plan)
    error = relative_error(found.plan, problem.trace)
    return Row(name, found.plan, judged.step_s, judged.exposed_s, error, found.search_s)


def _best(problem: Problem) -> Plan:
    """The plan of the policy ``auto``. A policy that finds no plan, or one without a price, is no start."""
    starts = {}
    with uncollected():
        for name in STARTS:
            try:
                plan = _found_by(name, problem).plan
                problem.step_s(plan)  # the machine may lack a price that the policy has not asked for
                starts[name] = plan
            except (MachineError, PlanError, ProblemError):
                if name == "none":
                    raise
        return auto(problem, starts)


def _found_by(name: str, problem: Problem) -> Found:
    """The plan of a policy from which ``auto`` starts. It is kept with the problem.

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


POLICIES: Mapping[str, Policy] = {
    **STARTS,
    BOUND: lambda problem: _best(free_problem(problem)),
    "exhaustive": exhaustive,
    "auto": _best,
}
"""All policies, by name."""
