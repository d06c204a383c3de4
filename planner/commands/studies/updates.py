"""Averaging updates: the time of a step then, beside plain DDP, or in place of gradients that wait too long."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from gckernels.sync.plans.numbers import duration
from gckernels.sync.plans.plan import Frontend, Plan, PlanError
from gckernels.sync.programs.sizes import allreduce_sent_nbytes, unit_sent_nbytes

from ...choice import Choice, choose
from ...drafts.problem import Problem, ProblemError
from ...drafts.rounds import UpdateRounds
from ...machines.machine import MachineError
from ...timeline.timeline import timeline
from ..common.outcome import Part
from .memory import PlanMemory

LONG = 2.0
"""A step that takes more than this many times its computing waits too long."""
EVERY, DELAY = (4, 10, 30), 1
"""The steps of the rounds that are tried, until a step is not too long any more, and of their delay. More steps cost
more accuracy."""


@dataclass(frozen=True)
class StepCost:
    """The cost of a training step, as a mean over the steps of a round."""

    name: str  # the kind of training
    step_s: float  # the predicted seconds of a step
    sent_bits: float  # the bits that a rank sends per element and step, as a mean over all ranks


def step_costs(problem: Problem, choice: Choice) -> tuple[StepCost, ...]:
    """The costs of a step in plain DDP, with exact updates, and with those of a plan; none if gradients are averaged.

    Args:
        choice: the plan, and the one that compresses nothing.
    """
    if problem.rounds is None:
        return ()
    step, every, exact = problem.rounds.step, problem.rounds.every, choice.none
    numel, plain_nbytes = step.numel, allreduce_sent_nbytes(step.nbytes, problem.topology.world_size)
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
    tensors, topology = problem.trace.by_name, problem.topology
    return sum(
        unit_sent_nbytes(unit.program, unit.numel, tensors[unit.parameter].dtype, unit.compressor, topology)
        for unit in plan.units
    )


# -------------------------------------------------------------------- in place of gradients


@dataclass(frozen=True)
class UpdatesInstead:
    """Rounds of updates that take less time than steps whose gradients are averaged."""

    every: int  # the number of steps of a round
    delay: int  # the number of steps that are computed while updates are on their way
    step_s: float  # the predicted seconds of a training step, as a mean over a round
    waits_s: float  # the seconds by which a step with averaged gradients is longer than its computing

    def part(self) -> Part:
        """The rounds, in sentences."""
        line = (
            f"A step still waits {duration(self.waits_s)} for the network. If updates are averaged in place of "
            f"gradients, with --every {self.every} --delay {self.delay}, a step takes {duration(self.step_s)}; that "
            "is another training (docs: Train over a very slow link)."
        )
        return Part(line, {"updates_instead": {"every": self.every, "delay": self.delay, "step_s": self.step_s}})


NO_UPDATES = Part(None, {"updates_instead": None})
"""The part of results without such rounds."""


def updates_instead(
    problem: Problem, step_s: float, with_rounds: Callable[[UpdateRounds], Problem]
) -> UpdatesInstead | None:
    """Rounds of updates with one compressor, if a whole step waits too long for gradients, and waits less in rounds.

    Args:
        problem: the problem; models of ``fully_shard`` get no such advice.
        step_s: the predicted seconds of its step with the best plan.
        with_rounds: returns the problem of some rounds on the same machine.
    """
    computing_s = problem.trace.computing_s
    is_asked = problem.rounds is None and not problem.is_sharded and problem.trace.is_whole_step
    if not is_asked or not computing_s or step_s <= LONG * computing_s:
        return None
    found = None
    for every in EVERY:
        rounds = with_rounds(UpdateRounds(problem.trace, every, DELAY))
        with suppress(MachineError, PlanError, ProblemError):
            choice = choose(rounds, "all", compared=())
            each_s = choice.row.step_s / every
            if problem.is_gain(each_s, step_s) and PlanMemory.of(rounds, choice.plan).fits:
                found = UpdatesInstead(every, DELAY, each_s, step_s - computing_s)
                if each_s <= LONG * computing_s:
                    break
    return found
