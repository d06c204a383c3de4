"""Arms that compete with a plan which is chosen while training: their accuracy, and the plans of policies."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import torch.distributed as dist

import gckernels
from bench.lib.arms import AGAIN, BF16_HOOK, COMPRESSORS, FP16_HOOK, HOOKS, PLAIN, THROUGH, checked_arm
from bench.lib.updates_tables import parts_of
from bench.rivals.cupcake import cupcake
from gckernels import planner, sync
from gckernels.planner.choice import COMPARED
from gckernels.planner.drafts.problem import Problem, ProblemError
from gckernels.planner.machines.machine import MachineError
from gckernels.planner.timeline.pricing import Pricer
from gckernels.sync.accuracy.accuracy import allowed_compressors, as_accuracy, is_safe, unfitted
from gckernels.sync.plans.plan import Frontend, PlanError
from gckernels.sync.traces.model_trace import ModelTrace

T = TypeVar("T")

EXACT, SAFE, AGGRESSIVE, LOOSER = "exact", "safe", "aggressive", "looser"
ACCURACIES = (EXACT, SAFE, AGGRESSIVE, LOOSER)
SETTLED = 160  # steps after which a plan has been chosen
STEPS = 10 * SETTLED  # the aggressive rule holds after a tenth of them, when a plan is chosen anew
TUNED = {
    f"auto, {SAFE}": sync.Auto(SAFE),
    f"predicted, {SAFE}": sync.Auto(SAFE, propose=planner.proposer),
    f"auto, {AGGRESSIVE}": sync.Auto(AGGRESSIVE, STEPS),
}
TUNING_STEPS = {f"auto, {SAFE}": SETTLED, f"predicted, {SAFE}": SETTLED, f"auto, {AGGRESSIVE}": 2 * SETTLED}
POLICY = "policy "
CHOOSERS = {**COMPARED, "cupcake": cupcake}
POLICIES = tuple(name for name in CHOOSERS if name != "none")
POLICY_ARMS = tuple(f"{POLICY}{name}, {accuracy}" for accuracy in (SAFE, AGGRESSIVE) for name in POLICIES)
RACE_ARMS = (PLAIN, AGAIN, f"auto, {SAFE}", f"predicted, {SAFE}", "BlockQuant(bits=4)")
ARMS = (PLAIN, AGAIN, *(name for name in TUNED if name not in RACE_ARMS[3:]), *HOOKS, *COMPRESSORS, *POLICY_ARMS)


@dataclasses.dataclass(frozen=True)
class Planned:
    """A plan with its prediction.

    Attributes:
        plan: the plan.
        step_s: predicted seconds of a step; ``None`` if nothing was predicted.
        error: relative error of the gradients.
        planning_s: seconds that the choice took.
    """

    plan: sync.Plan
    step_s: float | None = None
    error: float = 0.0
    planning_s: float = 0.0


def checked_contender(text: str) -> str:
    """The name of a contender in a command line: a policy, an attachment that chooses, or any other arm.

    Raises:
        argparse.ArgumentTypeError: no contender has this name.
    """
    return text if text in (*ARMS, *TUNED) else checked_arm(text)


def accuracy_of(arm: str) -> str:
    """The class of accuracy of an arm on matrices with usual errors: one of :data:`ACCURACIES`."""
    if arm in (PLAIN, AGAIN, "Identity"):
        return EXACT
    if arm in (FP16_HOOK, BF16_HOOK):
        return SAFE
    if arm in HOOKS:
        return AGGRESSIVE
    if arm in TUNED or arm in POLICY_ARMS:
        return arm.rpartition(", ")[2]
    if parts_of(arm).every:
        return AGGRESSIVE  # averaged updates: another training
    return SAFE if is_safe(gckernels.from_spec(arm.partition(THROUGH)[0])) else AGGRESSIVE


def accuracy_on(plan: sync.Plan, trace: ModelTrace) -> str:
    """The strictest rule of accuracy that allows every compressor of a plan where it is; one of :data:`ACCURACIES`.

    It is :data:`LOOSER` for a plan that not even the aggressive rule allows, such as one that compresses an embedding
    by its signs.

    Args:
        plan: the plan; each of its units is a parameter, or a part of one.
        trace: the recorded model, with the relative errors of the plan's compressors.
    """
    tensors = {tensor.name: tensor for tensor in trace.tensors}
    used = {(unfitted(unit.compressor), unit.parameters[0]) for unit in plan.units if not unit.in_place}
    for name in (EXACT, SAFE, AGGRESSIVE):
        rule = as_accuracy(name)
        if all(method == gckernels.Identity() or rule.allows(method, tensors[tensor]) for method, tensor in used):
            return name
    return LOOSER


def rivals_of(arm: str, accuracies: Mapping[str, str]) -> list[str]:
    """The other arms that are at least as accurate as ``arm``.

    Args:
        arm: the arm.
        accuracies: the class of accuracy of every arm.
    """
    limit = ACCURACIES.index(accuracies[arm])
    return [other for other, each in accuracies.items() if other != arm and ACCURACIES.index(each) <= limit]


def policy_plans(arms: Collection[str], trace: ModelTrace, pricer: Pricer) -> dict[str, Planned]:
    """The plans of those of ``arms`` that are policies, by the arm's name.

    A policy is missing that finds no plan, or one for which the profile lacks a price.
    """
    made = {}
    for accuracy in (SAFE, AGGRESSIVE):
        problem = Problem(trace, pricer, Frontend.DDP, allowed_compressors(trace, accuracy))
        for name, policy in CHOOSERS.items():
            if (arm := f"{POLICY}{name}, {accuracy}") in arms:
                try:
                    plan = policy(problem)
                    made[arm] = Planned(plan, problem.step_s(plan))
                except (MachineError, PlanError, ProblemError) as error:
                    print(f"{arm}: {error}", flush=True)
    return made


def from_rank_0(make: Callable[[], T]) -> T:
    """The object that rank 0 makes; collective."""
    made = [make() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(made)
    found: Any = made[0]
    return found


def distinct(plans: Mapping[str, sync.Plan]) -> dict[str, str]:
    """For every arm the first one with the same plan: itself, or the arm that is measured in its place.

    The place of a plan that compresses nothing is that of plain DDP.
    """
    first: dict[str, str] = {}
    found = {}
    for arm, plan in plans.items():
        compresses = plan.compresses
        found[arm] = first.setdefault(plan.for_frontend(Frontend.DDP).fingerprint(), arm) if compresses else PLAIN
    return found


def summary(plan: sync.Plan) -> str:
    """The compressors and programs of a plan with their shares of the elements: "97 % BlockQuant through allgather"."""
    names = {program: name for name, program in sync.programs.PROGRAMS.items()}
    shares: Counter[str] = Counter()
    for unit in plan.units:
        program = names.get(unit.program, " ".join(type(step).__name__ for step in unit.program))
        shares["nothing" if unit.in_place else f"{_short(unit.compressor)}{THROUGH}{program}"] += unit.numel
    total = shares.total()
    if set(shares) == {"nothing"} or not total:
        return "nothing"
    return ", ".join(f"{numel / total:.1%} {what}" for what, numel in shares.most_common())


def _short(method: gckernels.Compressor) -> str:
    """The spec of a method without the fields that have their defaults, and without a shape that it is fitted to."""
    fields = [each for each in dataclasses.fields(method) if each.name not in ("rows", "cols")]
    given = {each.name: getattr(method, each.name) for each in fields if getattr(method, each.name) != each.default}
    changed = [f"{name}={value}" for name, value in given.items()]
    return f"{method.name}({', '.join(changed)})" if changed else method.name
