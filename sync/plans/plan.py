"""Plans: a compressor and a program for every parameter or part of one, as frozen data with a JSON form.

A plan is the only link between the code that decides and the engine that executes. Ranks compare their plans before the
first collective.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from typing import Any

import torch

from gckernels.codec import CHUNK_ALIGN
from gckernels.compressor import MAX_JSON_DEPTH, too_deep

from ..programs.topology import Topology
from .checks import contradictions, fitted_units, misfits
from .json_files import read_json, write_whole
from .parameters import differentiable
from .prediction import Prediction
from .units import MAX_CHANNELS, PlanError, UnitPlan, parted, with_spread_roots

__all__ = ["Frontend", "Plan", "PlanError", "UnitPlan"]

FORMAT = "gckernels.plan"
VERSION = 2
READ_VERSIONS = (1, 2)
_ENTRIES = ("format", "version", "topology", "channels", "frontend", "start_step", "prediction", "units")


class Frontend(Enum):
    """The kind of model that a plan is for, by what brings its gradients."""

    DDP = "ddp"  # a DDP model, with its own buckets
    MODULE = "module"  # a bare module, with the launches of the plan


@dataclass(frozen=True)
class Plan:
    """The units of a model.

    Attributes:
        units: one unit for each parameter, or several units that are its parts. A bare module launches them from the
            last to the first, unless they have launches; DDP has its own order.
        topology: the machines and devices that the plan is made for; ``None`` for any number of ranks, with flat
            programs.
        channels: the number of messages of a phase that can be sent at the same time, from 1 to 64.
        frontend: the kind of model that the plan is for; ``None`` for both. Plans with launches are for
            bare modules.
        start_step: the first step that is compressed. The argument ``start_step`` of the training counts as well, and
            the larger of the two decides.
        prediction: what a planner expects of the plan. It has no part in comparisons and in the fingerprint.

    Raises:
        PlanError: an attribute is not valid, or launches, messages and channels contradict one another.
    """

    units: tuple[UnitPlan, ...]
    topology: Topology | None = None
    channels: int = 1
    frontend: Frontend | None = None
    start_step: int = 0
    prediction: Prediction | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if type(self.channels) is not int or not 1 <= self.channels <= MAX_CHANNELS:
            raise PlanError(f"plan: channels must be an int from 1 to {MAX_CHANNELS}, got {self.channels!r}")
        if self.frontend is not None and not isinstance(self.frontend, Frontend):
            raise PlanError(f"plan: frontend must be None or a Frontend, got {self.frontend!r}")
        if type(self.start_step) is not int or self.start_step < 0:
            raise PlanError(f"plan: start_step must be an int from 0 up, got {self.start_step!r}")
        if self.prediction is not None and not isinstance(self.prediction, Prediction):
            raise PlanError(f"plan: prediction must be None or a Prediction, got {self.prediction!r}")
        if wrong := contradictions(self.units, self.channels):
            raise PlanError("plan contradicts itself:\n  " + "\n  ".join(wrong))
        if self.has_launches and self.frontend == Frontend.DDP:
            raise PlanError("plan: frontend must be None or Frontend.MODULE, because its units have launches")

    @property
    def has_launches(self) -> bool:
        """Whether the plan says which units are launched together, and in which order."""
        return any(unit.launch is not None for unit in self.units)

    @property
    def compresses(self) -> bool:
        """Whether any unit is not averaged in place."""
        return any(not unit.in_place for unit in self.units)

    @property
    def made_for(self) -> Frontend | None:
        """The only kind of model that the plan can be attached to; ``None`` for both."""
        return Frontend.MODULE if self.has_launches else self.frontend

    def with_units(self, units: Iterable[UnitPlan]) -> Plan:
        """The plan with other units, and without its prediction, unless the units are the same."""
        changed = tuple(units)
        return self if changed == self.units else replace(self, units=changed, prediction=None)

    def parted(self, max_numel: int) -> Plan:
        """The plan with large units cut into parts, so that encoding, sending and decoding of the parts overlap.

        Each unit becomes as few equal parts as have at most ``max_numel`` elements each. Every part is a message by
        itself, and takes the next channel. Merged units, and units of compressors that take whole parameters, stay
        whole.

        Raises:
            ValueError: ``max_numel`` is less than 16.
        """
        if type(max_numel) is not int or max_numel < CHUNK_ALIGN:
            raise ValueError(f"parted: max_numel must be an int from {CHUNK_ALIGN} up, got {max_numel!r}")
        return self.with_units(parted(self.units, max_numel))

    def spread_roots(self, world_size: int) -> Plan:
        """The plan with the roots of its units spread over the ranks.

        From the largest unit to the smallest, each gets the rank that has the fewest elements so far as its root. Units
        whose programs have no root stay as they are.
        """
        return self.with_units(with_spread_roots(self.units, world_size))

    def for_frontend(self, frontend: Frontend | None) -> Plan:
        """The plan for another kind of model, without its prediction. For DDP it loses its launches."""
        if frontend == self.frontend:
            return self
        units = self.units
        if frontend == Frontend.DDP:
            units = tuple(replace(unit, launch=None) for unit in units)
        return replace(self, units=units, frontend=frontend, prediction=None)

    # ---------------------------------------------------------------- JSON and files

    def to_json(self) -> dict[str, Any]:
        """The plan as a dict of JSON values, which :meth:`from_json` reads."""
        prediction = None if self.prediction is None else self.prediction.to_json()
        return self._head() | {"prediction": prediction, "units": [unit.to_json() for unit in self.units]}

    def _head(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": VERSION,
            "topology": None if self.topology is None else asdict(self.topology),
            "channels": self.channels,
            "frontend": None if self.frontend is None else self.frontend.value,
            "start_step": self.start_step,
        }

    @staticmethod
    def from_json(record: Any) -> Plan:
        """The plan that :meth:`to_json` has written, in this version of the format or an earlier one.

        Raises:
            PlanError: the record has another format or version, or something in it is not valid.
        """
        if too_deep(record):
            raise PlanError(f"plan: more than {MAX_JSON_DEPTH} levels of nested lists and objects")
        version = record.get("version") if isinstance(record, dict) else None
        if type(version) is not int or version not in READ_VERSIONS or record.get("format") != FORMAT:
            versions = " or ".join(map(str, READ_VERSIONS))
            raise PlanError(f"plan: expected format {FORMAT!r}, version {versions}")
        if not isinstance(record.get("units"), list):
            raise PlanError("plan: expected a list of units")
        if unknown := record.keys() - _ENTRIES:
            raise PlanError(f"plan: there is no entry {min(unknown)!r}; allowed are {', '.join(_ENTRIES)}")
        channels, topology, frontend = record.get("channels", 1), record.get("topology"), record.get("frontend")
        try:
            topology = None if topology is None else Topology(**topology)
        except (TypeError, ValueError) as error:
            raise PlanError(f"plan: the topology is not valid: {error}") from error
        ways = {each.value: each for each in Frontend}
        if frontend is not None and (not isinstance(frontend, str) or frontend not in ways):
            raise PlanError(f"plan: frontend must be null, {' or '.join(map(repr, ways))}, got {frontend!r}")
        units = []
        for index, unit in enumerate(record["units"]):
            try:
                units.append(UnitPlan.from_json(unit))
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise PlanError(f"plan: unit {index} is not valid: {error!r}") from error
        found = record.get("prediction")
        prediction = None if found is None else Prediction.from_json(found)
        made_for = None if frontend is None else ways[frontend]
        return Plan(tuple(units), topology, channels, made_for, record.get("start_step", 0), prediction)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a file, which :meth:`load` reads. The file never holds a part of a plan.

        Raises:
            OSError: the file cannot be written. If there was one, it is as it was.
        """
        write_whole(path, json.dumps(self.to_json(), indent=1) + "\n")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """The plan that :meth:`save` has written.

        Raises:
            OSError: the file cannot be read.
            PlanError: it is damaged, or not a plan of a known version.
        """
        try:
            return Plan.from_json(read_json(path))
        except ValueError as error:
            again = "save it again with Plan.save, or make it again with gckernels plan"
            raise PlanError(f"{os.fspath(path)}: not a plan, or damaged; {again}\n  {error}") from error

    def fingerprint(self) -> str:
        """The SHA-256 hash of the canonical JSON without the prediction, in hexadecimal."""
        record = self._head() | {"units": [unit.to_json() for unit in self.units]}
        return hashlib.sha256(_canonical(record).encode()).hexdigest()

    def lines(self) -> list[str]:
        """The canonical JSON without the prediction in pieces: first everything but the units, then one text for each
        unit."""
        return [_canonical(self._head()), *(_canonical(unit.to_json()) for unit in self.units)]

    # ---------------------------------------------------------------- models

    def fitted(self, parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> tuple[Plan, list[str]]:
        """The plan changed to fit the parameters, and a list of the changes.

        Units of unknown parameters, or of parameters with another size, are left out. Parameters that are then in no
        unit are averaged exactly.
        """
        units, changes = fitted_units(self.units, differentiable(parameters))
        return self.with_units(units), changes

    def check(self, parameters: Iterable[tuple[str, torch.nn.Parameter]], world_size: int) -> None:
        """Raise unless the plan fits the parameters and the number of ranks, and its programs work.

        Raises:
            PlanError: the message lists everything that is wrong: missing and unknown parameters, wrong sizes, parts
                that leave gaps or overlap, launches of two dtypes, programs that do not end with the averaged gradient.
        """
        known = differentiable(parameters)
        if self.topology_of(world_size).world_size != world_size:
            raise PlanError(f"plan is for {self.topology}, here are {world_size} ranks")
        if wrong := misfits(self.units, known, self.topology, world_size):
            raise PlanError("plan does not fit the model:\n  " + "\n  ".join(wrong))

    def topology_of(self, world_size: int) -> Topology:
        """The topology of the plan; without one, ``world_size`` machines with one device each."""
        return Topology(world_size) if self.topology is None else self.topology


def _canonical(record: dict[str, Any]) -> str:
    return json.dumps(record, sort_keys=True, separators=(",", ":"))
