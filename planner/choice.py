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

from .auto import auto, uncollected
from .drafts.problem import Found, Policy, Problem, ProblemError
from .machines.machine import MachineError
from .machines.published import SLOWER
from .policies.baselines import all_, none, threshold, uniform
from .policies.espresso import espresso
from .policies.every_tensor import byteps, hitopkcomm
from .policies.mergecomp import mergecomp
from .policies.secopa import secopa
from .timeline.timeline import Timeline

COMPARED: Mapping[str, Policy] = {
    "none": none,
    "all": all_,
    "threshold": threshold,
    "secopa": secopa,
    "mergecomp": mergecomp,
    "espresso": espresso,
    "byteps": byteps,
    "hitopkcomm": hitopkcomm,
}
"""The policies beside whose plans that of ``auto`` stands."""
STARTS = ("none", "mergecomp", "espresso")
"""The policies from whose plans ``auto`` starts."""

PLANNED_ERROR = 0.12
"""The least relative error of the prediction of a plan that predictions have chosen, compared with one compressor for
everything. Errors of prices add up in such a plan: of two that were measured, one was predicted to take 117 ms and took
133 ms, the other 220 and 230 ms, where plans with one compressor were right within 2 %."""

_OF_ALL_SPANS = ("none", "all", "threshold")
"""The policies that are not of systems with data parallelism alone."""


@dataclass(frozen=True)
class Row:
    """The plan of a policy."""

    policy: str  # the name of the policy
    plan: Plan
    step_s: float  # the predicted time of a step
    exposed_s: float  # the part of it from the end of backward until all gradients are averaged
    error: float  # the relative error of the gradients
    found_s: float  # how long the search has taken, with that of the policies from which it starts
    margin: float  # the relative error that the prediction is expected to have


@dataclass(frozen=True)
class Choice:
    """The plan of a policy, and those of others."""

    asked: str  # the name of the policy that was asked for
    policy: str
    """The name of the policy whose plan it is: that of ``all`` in place of that of ``auto`` if the latter saves less
    over it than predictions may be wrong by, at least :data:`PLANNED_ERROR`."""
    plan: Plan  # its plan, with a prediction
    timeline: Timeline  # the predicted timeline of a step with the plan
    rows: tuple[Row, ...]  # the policies with a plan, none first
    pays: bool  # whether a step with the plan saves more than predictions may be wrong by

    @property
    def row(self) -> Row:
        """The row of the policy."""
        return self.row_of(self.policy)

    def row_of(self, policy: str) -> Row:
        """The row of a policy that has one."""
        return next(row for row in self.rows if row.policy == policy)

    @property
    def none(self) -> Row:
        """The row of the policy ``none``."""
        return self.row_of("none")


def choose(problem: Problem, policy: str = "auto", compared: Iterable[str] = COMPARED) -> Choice:
    """The plan of a policy, and a row for each policy that it is compared with.

    Args:
        policy: the name of the policy, as for :func:`policy_of`.
        compared: the names of other policies. A policy that has no plan for the problem is left out.

    Raises:
        ProblemError: there is no policy of this name, or it has no plan for the problem.
        PlanError, MachineError: no plan of the policy fits the trace or the machine.
    """
    policy_of(policy)
    rows, asked = [], policy
    for name in dict.fromkeys(("none", *compared, *(["all"] if asked == "auto" else []), policy)):
        try:
            rows.append(_row(problem, name))
        except (MachineError, PlanError, ProblemError):
            if name in ("none", policy):
                raise
    by_name, none = {row.policy: row for row in rows}, rows[0]
    uniform = by_name.get("all") if asked == "auto" else None
    if uniform is not None and saves(problem, uniform, none):
        planned = by_name[asked]
        margin = max(PLANNED_ERROR, planned.margin, uniform.margin)
        policy = asked if problem.is_gain(planned.step_s, uniform.step_s, margin) else "all"
    chosen, machine, trace = by_name[policy], problem.machine, problem.trace
    prediction = Prediction(
        step_s=chosen.step_s,
        none_s=none.step_s,
        policy=policy,
        estimated=machine.estimated,
        margin=chosen.margin,
        machine=Source(machine.name, hashlib.sha256(repr(machine).encode()).hexdigest()),
        trace=Source(trace.model, trace.fingerprint()),
        error=chosen.error,
        alternatives=tuple(Alternative(row.policy, row.step_s, row.error) for row in rows if row.policy != policy),
    )
    plan, pays = replace(chosen.plan, prediction=prediction), saves(problem, chosen, none)
    return Choice(asked, policy, plan, problem.timeline(plan), tuple(rows), pays)


def saves(problem: Problem, row: Row, other: Row) -> bool:
    """Whether the plan of a row saves more, compared with another row's, than both may be predicted wrong by."""
    return problem.is_gain(row.step_s, other.step_s, max(row.margin, other.margin))


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


def _row(problem: Problem, name: str) -> Row:
    if name in COMPARED:
        found = _found_by(name, problem)
    else:
        before_s = {each: problem.found[each].search_s for each in STARTS if each in problem.found}
        start_s = time.perf_counter()
        plan = policy_of(name)(problem)
        search_s = time.perf_counter() - start_s
        found = Found(plan, search_s + (sum(before_s.values()) if name == "auto" else 0.0))
    judged = problem.timeline(found.plan)
    error = relative_error(found.plan, problem.trace)
    margin = problem.margin(judged)
    if name in SLOWER and problem.machine.estimated:
        margin = max(margin, SLOWER[name].longest - 1.0)
    return Row(name, found.plan, judged.step_s, judged.exposed_s, error, found.search_s, margin)


def _best(problem: Problem) -> Plan:
    """The plan of the policy ``auto``, which is as fast as those that others have found for the problem. A policy that
    finds no plan, or one without a price, is no start."""
    plans = {}
    with uncollected():
        for name in dict.fromkeys((*STARTS, *problem.found)):
            try:
                plan = _found_by(name, problem).plan
                problem.step_s(plan)  # the machine may lack a price that the policy has not asked for
                plans[name] = plan
            except (MachineError, PlanError, ProblemError):
                if name == "none":
                    raise
        return auto(problem, plans, [plans[name] for name in STARTS if name in plans])


def _found_by(name: str, problem: Problem) -> Found:
    """The plan of a policy other than ``auto``. It is kept with the problem.

    Raises:
        ProblemError: the policy has no plan for the problem.
    """
    if problem.frontend.span() != MEAN and name not in _OF_ALL_SPANS:
        raise ProblemError(f"policy: {name} plans for models whose ranks all get the mean of the gradients")
    if name not in problem.found:
        start_s = time.perf_counter()
        plan = COMPARED[name](problem)
        problem.found[name] = Found(plan, time.perf_counter() - start_s)
    return problem.found[name]


POLICIES: Mapping[str, Policy] = {**COMPARED, "auto": _best}
"""All policies, by name."""
