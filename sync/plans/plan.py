"""Plans: a compressor and a program for every parameter or part of one, as frozen data with a JSON form.

A plan is the only link between the code that decides and the engine that executes. Ranks compare their plans before the
first collective.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from gckernels.compressor import GRAD_DTYPES, Compressor
from gckernels.method import MAX_JSON_DEPTH, Method, from_json, too_deep
from gckernels.ops import Identity

from ..programs.named import ALLREDUCE
from ..programs.sizes import sizes_of
from ..programs.steps import (
    Collective,
    Encode,
    Level,
    Program,
    ProgramError,
    describe,
    program_from_json,
    program_to_json,
)
from ..programs.topology import Topology
from .parameters import differentiable, plain_name
from .strides import in_reals

FORMAT = "gckernels.plan"
VERSION = 1
MAX_CHANNELS = 64  # each channel has its own process groups and lanes


class PlanError(ValueError):
    """A plan that is not valid or does not fit the model; the message lists everything that is wrong."""


@dataclass(frozen=True)
class UnitPlan:
    """How a unit is synchronised: one parameter, a part of one, or several parameters as one vector.

    Attributes:
        parameter: the name of the parameter in the model. Prefixes of torch.compile are removed, so that a plan fits a
            model whether it is compiled or not.
        numel: the number of elements of the unit, in real numbers. A complex element counts as two, its real part
            first.
        compressor: the method that encodes the unit, fitted to its shape.
        program: the steps that synchronise the unit.
        feedback: whether the compression error is kept and added to the next gradient.
        start: the first element of a part, in the order in which the parameter lies in memory; ``None`` for a whole
            parameter.
        root: the rank that is the root of the unit's collectives; on other levels, the rank in the same place.
        also: names of parameters that are merged with the first one, behind it in this order. They share statistics
            such as a scale or a threshold. The synchronizer lays them out side by side; DDP's buckets may not.
    """

    parameter: str
    numel: int
    compressor: Method
    program: Program
    feedback: bool
    start: int | None = None
    root: int = 0
    also: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "parameter", plain_name(self.parameter))
        object.__setattr__(self, "also", tuple(map(plain_name, self.also)))

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of all parameters in the unit."""
        return (self.parameter, *self.also)

    @property
    def key(self) -> str:
        """The name of the unit, under which its residuals are kept: ``"layer.weight"``, for a part
        ``"layer.weight[0:4096]"``, for merged parameters ``"layer.weight+layer.bias"``."""
        part = "" if self.start is None else f"[{self.start}:{self.start + self.numel}]"
        return "+".join(self.parameters) + part

    @property
    def in_place(self) -> bool:
        """Whether the unit is averaged where it lies, without compression."""
        return self.program == ALLREDUCE

    def has_residual(self, kind: str) -> bool:
        """Whether an encoding of the unit keeps a residual.

        The encoding of a shard that has another compressor keeps one only if that compressor needs feedback.

        Args:
            kind: ``"worker"``, the first encoding, or another name in ``residuals.ENCODINGS``.
        """
        if kind == "worker" or self.compressor.shard_compressor == self.compressor:
            return self.feedback
        return self.feedback and self.compressor.shard_compressor.traits.needs_feedback

    def encoder(self, kind: str) -> Method:
        """The method of the encoding named ``kind``: the compressor for ``"worker"``, that of shards for all others."""
        return self.compressor if kind == "worker" else self.compressor.shard_compressor

    def at_step(self, step: int) -> UnitPlan:
        """The same unit with its compressor's configuration at ``step``, counted from the first compressed step."""
        return replace(self, compressor=self.compressor.at_step(step))


