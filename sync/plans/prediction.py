"""Predictions: what a planner expects of its plan, kept beside the plan."""

from __future__ import annotations

from dataclasses import dataclass

from .json_records import checked_fields
from .units import PlanError


@dataclass(frozen=True)
class Source:
    """A file that a prediction was made from.

    Attributes:
        name: what it is called, for people.
        fingerprint: a hash of what it says.
    """

    name: str
    fingerprint: str


@dataclass(frozen=True)
class Alternative:
    """The plan of another policy for the same inputs.

    Attributes:
        policy: the name of the policy.
        step_s: the predicted time of a step with its plan.
        error: the relative error of the gradients that its plan causes.
    """

    policy: str
    step_s: float
    error: float


@dataclass(frozen=True)
class Prediction:
    """The times and the error that a planner expects of a plan.

    Attributes:
        step_s: the predicted time of a step with the plan.
        none_s: the predicted time of a step without compression.
        policy: the name of the policy that has found the plan.
        estimated: whether the machine is described and not measured.
        margin: the error of the model itself, relative to ``step_s``. A gain that is smaller is none.
        machine: the profile or description of the machine.
        trace: the trace of the training.
        error: the relative error of the gradients that the plan causes.
        alternatives: the plans of other policies for the same inputs.

    Raises:
        PlanError: an attribute has another type, or a number is negative or not finite.
    """

    step_s: float
    none_s: float
    policy: str
    estimated: bool
    margin: float
    machine: Source
    trace: Source
    error: float
    alternatives: tuple[Alternative, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.alternatives, tuple):
            raise PlanError(f"prediction: alternatives must be a tuple of Alternative, got {self.alternatives!r}")
        checked_fields(self, "prediction", PlanError, "make it of the types that Prediction says")
