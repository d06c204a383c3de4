"""Advice: honest sentences on whether a plan pays, and on which other one does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from gckernels.ops import Identity
from gckernels.sync.plans.numbers import duration, percent, whole_percent
from gckernels.sync.plans.plan import Plan

from ...choice import Choice, Row, saves
from ...drafts.problem import Problem
from ..common.caveats import Band
from .memory import PlanMemory

DO_NOT, PAYS_NOT = "do not compress", "does not pay"
_NOTHING_SAVED = 1e-3
NOTHING_EXPOSED = 0.02
"""The part of a step below which communication that backward does not hide is nothing."""


@dataclass(frozen=True)
class Advice:
    """The plan of a policy, and whether it pays."""

    choice: Choice  # the plan, and that without compression
    band: Band  # how exact the prediction is
    memory: PlanMemory  # the memory for the plan
    better: Row | None = None
    """The fastest plan of another policy that pays and fits; ``None`` if there is none, or if the plan itself pays and
    that one saves less over it than predictions may be wrong by."""

    @staticmethod
    def of(problem: Problem, choice: Choice) -> Advice:
        """The prediction for a chosen plan of a problem."""
        band = replace(Band.of(problem), margin=choice.row.margin)
        found = Advice(choice, band, PlanMemory.of(problem, choice.plan))
        return replace(found, better=_better(problem, choice, found.memory.fits))

    @property
    def compresses(self) -> bool:
        """Whether gradients or gathered parameters are compressed. A plan that compresses nothing may send gradients in
        another way than DDP does."""
        return _compresses(self.choice.plan)

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
    def of_all(self) -> bool:
        """Whether the plan is the best of all policies, and not of one which was named."""
        return self.choice.asked == "auto"

    @property
    def short(self) -> str:
        """The advice in a few words. Where a policy was named, it is on its plan alone."""
        if self.pays:
            return "compress"
        do_not = DO_NOT if self.of_all else PAYS_NOT
        if not self.memory.fits:
            return f"{do_not}; it does not fit"
        return f"{do_not}; an exact plan pays" if self.choice.pays else do_not

    @property
    def text(self) -> str:
        """The advice as sentences."""
        choice, memory = self.choice, self.memory
        gain = self._gain(choice.row)
        if self.pays:
            return f"Compress with the plan of {choice.policy}: {gain}{self._others}"
        if self.better is not None:
            why = self._why_not
            if choice.pays:
                why = f"it does not fit. {memory.why_not}" if not memory.fits else "it compresses nothing."
            return f"The plan of {choice.policy} {PAYS_NOT}: {why}{self._others}"
        if not memory.model_fits or (choice.pays and not memory.fits):
            return f"{DO_NOT.capitalize()}: it does not fit. {memory.why_not}"
        if not choice.pays:
            return f"{DO_NOT.capitalize()}: {self._why_not}"
        exact = f"The plan of {choice.policy} compresses nothing either, and averages exactly in another way"
        return f"{DO_NOT.capitalize()}. {exact}: {gain}"

    def _step(self, row: Row) -> str:
        """The step with the plan of a row, beside the step without compression."""
        band = replace(self.band, margin=row.margin)
        return f"{duration(row.step_s)} ({band.text(row.step_s)}) instead of {duration(self.choice.none.step_s)}"

    def _gain(self, row: Row) -> str:
        times = self.choice.none.step_s / row.step_s if row.step_s else 1.0
        return f"{self.band.takes} {self._step(row)}, {times:.2f} times as fast."

    @property
    def _others(self) -> str:
        """A sentence about another plan, behind one on the plan; empty if there is nothing to say."""
        if self.better is not None:
            does = "is still faster" if self.pays else "does"
            return f" That of {self.better.policy} {does}: {self._gain(self.better)}"
        choice, asked = self.choice, self.choice.row_of(self.choice.asked)
        saved = 1.0 - asked.step_s / choice.row.step_s if choice.row.step_s else 0.0
        if saved < _NOTHING_SAVED:
            return ""
        less = f"{percent(saved)} less than that, within the error of predictions"
        return f" That of {choice.asked} would take {duration(asked.step_s)}, {less}."

    @property
    def _why_not(self) -> str:
        """The reason why the plan, or none at all, is advised: a sentence without its subject."""
        none, band, choice = self.choice.none, self.band, self.choice
        if none.exposed_s < NOTHING_EXPOSED * none.step_s:
            exposed = f"{duration(none.exposed_s)} of {duration(none.step_s)}"
            if band.every is not None:
                return f"{band.subject} waits for exact updates only {exposed}."
            return f"backward hides all communication but {exposed}."
        is_judged = self.better is not None and choice.policy != "none"
        best = choice.row if is_judged else min(choice.rows, key=lambda row: row.step_s)
        gain = 1.0 - best.step_s / none.step_s if none.step_s else 0.0
        margin = max(best.margin, none.margin)
        less = f"{percent(gain)} of {band.subject}, less than the error of the prediction, {whole_percent(margin)}."
        if self.better is not None:
            if choice.policy == "none":
                return "it compresses nothing."
            return f"it would gain {less}" if gain > 0 else "it is no faster than averaging without compression."
        if gain <= 0:
            return "no allowed plan is faster than averaging without compression."
        return f"the best plan, that of {best.policy}, would gain {less}"

    def record(self) -> dict[str, Any]:
        """The prediction as JSON; times are in seconds."""
        better = self.better
        return {
            "none_s": self.choice.none.step_s,
            "step_s": self.choice.row.step_s,
            "policy": self.choice.policy,
            "pays": self.pays,
            "compresses": self.compresses,
            "better": None if better is None else {"policy": better.policy, "step_s": better.step_s},
            **self.band.part().record,
            **self.memory.part().record,
        }


def _compresses(plan: Plan) -> bool:
    return plan.weights is not None or any(not isinstance(unit.compressor, Identity) for unit in plan.units)


def _better(problem: Problem, choice: Choice, fits: bool) -> Row | None:
    """The row of the best plan that is better, as :attr:`Advice.better`."""
    if choice.asked == "auto" and fits:
        return None  # the plan of auto is the best one
    against = (choice.none, choice.row) if choice.pays and fits else (choice.none,)
    rows: Sequence[Row] = sorted(choice.rows, key=lambda row: row.step_s)
    for row in rows:
        if row.policy in (choice.policy, "none") or not all(saves(problem, row, each) for each in against):
            continue
        if _compresses(row.plan) and PlanMemory.of(problem, row.plan).fits:
            return row
    return None
