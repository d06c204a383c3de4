"""The memory that a rank needs for a plan, beside the memory that it has."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from gckernels.codec import Codec
from gckernels.sync.frontends.budget import rank_nbytes
from gckernels.sync.plans.arguments import sends_differences
from gckernels.sync.plans.numbers import volume
from gckernels.sync.plans.plan import Plan

from ...drafts.problem import Problem
from ...machines.machine import Shared
from ..common.outcome import Part


@dataclass(frozen=True)
class PlanMemory:
    """The memory of the rank that needs most, without activations and the state of the optimizer, of which a trace says
    nothing.
    """

    model_nbytes: int
    """The bytes of weights, gradients and DDP's buckets; where updates are averaged, also of the anchors from which
    they are measured, and of the updates."""
    plan_nbytes: int  # at most the bytes of residuals and buffers
    has_nbytes: float | None  # the bytes that a rank has; None if the machine does not say
    of_updates: bool = False  # whether updates are averaged, and not gradients

    @staticmethod
    def of(problem: Problem, plan: Plan) -> PlanMemory:
        """The memory for a plan of a problem."""
        apart = problem.machine.computes_on is Shared.DEVICE
        nbytes = problem.step.nbytes
        if problem.frontend.gathers:
            nbytes = -(-nbytes // problem.topology.world_size)
        in_buckets = problem.frontend.traits.copies_buckets and problem.trace.copies_gradients
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

    def part(self) -> Part:
        """The memory, in sentences."""
        has = "the machine does not say how much it has"
        if self.has_nbytes is not None:
            has = f"it has {volume(self.has_nbytes)}"
        line = (
            f"Memory of a rank: {volume(self.model_nbytes)} for {self._held}, {volume(self.plan_nbytes)} for "
            f"residuals and buffers; {has}. Activations and the optimizer's state come on top."
        )
        return Part(line, {"memory": asdict(self) | {"fits": None if self.has_nbytes is None else self.fits}})
