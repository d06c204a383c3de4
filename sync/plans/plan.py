"""Plans: a compressor and a program for every parameter or part of one, as frozen data with a JSON form.

A plan is the only link between the code that decides and the engine that executes. Ranks compare their plans before the
first collective.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import torch

from gckernels.codec import CHUNK_ALIGN, Codec, chunk_numel
from gckernels.compressor import Compressor, from_json

from ..programs.model_kinds import PLANNED, Frontend
from ..programs.named import ALLTOALL, SHARDS, exact_program
from ..programs.spans import MEAN, SHARD, Span
from ..programs.steps import Broadcast
from ..programs.topology import Topology, balanced
from .arguments import GATHERED_BY, differentiable
from .checks import contradictions, fitted_units, misfits
from .json_files import Entry, bytes_of, document, parsed, write_whole
from .json_records import JsonForm, from_value, read_record, written
from .prediction import Prediction
from .units import MAX_CHANNELS, PlanError, UnitPlan

__all__ = ["Frontend", "Plan", "PlanError", "UnitPlan"]

FORMAT = "gckernels.plan"
VERSION = 2
READ_VERSIONS = (1, 2)  # the first and the last
_ENTRIES = ("topology", "channels", "frontend", "start_step", "weights", "prediction", "units")
_LEFT_OUT = ("weights",)  # entries that are not written if they are ``None``
_REMEDY = "save it again with Plan.save, or make it again with gckernels plan"


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
        weights: the compressor of the parameters that a model of ``fully_shard`` without replicas gathers; ``None`` if
            they are sent exactly. Other plans have none.

    Raises:
        PlanError: an attribute is not valid, or launches, messages and channels contradict one another.
    """

    units: tuple[UnitPlan, ...]
    topology: Topology | None = None
    channels: Annotated[int, JsonForm(functools.partial(Entry.integer, least=1, most=MAX_CHANNELS))] = 1
    frontend: Frontend | None = None
    start_step: int = 0
    prediction: Prediction | None = field(default=None, compare=False)
    weights: Annotated[Compressor, JsonForm(from_value(from_json), Compressor.to_json)] | None = None

    def __post_init__(self) -> None:
        if type(self.channels) is not int or not 1 <= self.channels <= MAX_CHANNELS:
            raise PlanError(f"plan: channels must be an int from 1 to {MAX_CHANNELS}, got {self.channels!r}")
        if self.frontend is not None and not isinstance(self.frontend, Frontend):
            raise PlanError(f"plan: frontend must be None or a Frontend, got {self.frontend!r}")
        if type(self.start_step) is not int or self.start_step < 0:
            raise PlanError(f"plan: start_step must be an int from 0 up, got {self.start_step!r}")
        if self.weights is not None and not isinstance(self.weights, GATHERED_BY):
            raise PlanError(f"plan: weights must be None, BlockQuant, Cast16 or Identity, got {self.weights!r}")
        if self.weights is not None and not (self.frontend and self.frontend.gathers):
            raise PlanError("plan: weights must be None unless frontend is Frontend.FSDP, which gathers parameters")
        if self.prediction is not None and not isinstance(self.prediction, Prediction):
            raise PlanError(f"plan: prediction must be None or a Prediction, got {self.prediction!r}")
        if wrong := contradictions(self.units, self.channels):
            raise PlanError("plan contradicts itself:\n  " + "\n  ".join(wrong))
        if self.has_launches and self.frontend is not None and not self.frontend.plans_launches:
            raise PlanError("plan: frontend must be None or Frontend.MODULE, because its units have launches")

    @property
    def has_launches(self) -> bool:
        """Whether the plan says which units are launched together, and in which order."""
        return any(unit.launch is not None for unit in self.units)

    @property
    def sends(self) -> bool:
        """Whether any unit is not averaged in place."""
        return any(not unit.in_place for unit in self.units)

    @property
    def compresses(self) -> bool:
        """Whether any unit is not averaged in place, or parameters are encoded."""
        return self.weights is not None or self.sends

    @property
    def made_for(self) -> Frontend | None:
        """The only kind of model that the plan can be attached to; ``None`` for both."""
        return PLANNED if self.has_launches else self.frontend

    @property
    def span(self) -> Span:
        """The states between which its programs go."""
        return MEAN if self.frontend is None else self.frontend.span(self.topology)

    @functools.cached_property
    def by_key(self) -> Mapping[str, UnitPlan]:
        """The units by their keys."""
        return {unit.key: unit for unit in self.units}

    def with_units(self, units: Iterable[UnitPlan]) -> Plan:
        """The plan with other units, and without its prediction, unless the units are the same."""
        changed = tuple(units)
        return self if changed == self.units else replace(self, units=changed, prediction=None)

    def with_shapes(self, shapes: Mapping[str, Sequence[int]]) -> Plan:
        """The plan for parameters of other shapes, by name; a parameter that is not among them keeps its own."""
        units = (
            replace(unit, numel=math.prod(shape), compressor=unit.compressor.fit(tuple(shape)))
            if (shape := shapes.get(unit.parameter)) is not None
            else unit
            for unit in self.units
        )
        return replace(self, units=tuple(units), prediction=None)

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
        units: list[UnitPlan] = []
        for unit in self.units:
            if unit.numel <= max_numel or unit.also or not isinstance(unit.compressor, Codec):
                units.append(unit)
                continue
            size = min(chunk_numel(unit.numel, -(-unit.numel // max_numel)), max_numel // CHUNK_ALIGN * CHUNK_ALIGN)
            part = replace(unit, message=None, channel=None)
            for start in range(0, unit.numel, size):
                units.append(replace(part, start=(unit.start or 0) + start, numel=min(size, unit.numel - start)))
        return self.with_units(units)

    def spread_roots(self, world_size: int) -> Plan:
        """The plan with the roots of its units spread over the ranks.

        From the largest unit to the smallest, each gets the rank that has the fewest elements so far as its root. Units
        whose programs have no root stay as they are.
        """
        rooted = (
            each for each in enumerate(self.units) if any(isinstance(step, Broadcast) for step in each[1].program)
        )
        roots = balanced({index: unit.numel for index, unit in rooted}, world_size)
        return self.with_units(replace(unit, root=roots.get(index, unit.root)) for index, unit in enumerate(self.units))

    def for_frontend(self, frontend: Frontend | None) -> Plan:
        """The plan for another kind of model, without its prediction.

        Only plans for bare modules keep their launches. If the mean ends in shards, and did not before, or the other
        way around, units get programs that end as they must, and work on any number of ranks.
        """
        if frontend == self.frontend:
            return self
        units = self.units
        if frontend is not None and not frontend.plans_launches:
            units = tuple(replace(unit, launch=None) for unit in units)
        changed = replace(self, units=units, frontend=frontend, weights=None, prediction=None)
        if changed.span == self.span:
            return changed
        programs = (exact_program(changed.span), SHARDS if changed.span == SHARD else ALLTOALL)
        units = tuple(replace(unit, program=programs[not unit.in_place]) for unit in units)
        return replace(changed, units=units, topology=None)

    # ---------------------------------------------------------------- JSON and files

    def to_json(self) -> dict[str, Any]:
        """The plan as a dict of JSON values, which :meth:`from_json` reads."""
        record = written(self)
        entries = {key: record[key] for key in _ENTRIES if key not in _LEFT_OUT or record[key] is not None}
        return {"format": FORMAT, "version": VERSION} | entries

    @staticmethod
    def from_json(record: Any) -> Plan:
        """The plan that :meth:`to_json` has written, in this version of the format or an earlier one.

        Raises:
            PlanError: the record has another format or version, or something in it is not valid.
        """
        return _plan_of(document(record, "record", PlanError, _REMEDY))

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
        return _plan_of(parsed(bytes_of(path), os.fsdecode(path), "plan", PlanError, _REMEDY))

    def fingerprint(self) -> str:
        """The SHA-256 hash of the canonical JSON without the prediction, in hexadecimal."""
        return hashlib.sha256(_canonical(self._compared()).encode()).hexdigest()

    def lines(self) -> list[str]:
        """The canonical JSON without the prediction in pieces: first everything but the units, then one text for each
        unit."""
        record = self._compared()
        units = record.pop("units")
        return [_canonical(record), *map(_canonical, units)]

    def _compared(self) -> dict[str, Any]:
        """The record without the prediction."""
        return {key: value for key, value in self.to_json().items() if key != "prediction"}

    # ---------------------------------------------------------------- models

    def fitted(self, parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> tuple[Plan, list[str]]:
        """The plan changed to fit the parameters, and a list of the changes.

        Units of unknown parameters, or of parameters with another size, are left out. Parameters that are then in no
        unit are averaged exactly.
        """
        units, changes = fitted_units(self.units, differentiable(parameters), self.span)
        return self.with_units(units), changes

    def check(self, parameters: Iterable[tuple[str, torch.nn.Parameter]], world_size: int) -> None:
        """Raise unless the plan fits the parameters and the number of ranks, and its programs work.

        Raises:
            PlanError: the message lists everything that is wrong: missing and unknown parameters, wrong sizes, parts
                that leave gaps or overlap, launches of two dtypes, programs that do not end as the kind of model needs.
        """
        known = differentiable(parameters)
        if self.topology_of(world_size).world_size != world_size:
            raise PlanError(f"plan is for {self.topology}, here are {world_size} ranks")
        if wrong := misfits(self.units, known, self.topology, world_size, self.span):
            raise PlanError("plan does not fit the model:\n  " + "\n  ".join(wrong))

    def topology_of(self, world_size: int) -> Topology:
        """The topology of the plan; without one, ``world_size`` machines with one device each."""
        return Topology(world_size) if self.topology is None else self.topology


def _canonical(record: dict[str, Any]) -> str:
    return json.dumps(record, sort_keys=True, separators=(",", ":"))


def _plan_of(entry: Entry) -> Plan:
    head = entry.fields(("format", "version"), None)
    head["format"].choice((FORMAT,))
    head["version"].integer(*READ_VERSIONS)
    return read_record(entry, Plan, head=("format", "version"))
