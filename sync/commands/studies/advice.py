"""Advice: one honest sentence on whether a plan pays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gckernels.ops import Identity

from ...planner.choice import Choice
from ...planner.drafts.problem import Problem
from ...plans.numbers import duration, percent, whole_percent
from ..common.error_bars import Band
from .memory import PlanMemory

DO_NOT = "do not compress"
NOTHING_EXPOSED = 0.02
"""The part of a step below which communication that backward does not hide is nothing."""


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
