"""Advice: one honest sentence on whether a plan pays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..plans.numbers import duration, percent, whole_percent
from .bands import Band

if TYPE_CHECKING:
    from ..planner.choice import Choice

DO_NOT = "do not compress"
NOTHING_EXPOSED = 0.02
"""The part of a step below which communication that backward does not hide is nothing."""


@dataclass(frozen=True)
class Advice:
    """Whether a plan pays.

    Attributes:
        pays: whether a step is faster than without compression by more than the error of the prediction.
        text: the advice as a sentence.
    """

    pays: bool
    text: str


def advise(choice: Choice, band: Band) -> Advice:
    """The advice for a chosen plan.

    Args:
        choice: the plan, and that without compression.
        band: how exact the prediction is.
    """
    chosen, none = choice.row, choice.none
    if choice.is_limit:
        text = (
            f"With codecs that cost nothing {band.subject} would take {duration(chosen.step_s)} "
            f"({band.text(chosen.step_s)}) instead of {duration(none.step_s)}. It is a limit, and no plan."
        )
        return Advice(choice.pays, text)
    if choice.pays:
        text = (
            f"Compress with the plan of {choice.policy}: {band.takes} {duration(chosen.step_s)} "
            f"({band.text(chosen.step_s)}) instead of {duration(none.step_s)}, {none.step_s / chosen.step_s:.2f} "
            "times as fast."
        )
        return Advice(True, text)
    best = min(choice.rows, key=lambda row: row.step_s)
    gain = 1.0 - best.step_s / none.step_s if none.step_s else 0.0
    if none.exposed_s < NOTHING_EXPOSED * none.step_s:
        why = f"backward hides all communication but {duration(none.exposed_s)} of {duration(none.step_s)}"
    elif gain <= 0:
        why = "no allowed plan is faster than averaging without compression"
    else:
        why = (
            f"the best plan, that of {best.policy}, would gain {percent(gain)} of {band.subject}, less than the error "
            f"of the prediction, {whole_percent(band.margin)}"
        )
    return Advice(False, f"{DO_NOT.capitalize()}: {why}.")
