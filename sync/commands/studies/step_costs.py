"""Training steps whose updates are averaged in rounds, beside plain DDP, which averages gradients in every step."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...planner.choice import Choice
from ...planner.drafts.problem import Problem
from ...planner.timeline.timeline import timeline
from ...plans.plan import Frontend, Plan
from ...programs.sizes import allreduce_sent_nbytes, unit_sent_nbytes


@dataclass(frozen=True)
class StepCost:
    """The cost of a training step, as a mean over the steps of a round.

    Attributes:
        name: the kind of training.
        step_s: the predicted seconds of a step.
        sent_bits: the bits that a rank sends per element and step, as a mean over all ranks.
    """

    name: str
    step_s: float
    sent_bits: float


def step_costs(problem: Problem, choice: Choice) -> tuple[StepCost, ...]:
    """The costs of a step in plain DDP, with exact updates, and with those of a plan; none if gradients are averaged.

    Args:
        problem: the problem.
        choice: the plan, and the one that compresses nothing.
    """
    if problem.rounds is None:
        return ()
    step, every, exact = problem.rounds.step, problem.rounds.every, choice.none
    numel = sum(tensor.numel for tensor in step.tensors)
    nbytes = sum(tensor.numel * tensor.dtype.itemsize for tensor in step.tensors)
    plain_nbytes = allreduce_sent_nbytes(nbytes, problem.topology.world_size)
    if step.gathers:
        step = replace(step, buckets=())  # groups of FSDP2 are no buckets of DDP
    plain_s = timeline(exact.plan, step, problem.pricer, Frontend.DDP).step_s
    rounds = {"exact updates": exact, "the plan": choice.row}
    return (
        StepCost("plain DDP", plain_s, 8 * plain_nbytes / max(numel, 1)),
        *(
            StepCost(name, row.step_s / every, 8 * _sent_nbytes(row.plan, problem) / every / max(numel, 1))
            for name, row in rounds.items()
        ),
    )


def _sent_nbytes(plan: Plan, problem: Problem) -> float:
    """The bytes that a rank sends of the updates of a round."""
    dtypes = {tensor.name: tensor.dtype for tensor in problem.trace.tensors}
    return sum(
        unit_sent_nbytes(unit.program, unit.numel, dtypes[unit.parameter], unit.compressor, problem.topology)
        for unit in plan.units
    )
