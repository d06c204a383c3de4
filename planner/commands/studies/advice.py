"""Advice: one honest sentence on whether a plan pays, with the memory that it needs and what its steps cost."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from gckernels.codec import Codec
from gckernels.ops import Identity
from gckernels.sync.frontends.budget import rank_nbytes
from gckernels.sync.plans.arguments import sends_differences
from gckernels.sync.plans.numbers import duration, percent, volume, whole_percent
from gckernels.sync.plans.plan import Frontend, Plan
from gckernels.sync.programs.sizes import allreduce_sent_nbytes, unit_sent_nbytes

from ...choice import Choice
from ...drafts.problem import Problem
from ...machines.machine import Shared
from ...timeline.timeline import timeline
from ..common.caveats import Band

DO_NOT = "do not compress"
NOTHING_EXPOSED = 0.02
"""The part of a step below which communication that backward does not hide is nothing."""


@dataclass(frozen=True)
class PlanMemory:
    """The memory of the rank that needs most, without activations and the state of the optimizer, of which a trace says
    nothing.

    Attributes:
        model_nbytes: the bytes of weights, gradients and DDP's buckets; where updates are averaged, also of the anchors
            from which they are measured, and of the updates.
        plan_nbytes: at most the bytes of residuals and buffers.
        has_nbytes: the bytes that a rank has; ``None`` if the machine does not say.
        of_updates: whether updates are averaged, and not gradients.
    """

    model_nbytes: int
    plan_nbytes: int
    has_nbytes: float | None
    of_updates: bool = False

    @staticmethod
    def of(problem: Problem, plan: Plan) -> PlanMemory:
        """The memory for a plan of a problem."""
        apart = problem.machine.computes_on is Shared.DEVICE
        nbytes = problem.step.nbytes
        if problem.frontend is Frontend.FSDP:
            nbytes = -(-nbytes // problem.topology.world_size)
        in_buckets = problem.frontend is Frontend.DDP and problem.trace.copies_gradients
        dtypes = {tensor.name: tensor.dtype for tensor in problem.trace.tensors}
        plan_nbytes = rank_nbytes(plan, dtypes, problem.topology, apart) if problem.topology.world_size > 1 else 0
        if isinstance(plan.weights, Codec) and sends_differences(plan.weights):
            plan_nbytes += 4 * problem.trace.numel
        model_nbytes, of_updates = (3 if in_buckets else 2) * nbytes, problem.rounds is not None
        if of_updates:
            model_nbytes += 2 * problem.trace.nbytes
        return PlanMemory(model_nbytes, plan_nbytes, problem.machine.memory_nbytes, of_updates)

    @property
    def model_fits(self) -> bool:
        """Whether the model fits with any plan, as far as is known."""
        return self.has_nbytes is None or self.model_nbytes <= self.has_nbytes

    @property
    def fits(self) -> bool:
        """Whether the plan fits, too."""
        return self.has_nbytes is None or self.model_nbytes + self.plan_nbytes <= self.has_nbytes

    @property
    def why_not(self) -> str:
        """Sentences that say why it does not fit."""
        assert self.has_nbytes is not None
        has, model = volume(self.has_nbytes), f"{self._held.capitalize()} take {volume(self.model_nbytes)}"
        if not self.model_fits:
            training = "Averaging updates" if self.of_updates else "Data-parallel training"
            return f"{model} on every rank, and a rank has {has}. {training} needs that with any plan."
        return f"{model}, residuals and buffers of the plan {volume(self.plan_nbytes)}, and a rank has {has}."

    @property
    def _held(self) -> str:
        """The tensors that any plan needs."""
        return "weights, gradients, anchors and updates" if self.of_updates else "weights and gradients"

    def line(self) -> str:
        """Sentences for people."""
        has = "the machine does not say how much it has"
        if self.has_nbytes is not None:
            has = f"it has {volume(self.has_nbytes)}"
        return (
            f"Memory of a rank: {volume(self.model_nbytes)} for {self._held}, {volume(self.plan_nbytes)} for "
            f"residuals and buffers; {has}. Activations and the optimizer's state come on top."
        )

    def record(self) -> dict[str, Any]:
        """The memory as JSON."""
        return {"memory": asdict(self) | {"fits": None if self.has_nbytes is None else self.fits}}


@dataclass(frozen=True)
class Advice:
    """The plan of a policy, and whether it pays.

    Attributes:
        choice: the plan, and that without compression.
        band: how exact the prediction is.
        memory: the memory for the plan.
    """

    choice: Choice
    band: Band
    memory: PlanMemory

    @staticmethod
    def of(problem: Problem, choice: Choice) -> Advice:
        """The prediction for a chosen plan of a problem."""
        return Advice(choice, Band.of(problem), PlanMemory.of(problem, choice.plan))

    @property
    def compresses(self) -> bool:
        """Whether gradients or gathered parameters are compressed. A plan that compresses nothing may send gradients in
        another way than DDP does."""
        plan = self.choice.plan
        return plan.weights is not None or any(not isinstance(unit.compressor, Identity) for unit in plan.units)

    @property
    def pays(self) -> bool:
        """Whether a plan that compresses is faster than none by more than the error of the prediction, and fits into
        the memory of a rank."""
        return self.choice.pays and self.compresses and self.memory.fits

    @property
    def gain(self) -> float:
        """How many times as fast a step is as without compression."""
        return self.choice.none.step_s / self.choice.row.step_s if self.choice.row.step_s else 1.0

    @property
    def short(self) -> str:
        """The advice in a few words."""
        if self.pays:
            return "free codecs would pay" if self.choice.is_limit else "compress"
        if not self.memory.fits:
            return f"{DO_NOT}; it does not fit"
        return f"{DO_NOT}; an exact plan pays" if self.choice.pays else DO_NOT

    @property
    def text(self) -> str:
        """The advice as sentences."""
        choice, band, memory = self.choice, self.band, self.memory
        step_s, none_s = choice.row.step_s, choice.none.step_s
        step, instead = f"{duration(step_s)} ({band.text(step_s)})", f"instead of {duration(none_s)}"
        if choice.is_limit:
            return (
                f"With codecs that cost nothing {band.subject} would take {step} {instead}. It is a limit, and no plan."
            )
        if not memory.model_fits or (choice.pays and not memory.fits):
            return f"{DO_NOT.capitalize()}: it does not fit. {memory.why_not}"
        if not choice.pays:
            return f"{DO_NOT.capitalize()}: {self._why_not}."
        gain = f"{band.takes} {step} {instead}, {self.gain:.2f} times as fast."
        if self.compresses:
            return f"Compress with the plan of {choice.policy}: {gain}"
        exact = f"The plan of {choice.policy} compresses nothing either, and averages exactly in another way"
        return f"{DO_NOT.capitalize()}. {exact}: {gain}"

    @property
    def _why_not(self) -> str:
        """Why no plan is advised."""
        none, band = self.choice.none, self.band
        best = min(self.choice.rows, key=lambda row: row.step_s)
        gain = 1.0 - best.step_s / none.step_s if none.step_s else 0.0
        if none.exposed_s < NOTHING_EXPOSED * none.step_s:
            exposed = f"{duration(none.exposed_s)} of {duration(none.step_s)}"
            if band.every is not None:
                return f"{band.subject} waits for exact updates only {exposed}"
            return f"backward hides all communication but {exposed}"
        if gain <= 0:
            return "no allowed plan is faster than averaging without compression"
        return (
            f"the best plan, that of {best.policy}, would gain {percent(gain)} of {band.subject}, less than the error "
            f"of the prediction, {whole_percent(band.margin)}"
        )

    def record(self) -> dict[str, Any]:
        """The prediction as JSON; times are in seconds."""
        return {
            "none_s": self.choice.none.step_s,
            "step_s": self.choice.row.step_s,
            "policy": self.choice.policy,
            "pays": self.pays,
            "compresses": self.compresses,
            **self.band.record(),
            **self.memory.record(),
        }


# -------------------------------------------------------------------- steps of rounds


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
