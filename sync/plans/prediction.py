"""Predictions: what a planner expects of its plan, kept beside the plan."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from .units import PlanError


@dataclass(frozen=True)
class Source:
    """A file that a prediction was made from.

    Attributes:
        name: what it is called, for people.
        fingerprint: a hash of what it says.

    Raises:
        PlanError: an attribute is not a string.
    """

    name: str
    fingerprint: str

    def __post_init__(self) -> None:
        _check_texts(self, "name", "fingerprint")


@dataclass(frozen=True)
class Alternative:
    """The plan of another policy for the same inputs.

    Attributes:
        policy: the name of the policy.
        step_s: the predicted time of a step with its plan.
        error: the relative error of the gradients that its plan causes.

    Raises:
        PlanError: an attribute has another type, or a number is negative or not finite.
    """

    policy: str
    step_s: float
    error: float

    def __post_init__(self) -> None:
        _check_texts(self, "policy")
        _check_numbers(self, "step_s", "error")


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
        _check_texts(self, "policy")
        _check_numbers(self, "step_s", "none_s", "margin", "error")
        if type(self.estimated) is not bool:
            raise PlanError(f"prediction: estimated must be True or False, got {self.estimated!r}")
        for name in ("machine", "trace"):
            if not isinstance(getattr(self, name), Source):
                raise PlanError(f"prediction: {name} must be a Source, got {getattr(self, name)!r}")
        rows = self.alternatives
        if not isinstance(rows, tuple) or not all(isinstance(row, Alternative) for row in rows):
            raise PlanError(f"prediction: alternatives must be a tuple of Alternative, got {rows!r}")

    def to_json(self) -> dict[str, Any]:
        """The prediction as a dict of JSON values, which :meth:`from_json` reads."""
        return asdict(self) | {"alternatives": [asdict(row) for row in self.alternatives]}

    @staticmethod
    def from_json(record: Any) -> Prediction:
        """The prediction that :meth:`to_json` has written.

        Raises:
            PlanError: an entry is missing, unknown or not valid.
        """
        if not isinstance(record, dict):
            raise PlanError(f"prediction: must be an object, got {record!r}")
        rows = record.get("alternatives", [])
        if not isinstance(rows, list):
            raise PlanError(f"prediction: alternatives must be a list, got {rows!r}")
        read: dict[str, Any] = {name: _read(name, Source, record.get(name)) for name in ("machine", "trace")}
        read["alternatives"] = tuple(_read(f"alternatives[{at}]", Alternative, row) for at, row in enumerate(rows))
        made: Prediction = _read("entries", Prediction, record | read)
        return made


def _read(name: str, kind: type[Any], record: Any) -> Any:
    if not isinstance(record, Mapping):
        raise PlanError(f"prediction: {name} must be an object, got {record!r}")
    try:
        return kind(**record)
    except TypeError as error:  # from __init__: an argument is missing or unknown
        raise PlanError(f"prediction: {name} are not those of {kind.__name__}: {error}") from error


def _check_texts(owner: object, *names: str) -> None:
    for name in names:
        if not isinstance(getattr(owner, name), str):
            raise PlanError(f"prediction: {name} must be a string, got {getattr(owner, name)!r}")


def _check_numbers(owner: object, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 <= value <= sys.float_info.max:
            raise PlanError(f"prediction: {name} must be a finite number from 0 up, got {value!r}")
