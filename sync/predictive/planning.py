"""Plans for a training that is running: rank 0 makes them, and all ranks get them.

Trials decide between the plans, so nothing is left out because it is uncertain: neither prices whose measurements
disagree, nor gains that are smaller than the error of the model.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from gckernels.codec import Codec
from gckernels.compressor import Compressor, from_spec
from gckernels.ops import Identity

from ..accuracy.accuracy import allowed_compressors, unfitted
from ..communication.agreement import Failure, together
from ..communication.ranks import Ranks
from ..planner.choice import Choice, Row, choose
from ..planner.drafts.problem import Problem
from ..planner.machines.curves import CodecModel, Coefficients
from ..planner.machines.machine import Machine, has_prices
from ..planner.machines.profile import Profile
from ..planner.machines.resting import RestingMachine
from ..planner.starts import STARTS
from ..planner.timeline.pricing import Pricer
from ..plans.names import short_spec, summary_of
from ..plans.plan import Frontend, Plan, PlanError
from ..programs.stages import StageKind
from ..programs.steps import Place
from ..stats.decisions import LOGGER
from ..traces.model_trace import Trace
from ..tuning.decisions.sentences import tries, uncertain
from ..tuning.trials.rules import Phase
from .machine_cache import Since

FINALISTS = 3
"""Plans that may be tried, beside plain averaging."""
MUCH = 0.75
"""If a plan is predicted to take at most this part of a plain step, noise cannot hide its gain, and there is time to
try another one that differs little."""
_ENCODINGS = (StageKind.ENCODE, StageKind.DECODE, StageKind.RECODE, StageKind.ADD)
_PROJECTIONS = (StageKind.PROJECT, StageKind.RECONSTRUCT)
_NOTHING = Since()
HOPELESS = 1.5
"""A plan is not tried if its step is predicted to take this many times as long as a plain one. Predictions from a short
profile are wrong by a third where an exchange is much larger than those that it has measured."""


@dataclass(frozen=True)
class Proposal:
    """The plans that are worth a trial.

    Attributes:
        finalists: plans with predictions, the one first that is predicted to be the fastest. All compress something.
        none_s: the predicted time of a plain step.
        notes: what is uncertain about the predictions, for people.
        found_s: how long rank 0 has searched, in seconds of a core.
    """

    finalists: tuple[Plan, ...]
    none_s: float
    notes: tuple[str, ...] = ()
    found_s: float = 0.0

    def to_text(self) -> str:
        """The proposal as JSON."""
        plans = [plan.to_json() for plan in self.finalists]
        return json.dumps({"plans": plans, "none_s": self.none_s, "notes": self.notes, "found_s": self.found_s})

    @property
    def predicted_s(self) -> tuple[float | None, ...]:
        """The predicted steps of plain averaging and of each finalist, in seconds."""
        predictions = [plan.prediction for plan in self.finalists]
        return (self.none_s, *(each.step_s if each is not None else None for each in predictions))

    @staticmethod
    def from_text(text: str) -> Proposal:
        """The proposal that :meth:`to_text` has written.

        Raises:
            PlanError, ValueError: it is not valid.
        """
        record: dict[str, Any] = json.loads(text)
        plans = tuple(map(Plan.from_json, record["plans"]))
        return Proposal(plans, float(record["none_s"]), tuple(map(str, record["notes"])), float(record["found_s"]))


def proposal(
    trace: Trace,
    machine: Machine,
    frontend: Frontend,
    stage: Phase,
    since: Since = _NOTHING,
    rest: Callable[[], None] = lambda: None,
) -> Proposal:
    """The plans that are worth a trial. Communicates nothing.

    Args:
        trace: the recorded steps.
        machine: the ranks.
        frontend: the way to attach the plans.
        stage: the rule of accuracy.
        since: their changes since they were measured.
        rest: called often meanwhile.

    Raises:
        MachineError, PlanError, ProblemError: there is no plan at all.
    """
    start_s = time.thread_time()
    trusted, notes = _trusted(machine, stage.methods)
    allowed = allowed_compressors(trace, stage.accuracy)
    choice = choice_of(Problem(trace, Pricer(RestingMachine(since.applied(trusted), rest)), frontend, allowed))
    return Proposal(finalists(choice), choice.none.step_s, tuple(notes), time.thread_time() - start_s)


def choice_of(problem: Problem) -> Choice:
    """The plan of ``auto``, and those of all policies and of single compressors."""
    return choose(problem, "auto", (*STARTS, *(f"all:{unfitted(method)}" for method in problem.compressors)))


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
    if ranks.rank == 0 and isinstance(found, Proposal):
        if found.notes:
            LOGGER.info("gckernels: %s", uncertain(found.notes))
        if found.finalists:
            named = [summary_of(plan, ranks.world_size) for plan in found.finalists]
            plans = list(zip(named, found.predicted_s[1:], strict=True))
            LOGGER.info("gckernels: %s", tries(plans, found.found_s))
    return found


def finalists(choice: Choice, most: int = FINALISTS) -> tuple[Plan, ...]:
    """The plans to try: the one that is predicted to be the fastest, and the fastest ones of another kind.

    Plans of one kind, which send most elements by the same compressor, are predicted with about the same error, so
    that trying two of them tells little. Where much is to be gained, the plan that sends everything by one compressor
    is tried as well, although a policy predicts another one of its kind to be faster: their messages differ, and the
    few percent between them are less than what a prediction is wrong by.

    Args:
        choice: the plans of all policies.
        most: the number of plans at most.
    """
    none_s = choice.none.step_s
    rows = sorted((row for row in choice.rows if row.plan.compresses), key=lambda row: row.step_s)
    gains_much = bool(rows) and rows[0].step_s <= MUCH * none_s
    by_kind: dict[object, Row] = {}
    known: set[str] = set()
    for row in rows:
        if row.step_s <= HOPELESS * none_s and (fingerprint := row.plan.fingerprint()) not in known:
            known.add(fingerprint)
            is_uniform = row.policy.partition(":")[0] == "all"
            by_kind.setdefault((_kind(row.plan), gains_much and is_uniform), row)
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


def _trusted(machine: Machine, methods: Iterable[Compressor]) -> tuple[Machine, list[str]]:
    """The machine with prices of everything that a trial may need, and notes on those that are uncertain.

    A profile does not tell prices whose measurements disagree with themselves. Without these errors it does. A
    compressor for which there was no time gets the price of a usual one.
    """
    if not isinstance(machine, Profile):
        return machine, []
    usual = Coefficients(3e-5, 3e-6, 1e-9, source_unit_s=1e-6, source_element_s=1e-9, side_s=2e-9)
    notes, codecs = list(machine.refused), [replace(each, error=None) for each in machine.codecs]
    trusted = replace(
        machine,
        collectives=_without_errors(machine.collectives),
        codecs=tuple(codecs),
        copies=_without_errors(machine.copies),
    )
    for method in dict.fromkeys((Identity(), *methods)):
        if not has_prices(trusted, method):
            notes.append(f"{method.name} was not measured: it is taken to be as fast as others usually are")
            works = _ENCODINGS if isinstance(method, Codec) else _PROJECTIONS
            codecs = [each for each in codecs if each.compressor != method]
            codecs += [
                CodecModel(method, work, Place.DEVICE, usual, 1.0, 1 << 20, 1 << 30, 1 << 10, None) for work in works
            ]
    return replace(trusted, codecs=tuple(codecs)), notes


def _without_errors(measured: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(replace(each, curve=replace(each.curve, error=None)) for each in measured)
