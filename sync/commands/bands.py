"""Words for how exact a prediction is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..plans.numbers import duration, whole_percent

if TYPE_CHECKING:
    from ..planner.machine import Machine


@dataclass(frozen=True)
class Band:
    """The range in which predicted times are expected.

    Attributes:
        estimated: whether the machine is described and not measured.
        margin: the relative error of its predictions.
    """

    estimated: bool
    margin: float

    @staticmethod
    def of(machine: Machine) -> Band:
        """The band of predictions for a machine."""
        return Band(machine.estimated, machine.margin)

    def text(self, seconds: float) -> str:
        """Words to stand behind a predicted time, such as ``"estimated: 75.0 to 125 ms"``."""
        low, high = (duration(seconds * (1 + sign * self.margin)) for sign in (-1, 1))
        number, _, unit = low.partition(" ")
        word = "estimated" if self.estimated else "expected"
        return f"{word}: {number if high.endswith(f' {unit}') else low} to {high}"

    def note(self) -> str:
        """A sentence about all times of an output; ``""`` if they come from a measured machine."""
        if not self.estimated:
            return ""
        return f"All times are estimated, +-{whole_percent(self.margin)}: the machine is described, not measured."

    def record(self) -> dict[str, Any]:
        """The band as JSON."""
        return {"estimated": self.estimated, "margin": self.margin}
