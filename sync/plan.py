"""Plans: for every parameter, a compressor and a program. Frozen, JSON, fingerprinted.

The plan is the only link between those who decide and the engine that executes. Ranks compare its fingerprint before
the first collective.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from gckernels.compressor import GRAD_DTYPES
from gckernels.method import Method, from_json
from gckernels.ops import Identity

from .program import (
    ALLREDUCE,
    Encode,
    Program,
    ProgramError,
    default_program,
    program_from_json,
    program_to_json,
    trace,
)

FORMAT = "gckernels.plan"
VERSION = 1


class PlanError(ValueError):
    """A plan that is not valid, or does not fit the model; the message lists what is wrong."""


@dataclass(frozen=True)
class UnitPlan:
    """How one parameter is synchronised.

    Attributes:
        parameter: its name in the model.
        numel: its number of elements.
        compressor: what encodes it, fitted to its shape.
        program: the steps it goes through.
        feedback: whether what is not sent is kept and added to the next gradient.
    """

    parameter: str
    numel: int
    compressor: Method
    program: Program
    feedback: bool

    def remembers(self, kind: str) -> bool:
        """Whether the encoding of ``"worker"`` or ``"shard"`` keeps something: a shard that has a compressor of its own
        does only when that one needs it."""
        if kind == "worker" or self.compressor.of_shard == self.compressor:
            return self.feedback
        return self.feedback and self.compressor.of_shard.needs_feedback

    def encoder(self, kind: str) -> Method:
        """What does the encoding of ``"worker"`` or ``"shard"``."""
        return self.compressor if kind == "worker" else self.compressor.of_shard

    def at(self, step: int) -> UnitPlan:
        """The same with the compressor of a step, counted from the first compressed one on."""
        return replace(self, compressor=self.compressor.at(step))


@dataclass(frozen=True)
class Plan:
    """The units of a model, one for each parameter, in the model's order."""

    units: tuple[UnitPlan, ...]

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict; :meth:`from_json` reads it back."""
        units = [
            {
                "parameter": unit.parameter,
                "numel": unit.numel,
                "compressor": unit.compressor.to_json(),
                "program": program_to_json(unit.program),
                "feedback": unit.feedback,
            }
            for unit in self.units
        ]
        return {"format": FORMAT, "version": VERSION, "units": units}

    @staticmethod
    def from_json(record: Any) -> Plan:
        """The plan that :meth:`to_json` wrote.

        Raises:
            PlanError: another format or version, or a unit that is not valid.
        """
        if not isinstance(record, dict) or record.get("format") != FORMAT or record.get("version") != VERSION:
            raise PlanError(f"plan: expected format {FORMAT!r}, version {VERSION}")
        if not isinstance(record.get("units"), list):
            raise PlanError("plan: expected a list of units")
        units = []
        for index, unit in enumerate(record["units"]):
            try:
                numel, feedback = unit["numel"], unit["feedback"]
                if not isinstance(unit["parameter"], str) or type(numel) is not int or type(feedback) is not bool:
                    raise PlanError("parameter must be a string, numel an integer, feedback true or false")
                compressor, program = from_json(unit["compressor"]), program_from_json(unit["program"])
                units.append(UnitPlan(unit["parameter"], numel, compressor, program, feedback))
            except (KeyError, TypeError, ValueError) as error:
                raise PlanError(f"plan: unit {index} is not valid: {error!r}") from error
        return Plan(tuple(units))

    def fingerprint(self) -> str:
        """SHA-256 of the canonical JSON, in hexadecimal."""
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def check(self, parameters: Iterable[tuple[str, torch.nn.Parameter]], world_size: int) -> None:
        """Raise :class:`PlanError` unless the plan is one for these parameters, with programs that work.

        The message lists everything that is wrong: missing and unknown parameters, wrong sizes, programs that do not
        end with the averaged gradient.
        """
        sizes = dict(parameters)
        planned = [unit.parameter for unit in self.units]
        wrong = [f"{name}: not in the plan" for name in sizes if name not in set(planned)]
        wrong += [f"{name}: in the plan {planned.count(name)} times" for name in sizes if planned.count(name) > 1]
        for unit in self.units:
            parameter = sizes.get(unit.parameter)
            if parameter is None:
                wrong.append(f"{unit.parameter}: not a parameter of the model that needs a gradient")
            elif parameter.numel() != unit.numel:
                wrong.append(f"{unit.parameter}: {unit.numel} elements in the plan, {parameter.numel()} in the model")
            elif parameter.dtype not in GRAD_DTYPES and Encode() in unit.program:
                wrong.append(f"{unit.parameter}: {parameter.dtype} cannot be encoded, only reduced")
            else:
                try:
                    for _, compressor in unit.compressor.stages:
                        trace(unit.program, unit.numel, parameter.dtype, compressor, world_size)
                except ProgramError as error:
                    wrong.append(f"{unit.parameter}: {error}")
        if wrong:
            raise PlanError("plan does not fit the model:\n  " + "\n  ".join(wrong))


def exempt_vectors(name: str, parameter: torch.nn.Parameter) -> bool:
    """The default rule of exemption: parameters with fewer than two dimensions (biases, norms) are sent exactly.

    They are a fraction of a percent of the elements and carry much of the error when compressed.
    """
    return parameter.dim() < 2


def memory_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """The dimensions in the order in which they lie in memory, the outermost first: ``(O, H, W, I)`` for the weight of
    a convolution in channels-last format. Gradients lie as their parameters do if those have no gaps and no overlaps,
    and otherwise as the dimensions are numbered."""
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: -strides[dim])  # stable: sizes of 1 stay in their places
    dense = tensor.permute(order).is_contiguous()
    return tuple(tensor.shape[dim] for dim in (order if dense else range(tensor.dim())))


def uniform_plan(
    parameters: Iterable[tuple[str, torch.nn.Parameter]],
    compressor: Method,
    world_size: int,
    program: Program | None = None,
    exempt: Callable[[str, torch.nn.Parameter], bool] = exempt_vectors,
) -> Plan:
    """The same compressor and program for every parameter, but for those that ``exempt`` names.

    An exempt parameter goes through the same program as the others, so that it travels in the same messages, with
    :class:`~gckernels.Identity` in the place of the compressor, and so does one that the compressor's ``fit`` declines.
    A parameter whose dtype no compressor takes (float64) is reduced as it is.
    """
    program = default_program(compressor, world_size) if program is None else program
    units = []
    for name, parameter in parameters:
        encodable = parameter.dtype in GRAD_DTYPES
        fitted = encodable and not exempt(name, parameter)
        chosen = compressor.fit(memory_shape(parameter)) if fitted else Identity()
        steps = program if encodable else ALLREDUCE
        units.append(UnitPlan(name, parameter.numel(), chosen, steps, chosen.needs_feedback))
    return Plan(tuple(units))
