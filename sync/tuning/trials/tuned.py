"""The outcome of trials."""

from __future__ import annotations

from dataclasses import dataclass

from ...accuracy.accuracy import AccuracyLike
from ...traces.model_trace import ModelTrace


@dataclass(frozen=True)
class Tuned:
    """The outcome of trials, on which the running phase builds.

    Attributes:
        trace: the recorded steps.
        accuracy: the rule of accuracy.
        step_s: the measured step of the plan that has won, in seconds.
        none_s: the measured plain step.
    """

    trace: ModelTrace
    accuracy: AccuracyLike
    step_s: float
    none_s: float
