"""The outcome of trials."""

from __future__ import annotations

from dataclasses import dataclass

from ...accuracy.accuracy import AccuracyLike
from ...traces.model_trace import ModelTrace


@dataclass(frozen=True)
class Tuned:
    """The outcome of trials, on which the watch over the plan that runs builds."""

    trace: ModelTrace  # the recorded steps
    accuracy: AccuracyLike  # the rule of accuracy
    step_s: float  # the measured step of the plan that has won, in seconds
    none_s: float  # the measured plain step
