"""Decisions about the plan of a training, as records and as lines of the log."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

LOGGER = logging.getLogger("gckernels")
"""The logger of all decisions."""


@dataclass(frozen=True)
class Decision:
    """A decision about the plan of a training, and the figures that it was made from.

    Attributes:
        step: the number of synchronised steps before it.
        text: one sentence or more, in one line: what was measured, predicted and chosen, and why not more.
        policy: the name of the policy that has found the plan; ``"none"`` for the plan that compresses nothing.
        plan_fingerprint: the fingerprint of the plan that was chosen.
        predicted_s: the predicted time of a step with it, in seconds; ``None`` if nothing was predicted.
        measured_s: the measured time of a step with it; ``None`` if nothing was measured.
        none_s: the measured time of a step without compression; ``None`` if nothing was measured.
        error: the relative error of the gradients that the plan causes; ``None`` if it is not known.
        short: a sentence or two for pages, where step, policy and times stand beside it; the text if it is empty.
        level: the level of its line in the log. Rank 0 logs all decisions, other ranks those from ``logging.WARNING``
            on.

    Raises:
        ValueError: an attribute is not valid.
    """

    step: int
    text: str
    policy: str
    plan_fingerprint: str
    predicted_s: float | None = None
    measured_s: float | None = None
    none_s: float | None = None
    error: float | None = None
    level: int = logging.INFO
    short: str = ""

    def __post_init__(self) -> None:
        if type(self.step) is not int or self.step < 0:
            raise ValueError(f"decision: step must be an int from 0 up, got {self.step!r}")
        if not self.text or "\n" in self.text:
            raise ValueError(f"decision: text must be one line that is not empty, got {self.text!r}")
        for name in ("predicted_s", "measured_s", "none_s", "error"):
            value = getattr(self, name)
            if value is not None and not (value >= 0 and math.isfinite(value)):
                raise ValueError(f"decision: {name} must be None or a finite number from 0 up, got {value!r}")
