"""Predicted plans for a training that is running: rank 0 makes them, and all ranks get them.

Trials decide between the plans, so gains count that are smaller than the error of the model.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from gckernels.codec import Codec
from gckernels.compressor import from_spec
from gckernels.sync.accuracy.accuracy import allowed_compressors, unfitted
from gckernels.sync.communication.agreement import Failure, together
from gckernels.sync.communication.ranks import Ranks
from gckernels.sync.plans.names import short_spec, summary_of
from gckernels.sync.plans.numbers import duration, plural, three_digits
from gckernels.sync.plans.plan import Frontend, Plan, PlanError
from gckernels.sync.stats.decisions import LOGGER
from gckernels.sync.traces.model_trace import ModelTrace
from gckernels.sync.tuning.trials.rules import Phase

from ..choice import COMPARED, PLANNED_ERROR, Choice, Row, choose
from ..drafts.problem import Problem
from ..machines.machine import Machine, Sharding
from ..timeline.pricing import Pricer

FINALISTS = 2
"""Plans that may be tried."""


@dataclass(frozen=True)
class Proposal:
    """The plans that are worth a trial."""

    finalists: tuple[Plan, ...]
    """Plans with predictions, the one first that is predicted to be the fastest. All compress something."""
    error: float = 0.0  # the error of the predictions, relative to the times of the plans that were tried
    found_s: float = 0.0  # how long rank 0 has searched, in seconds of a core

    def to_text(self) -> str:
        """The proposal as JSON."""
        plans = [plan.to_json() for plan in self.finalists]
        return json.dumps({"plans": plans, "error": self.error, "found_s": self.found_s})

    @staticmethod
    def from_text(text: str) -> Proposal:
        """The proposal that :meth:`to_text` has written.

        Raises:
            PlanError, ValueError: it is not valid.
        """
        record: dict[str, Any] = json.loads(text)
        plans = tuple(map(Plan.from_json, record["plans"]))
        return Proposal(plans, float(record["error"]), float(record["found_s"]))


@dataclass(frozen=True)
class TriedPlans:
    """The plans that trials have measured."""

    measured_s: Mapping[Plan, float]
    """For every plan that compresses the median of what it can change of a step, in seconds."""
    least_s: float  # the least of all plans, with plain averaging


def proposal(
    trace: ModelTrace,
    machine: Machine,
    frontend: Frontend,
    stage: Phase,
    tried: TriedPlans,
    sharding: Sharding | None = None,
    rest: Callable[[], None] = lambda: None,
) -> Proposal:
    """The plans that are predicted to beat all others by more than the model's error. Communicates nothing.

    The model and the trials measure different parts of a step, but differences between two plans are the same. So the
    fastest plan that compresses tells by how many seconds they are apart. How wrong the others are then is the error.
    Prices are fitted to the steps of these very plans, so it counts as at least that of planned plans.

    Args:
        trace: the recorded steps.
        machine: the ranks.
        frontend: the kind of the model.
        stage: the rule of accuracy.
        tried: the plans that were tried, at least one.
        sharding: the shards of a model of FSDP2.
        rest: called often meanwhile.

    Raises:
        MachineError, PlanError, ProblemError: there is no plan at all.
    """
    start_s = time.thread_time()
    fastest = min(tried.measured_s, key=lambda plan: tried.measured_s[plan])
    assert fastest.weights is None or isinstance(fastest.weights, Codec)
    allowed, pricer = allowed_compressors(trace, stage.accuracy), Pricer(machine, sharding, rest)
    problem = Problem(trace, pricer, frontend, allowed, weights=fastest.weights)
    apart_s = problem.step_s(fastest) - tried.measured_s[fastest]
    errors = [abs(problem.step_s(plan) - apart_s - each) / each for plan, each in tried.measured_s.items()]
    error, choice = max(errors), choice_of(problem)
    enough_s = tried.least_s * (1.0 - max(error, PLANNED_ERROR)) + apart_s
    found = tuple(
        replace(plan, prediction=replace(plan.prediction, step_s=max(plan.prediction.step_s - apart_s, 0.0)))
        for plan in finalists(choice)
        if plan.prediction is not None and plan.prediction.step_s < enough_s
    )
    return Proposal(found, error, time.thread_time() - start_s)


def choice_of(problem: Problem) -> Choice:
    """The plan of ``auto``, and those of all policies and of single compressors."""
    return choose(problem, "auto", (*COMPARED, *(f"all:{unfitted(method)}" for method in problem.compressors)))


def proposed(
    group: dist.ProcessGroup,
    device: torch.device,
    fitted: Callable[[Plan], Plan],
    propose: Callable[[], Proposal],
) -> Proposal | Failure:
    """The proposal of rank 0, which every rank has read and checked. Collective.

    Args:
        group: all ranks.
        device: a device whose tensors the group can send.
        fitted: returns a plan as it will run, such as with less memory; raises an exception if it cannot run.
        propose: makes the proposal; called on rank 0.

    Raises:
        RuntimeError: a rank is gone.
    """
    ranks = Ranks(group, device)
    made = together(group, device, lambda: propose().to_text() if ranks.rank == 0 else "nothing")
    if isinstance(made, Failure):
        return made
    text = ranks.first_text(made)

    def read() -> Proposal:
        found = Proposal.from_text(text)
        plans = {plan.fingerprint(): plan for plan in map(fitted, found.finalists)}
        return replace(found, finalists=tuple(plan for plan in plans.values() if plan.compresses))

    found = together(group, device, read)
    if ranks.rank == 0 and isinstance(found, Proposal) and found.finalists:
        named = [summary_of(plan, ranks.world_size) for plan in found.finalists]
        predicted_s = [None if plan.prediction is None else plan.prediction.step_s for plan in found.finalists]
        LOGGER.info("gckernels: %s", tries(list(zip(named, predicted_s, strict=True)), found.found_s))
    return found


def finalists(choice: Choice, most: int = FINALISTS) -> tuple[Plan, ...]:
    """The plans to try: the fastest by the predictions, and the fastest of other kinds.

    Plans of one kind, which send most elements by the same compressor, are predicted with about the same error, so
    that trying two of them says little.

    Args:
        choice: the plans of all policies.
        most: the number of plans at most.
    """
    rows = sorted((row for row in choice.rows if row.plan.compresses), key=lambda row: row.step_s)
    by_kind: dict[object, Row] = {}
    for row in rows:
        by_kind.setdefault(_kind(row.plan), row)
    return tuple(_predicted(row, choice) for row in list(by_kind.values())[:most])


def _kind(plan: Plan) -> object:
    """The compressor by which most elements are sent that are not averaged in place."""
    elements: Counter[object] = Counter()
    for unit in plan.units:
        if not unit.in_place:
            elements[unfitted(unit.compressor)] += unit.numel
    return elements.most_common(1)[0][0]


def _predicted(row: Row, choice: Choice) -> Plan:
    """The plan of a row, with its own prediction."""
    prediction, policy = choice.plan.prediction, row.policy
    if prediction is None:
        raise PlanError("planning: the chosen plan has no prediction")
    if policy.startswith("all:"):
        policy = f"all:{short_spec(from_spec(policy.removeprefix('all:')))}"
    return replace(row.plan, prediction=replace(prediction, step_s=row.step_s, policy=policy, error=row.error))


def tries(plans: Sequence[tuple[str, float | None]], found_s: float) -> str:
    """The line of the log before plans are tried.

    Args:
        plans: the plans, at least one, with the predicted seconds of a step.
        found_s: how long the search has taken, in seconds of a core.
    """
    named = [plan + ("" if step_s is None else f", predicted {duration(step_s)}") for plan, step_s in plans]
    found = f"{plural(len(plans), 'plan')} predicted to be faster, found in {three_digits(found_s)} s"
    return f"{found}, to be tried: {'; '.join(named)}"