@dataclass(frozen=True)
class Plan:
    """The units of a model.

    Attributes:
        units: one unit for each parameter, or several units that are its parts. A synchronizer launches them from the
            last to the first; DDP has its own order.
        topology: the machines and devices that the plan is made for; ``None`` for any number of ranks, with flat
            programs.
        channels: the number of messages of a phase that can be sent at the same time, from 1 to 64.

    Raises:
        PlanError: ``channels`` is not an int from 1 to 64.
    """

    units: tuple[UnitPlan, ...]
    topology: Topology | None = None
    channels: int = 1

    def __post_init__(self) -> None:
        if type(self.channels) is not int or not 1 <= self.channels <= MAX_CHANNELS:
            raise PlanError(f"plan: channels must be an int from 1 to {MAX_CHANNELS}, got {self.channels!r}")

    def to_json(self) -> dict[str, Any]:
        """The plan as a dict of JSON values, which :meth:`from_json` reads."""
        units = [
            {
                "parameter": unit.parameter,
                "numel": unit.numel,
                "compressor": unit.compressor.to_json(),
                "program": program_to_json(unit.program),
                "feedback": unit.feedback,
                "start": unit.start,
                "root": unit.root,
                "also": list(unit.also),
            }
            for unit in self.units
        ]
        topology = None if self.topology is None else asdict(self.topology)
        head = {"format": FORMAT, "version": VERSION, "topology": topology, "channels": self.channels}
        return head | {"units": units}

    @staticmethod
    def from_json(record: Any) -> Plan:
        """The plan that :meth:`to_json` has written.

        Raises:
            PlanError: the record has another format or version, or a unit that is not valid.
        """
        if too_deep(record):
            raise PlanError(f"plan: more than {MAX_JSON_DEPTH} levels of nested lists and objects")
        version = record.get("version") if isinstance(record, dict) else None
        if type(version) is not int or version != VERSION or record.get("format") != FORMAT:
            raise PlanError(f"plan: expected format {FORMAT!r}, version {VERSION}")
        if not isinstance(record.get("units"), list):
            raise PlanError("plan: expected a list of units")
        channels, topology = record.get("channels", 1), record.get("topology")
        try:
            topology = None if topology is None else Topology(**topology)
        except (TypeError, ValueError) as error:
            raise PlanError(f"plan: the topology is not valid: {error}") from error
        units = []
        for index, unit in enumerate(record["units"]):
            try:
                units.append(_unit_from_json(unit))
            except (KeyError, TypeError, ValueError) as error:
                raise PlanError(f"plan: unit {index} is not valid: {error!r}") from error
        return Plan(tuple(units), topology, channels)

    def fingerprint(self) -> str:
        """The SHA-256 hash of the canonical JSON, in hexadecimal."""
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def lines(self) -> list[str]:
        """The canonical JSON in pieces: first everything but the units, then one text for each unit."""
        record = self.to_json()
        units = record.pop("units")
        return [json.dumps(each, sort_keys=True, separators=(",", ":")) for each in (record, *units)]

    def fitted(self, parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> tuple[Plan, list[str]]:
        """The plan changed to fit the parameters, and a list of the changes.

        Units of unknown parameters, or of parameters with another size, are left out. Parameters that are then in no
        unit are averaged exactly.
        """
        known = {name: in_reals(parameter) for name, parameter in differentiable(parameters).items()}
        grouped = self._by_parameter().items()
        wrong = {name: _parts_problem(units, known[name].numel()) for name, units in grouped if name in known}
        changes: list[str] = []
        units = []
        for unit in self.units:
            unknown = [name for name in unit.parameters if name not in known]
            sizes = sum(known[name].numel() for name in unit.parameters if name in known)
            if unknown:
                changes.append(f"{', '.join(unknown)}: not a parameter of the model that needs a gradient")
            elif unit.start is None and sizes != unit.numel:
                changes.append(f"{unit.key}: {unit.numel} elements in the plan, {sizes} in the model")
            elif unit.start is not None and wrong[unit.parameter]:
                changes.append(f"{unit.key}: {wrong[unit.parameter]}")
            else:
                units.append(unit)
        planned = {name for unit in units for name in unit.parameters}
        for name, parameter in known.items():
            if name not in planned:
                changes.append(f"{name}: averaged exactly")
                units.append(UnitPlan(name, parameter.numel(), Identity(), ALLREDUCE, False))
        return replace(self, units=tuple(units)), changes

    def _by_parameter(self) -> dict[str, list[UnitPlan]]:
        """The units that contain each parameter, or a part of it."""
        units: dict[str, list[UnitPlan]] = {}
        for unit in self.units:
            for name in unit.parameters:
                units.setdefault(name, []).append(unit)
        return units

    def check(self, parameters: Iterable[tuple[str, torch.nn.Parameter]], world_size: int) -> None:
        """Raise unless the plan fits the parameters and the number of ranks, and its programs work.

        Raises:
            PlanError: the message lists everything that is wrong: missing and unknown parameters, wrong sizes, parts
                that leave gaps or overlap, programs that do not end with the averaged gradient.
        """
        known, units = differentiable(parameters), self._by_parameter()
        if self.topology_of(world_size).world_size != world_size:
            raise PlanError(f"plan is for {self.topology}, here are {world_size} ranks")
        wrong = [f"{name}: not in the plan" for name in known if name not in units]
        for name, parts in units.items():
            if name not in known:
                wrong.append(f"{name}: not a parameter of the model that needs a gradient")
            elif len(parts) > 1 and any(unit.start is None for unit in parts):
                wrong.append(f"{name}: in the plan {len(parts)} times")
            elif parts[0].parameter == name and all(other in known for other in parts[0].parameters):
                merged = [known[other] for other in parts[0].parameters]
                if problem := _parts_problem(parts, sum(in_reals(parameter).numel() for parameter in merged)):
                    wrong.append(f"{name}: {problem}")
                else:
                    problems = ((unit.key, self._unit_problem(unit, merged, world_size)) for unit in parts)
                    wrong += [f"{key}: {problem}" for key, problem in problems if problem]
        if wrong:
            raise PlanError("plan does not fit the model:\n  " + "\n  ".join(wrong))

    def topology_of(self, world_size: int) -> Topology:
        """The topology of the plan; without one, ``world_size`` machines with one device each."""
        return Topology(world_size) if self.topology is None else self.topology

    def _unit_problem(self, unit: UnitPlan, merged: list[torch.nn.Parameter], world_size: int) -> str:
        """A text that says why the unit is not valid for the ``merged`` parameters; ``""`` if it is."""
        dtype = in_reals(merged[0]).dtype
        if any(other.dtype != merged[0].dtype for other in merged):
            return f"merges parameters of {' and '.join(sorted({str(other.dtype) for other in merged}))}"
        if dtype not in GRAD_DTYPES and any(isinstance(step, Encode) for step in unit.program):
            return f"{merged[0].dtype} cannot be encoded, only reduced"
        if not 0 <= unit.root < world_size:
            return f"root must be a rank from 0 to {world_size - 1}, got {unit.root}"
        if (unit.start is not None or unit.also) and not isinstance(unit.compressor, Compressor):
            return f"{unit.compressor.name} takes whole parameters, one by one"
        if unit.start is not None and unit.also:
            return "a part of merged parameters"
        levels = {step.level for step in unit.program if isinstance(step, Collective)}
        if self.topology is None and levels - {Level.FLAT}:
            return f"program {describe(unit.program)}: the plan has no topology"
        try:
            for _, compressor in unit.compressor.schedule:
                sizes_of(unit.program, unit.numel, dtype, compressor, self.topology_of(world_size))
        except ProgramError as error:
            return str(error)
        return ""


def _parts_problem(parts: list[UnitPlan], numel: int) -> str:
    """A text that says why the parts do not have each of ``numel`` elements once; ``""`` if they do."""
    if parts[0].start is None:
        planned = parts[0].numel
        return "" if planned == numel else f"{planned} elements in the plan, {numel} in the model"
    stop = 0
    for start, size in sorted((unit.start or 0, unit.numel) for unit in parts):
        if start != stop:
            return f"its parts leave a gap, or overlap, between {min(stop, start)} and {max(stop, start)}"
        stop += size
    return "" if stop == numel else f"its parts have {stop} elements, the model's has {numel}"


def _unit_from_json(unit: Any) -> UnitPlan:
    parameter, numel, feedback = unit["parameter"], unit["numel"], unit["feedback"]
    start, root, also = unit.get("start"), unit.get("root", 0), unit.get("also", [])
    if not isinstance(parameter, str) or type(numel) is not int or type(feedback) is not bool:
        raise PlanError("parameter must be a string, numel an integer, feedback true or false")
    if numel < 0 or type(root) is not int or not (start is None or (type(start) is int and start >= 0)):
        raise PlanError("numel and root must be integers from 0 up, start one or null")
    if not isinstance(also, list) or not all(isinstance(name, str) for name in also):
        raise PlanError("also must be a list of names")
    compressor, program = from_json(unit["compressor"]), program_from_json(unit["program"])
    return UnitPlan(parameter, numel, compressor, program, feedback, start, root, tuple(also))
