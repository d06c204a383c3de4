"""Words for how exact a prediction is, and for the part of a step that it covers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...planner.drafts.problem import Problem
from ...plans.numbers import duration, plural, whole_percent


@dataclass(frozen=True)
class Band:
    """The range in which predicted times are expected, and what they are times of.

    Attributes:
        estimated: whether the machine is described and not measured.
        margin: the relative error of its predictions.
        whole_step: whether times are those of whole steps. Otherwise the trace has no forward and no optimizer, and
            they are those of backward and synchronisation alone.
        every: the steps of the rounds that times are of; ``None`` if they are of single steps.
    """

    estimated: bool
    margin: float
    whole_step: bool
    every: int | None = None

    @staticmethod
    def of(problem: Problem) -> Band:
        """The band of predictions for a problem."""
        machine, every = problem.machine, None if problem.rounds is None else problem.rounds.every
        return Band(machine.estimated, machine.margin, problem.step.is_whole_step, every)

    @property
    def subject(self) -> str:
        """The name of the times, in a sentence."""
        if self.every is not None:
            return f"a round of {plural(self.every, 'step')}"
        return "a step" if self.whole_step else "backward and synchronisation"

    @property
    def takes(self) -> str:
        """The begin of a sentence that goes on with a time."""
        return f"{self.subject} {'takes' if self.whole_step or self.every is not None else 'take'}"

    @property
    def column(self) -> str:
        """The title of a column of times."""
        if self.every is not None:
            return "round"
        return "step" if self.whole_step else "backward and sync"

    def text(self, seconds: float) -> str:
        """Words to stand behind a predicted time, such as ``"estimated: 75.0 to 125 ms"``."""
        low, high = (duration(seconds * (1 + sign * self.margin)) for sign in (-1, 1))
        number, _, unit = low.partition(" ")
        word = "estimated" if self.estimated else "expected"
        return f"{word}: {number if high.endswith(f' {unit}') else low} to {high}"

    def notes(self) -> list[str]:
        """Sentences about all times of an output; none if they are those of whole steps on a measured machine."""
        found = []
        if not self.whole_step:
            found.append(
                "The trace has neither forward nor optimizer: times are of backward and synchronisation alone, and a "
                "whole step gains less."
            )
        if self.estimated:
            machine = "the machine is described, not measured"
            found.append(f"All times are estimated, +-{whole_percent(self.margin)}: {machine}.")
        return found

    def record(self) -> dict[str, Any]:
        """The band as JSON."""
        return {"estimated": self.estimated, "margin": self.margin, "whole_step": self.whole_step}
