"""Advice: one honest sentence on whether a plan pays."""

from __future__ import annotations

from dataclasses import dataclass

from gckernels.ops import Identity

from ...planner.choice import Choice
from ...plans.numbers import duration, percent, whole_percent
from ...plans.plan import Plan
from ..common.error_bars import Band
from .memory import PlanMemory

DO_NOT = "do not compress"
NOTHING_EXPOSED = 0.02
"""The part of a step below which communication that backward does not hide is nothing."""


@dataclass(frozen=True)
class Advice:
    """Whether compressing pays.

    Attributes:
        pays: whether a plan that compresses is faster than none by more than the error of the prediction, and fits into
            the memory of a rank.
        text: the advice as a sentence.
    """

    pays: bool
    text: str


def compresses(plan: Plan) -> bool:
    """Whether a plan compresses anything. One that does not may send gradients in another way than DDP does."""
    return any(not isinstance(unit.compressor, Identity) for unit in plan.units)


def advise(choice: Choice, band: Band, memory: PlanMemory) -> Advice:
    """The advice for a chosen plan.

    Args:
        choice: the plan, and that without compression.
        band: how exact the prediction is.
        memory: the memory for the plan.
    """
    chosen, none = choice.row, choice.none
    step, instead = f"{duration(chosen.step_s)} ({band.text(chosen.step_s)})", f"instead of {duration(none.step_s)}"
    if choice.is_limit:
        text = f"With codecs that cost nothing {band.subject} would take {step} {instead}. It is a limit, and no plan."
        return Advice(choice.pays, text)
    if not memory.model_fits or (choice.pays and not memory.fits):
        return Advice(False, f"{DO_NOT.capitalize()}: it does not fit. {memory.why_not}")
    if not choice.pays:
        return Advice(False, f"{DO_NOT.capitalize()}: {_why_not(choice, band)}.")
    gain = f"{band.takes} {step} {instead}, {none.step_s / chosen.step_s:.2f} times as fast."
    if compresses(chosen.plan):
        return Advice(True, f"Compress with the plan of {choice.policy}: {gain}")
    exact = f"The plan of {choice.policy} compresses nothing either, and averages exactly in another way"
    return Advice(False, f"{DO_NOT.capitalize()}. {exact}: {gain}")


def _why_not(choice: Choice, band: Band) -> str:
    """Why no plan is advised."""
    none = choice.none
    best = min(choice.rows, key=lambda row: row.step_s)
    gain = 1.0 - best.step_s / none.step_s if none.step_s else 0.0
    if none.exposed_s < NOTHING_EXPOSED * none.step_s:
        return f"backward hides all communication but {duration(none.exposed_s)} of {duration(none.step_s)}"
    if gain <= 0:
        return "no allowed plan is faster than averaging without compression"
    return (
        f"the best plan, that of {best.policy}, would gain {percent(gain)} of {band.subject}, less than the error of "
        f"the prediction, {whole_percent(band.margin)}"
    )
