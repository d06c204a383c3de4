"""Stages: the units of work of a message, each on one resource.

:func:`stages_of` derives them from the program alone. Messages bind stages to buffers, the engine submits them to
lanes, and predictions of the time of a training step add up the costs of the same stages.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from .layouts import Capabilities, Layout, propagate
from .residuals import ENCODINGS, rooted_levels
from .rules import needed_at
from .spans import MEAN, Span
from .steps import (
    AllReduce,
    Broadcast,
    Collective,
    Decode,
    Encode,
    Hop,
    Level,
    Place,
    Program,
    Step,
    describe,
)
from .topology import Topology


class Resource(Enum):
    """The kind of lane that a stage needs, in the order in which a message may need them between two collectives."""

    COMPUTE = "compute"
    TO_HOST = "to-host"
    HOST_COMPUTE = "host-compute"
    TO_DEVICE = "to-device"
    AVERAGE = "average"  # in place, without compression
    COMMUNICATE = "communicate"
    HOST_COMMUNICATE = "host-communicate"

    @property
    def on_host(self) -> bool:
        """Whether the CPU does the work, not the device."""
        return self in (Resource.HOST_COMPUTE, Resource.HOST_COMMUNICATE)

    @property
    def does(self) -> str:
        """The kind of work: ``"compute"``, ``"copy"`` or ``"communicate"``."""
        match self:
            case Resource.COMPUTE | Resource.HOST_COMPUTE:
                return "compute"
            case Resource.TO_HOST | Resource.TO_DEVICE:
                return "copy"
        return "communicate"


class MessageKind(Enum):
    """The way in which the units of a message are sent."""

    IN_PLACE = "in place"  # averaged in the bucket, without compression
    ENCODED = "encoded"  # through a program, with compressors
    LOW_RANK = "low rank"  # as factors, by methods that compute between their collectives


class StageKind(Enum):
    """The work of a stage."""

    AVERAGE = "average"  # average a stretch of gradient in place
    ENCODE = "encode"
    DECODE = "decode"
    RECODE = "recode"  # decode, merge and encode again in one call
    ENCODE_SHARD = "encode shard"  # encode the shard with which a rank begins a ring
    ADD = "add"  # in a ring: decode the received shard, add the rank's own, encode the sum
    CUT = "cut"  # copy this rank's share of the mean of raw data into the buffer to send
    JOIN = "join"  # copy raw data out of the received buffer
    COPY = "copy"  # between device and host
    COLLECTIVE = "collective"
    PROJECT = "project"  # low rank: compute the factors of one side
    RECONSTRUCT = "reconstruct"  # low rank: compute gradients from the factors


@dataclass(frozen=True)
class StageSpec:
    """One stage of a message, independent of its units."""

    kind: StageKind  # its work
    name: str  # its name for people, such as "Encode" or "AllToAll(inter)"
    phase: int  # number of collectives before this stage, which is also the number of its lane
    resource: Resource  # the kind of lane that it needs
    first: int  # index of the first step that it executes, program[first:stop]
    stop: int  # index after the last of these steps; equal to first for a copy
    place: Place = Place.DEVICE
    """The place where it computes, or of the data that it sends; for a copy, the place of the copy."""
    level: Level | None = None  # level of a collective; otherwise None
    encoding: str | None = None  # kind of the residual, one of ENCODINGS; None for stages that do not encode
    starts_immediately: bool = False
    """Whether the submitting thread starts the work, which then goes on by itself, beside all others on its lane. On a
    device the lane does the work where messages have several stages."""


def spec_to_json(spec: StageSpec) -> dict[str, Any]:
    """The fields of a spec except its name, as JSON; part of the format of traces."""
    return {
        "kind": spec.kind.value,
        "phase": spec.phase,
        "resource": spec.resource.value,
        "steps": [spec.first, spec.stop],
        "place": spec.place.value,
        "level": None if spec.level is None else spec.level.value,
        "encoding": spec.encoding,
        "starts_immediately": spec.starts_immediately,
    }


IN_PLACE_STAGES = (
    StageSpec(StageKind.AVERAGE, "Average", 0, Resource.AVERAGE, 0, 1, level=Level.FLAT, starts_immediately=True),
)
"""The stages of a message that is averaged in place."""


@functools.lru_cache(maxsize=16384)
def stages_of(
    kind: MessageKind,
    program: Program,
    capabilities: Capabilities,
    topology: Topology,
    apart: bool = False,
    span: Span = MEAN,
) -> tuple[StageSpec, ...]:
    """The stages of a message in order, for a rank that takes part in all of them, such as the root.

    Args:
        program: the program of all units.
        capabilities: capabilities of the compressor of one unit.
        topology: topology of the ranks.
        apart: whether device and host have different memories, so that data is copied between them.
        span: the states between which the program goes.

    Raises:
        ProgramError: the program is not valid.
    """
    match kind:
        case MessageKind.IN_PLACE:
            return IN_PLACE_STAGES
        case MessageKind.LOW_RANK:
            return tuple(_low_rank(program))
        case MessageKind.ENCODED:
            layouts = propagate(program, capabilities, topology, span)
            return tuple(_encoded(program, layouts, apart))


def levels_of_root(spec: StageSpec, program: Program, layouts: tuple[Layout, ...]) -> tuple[Level, ...]:
    """The levels on which only ranks with the index of the root take part in a stage; none if all ranks do.

    Where the root has all data, the other ranks do not.

    Args:
        spec: one of :func:`stages_of`.
        program: the program of the stage.
        layouts: the layouts of the program.
    """
    receives = spec.first < spec.stop and isinstance(program[spec.first], Broadcast)
    return rooted_levels(layouts[spec.stop if receives else spec.first].flow)


def takes_part(
    spec: StageSpec, program: Program, layouts: tuple[Layout, ...], topology: Topology, rank: int, root: int
) -> bool:
    """Whether ``rank`` takes part in a stage.

    Args:
        spec, program, layouts: as for :func:`levels_of_root`.
        topology: topology of the ranks.
        root: the root of the message's units.
    """
    levels = levels_of_root(spec, program, layouts)
    return all(topology.index(level, rank) == topology.index(level, root) for level in levels)


def may_recode(program: Program, index: int) -> bool:
    """Whether the program allows step ``index``, a decoding, and the encoding after it to be one call."""
    steps = program[index : index + 3]
    decoded = [type(step) for step in steps[:2]] == [Decode, Encode]
    return decoded and not isinstance(steps[2], Hop | AllReduce)


def _encoded(program: Program, layouts: tuple[Layout, ...], apart: bool) -> Iterator[StageSpec]:
    place, phase, index = Place.DEVICE, 0, 0
    encodings = iter(ENCODINGS)
    encoding = None
    while index <= len(program):
        needed = needed_at(layouts[index].flow, program[index] if index < len(program) else None)
        if apart and needed != place:
            place = needed
            yield _copy(phase, index, place)
        if index == len(program):
            return
        step, before, after = program[index], layouts[index], layouts[index + 1]
        if isinstance(step, Collective):
            merges = len(after.flow.merged) > len(before.flow.merged)
            is_raw = not before.flow.encoded
            if is_raw and merges:
                yield _compute(StageKind.CUT, "Cut", phase, index, place)
            yield _collective(step, phase, index, place)
            phase += 1
            if isinstance(step, Hop):
                yield _compute(StageKind.ADD, "Recode", phase, index, place, encoding)
            elif is_raw and not (merges and after.flow.opened):
                yield _compute(StageKind.JOIN, "Join", phase, index, place)
        elif _recodes(program, layouts, index, apart):
            encoding = next(encodings)
            yield _compute(StageKind.RECODE, "Recode", phase, index, place, encoding, steps=2)
            index += 1
        elif isinstance(step, Decode):
            yield _compute(StageKind.DECODE, describe((step,)), phase, index, place)
        else:
            encoding = next(encodings)
            in_ring = isinstance(program[index + 1], Hop)
            kind, name = (StageKind.ENCODE_SHARD, "Encode") if in_ring else (StageKind.ENCODE, describe((step,)))
            yield _compute(kind, name, phase, index, place, encoding)
        index += 1


def _recodes(program: Program, layouts: tuple[Layout, ...], index: int, apart: bool) -> bool:
    """Whether step ``index`` and the step after it are one call."""
    if not may_recode(program, index):
        return False
    decode, encode = program[index : index + 2]
    places = {step.place for step in (decode, encode) if isinstance(step, Decode | Encode)}
    return (not apart or len(places) == 1) and layouts[index].chunks == layouts[index + 2].chunks == 1


def _compute(
    kind: StageKind, name: str, phase: int, first: int, place: Place, encoding: str | None = None, steps: int = 1
) -> StageSpec:
    resource = Resource.HOST_COMPUTE if place == Place.HOST else Resource.COMPUTE
    return StageSpec(kind, name, phase, resource, first, first + steps, place, encoding=encoding)


def _collective(step: Step, phase: int, index: int, place: Place) -> StageSpec:
    assert isinstance(step, Collective)
    resource = Resource.HOST_COMMUNICATE if place == Place.HOST else Resource.COMMUNICATE
    return StageSpec(StageKind.COLLECTIVE, describe((step,)), phase, resource, index, index + 1, place, step.level)


def _copy(phase: int, index: int, place: Place) -> StageSpec:
    resource = Resource.TO_HOST if place == Place.HOST else Resource.TO_DEVICE
    return StageSpec(StageKind.COPY, f"Copy({place.value})", phase, resource, index, index, place)


def _low_rank(program: Program) -> Iterator[StageSpec]:
    """Projections before the collectives, and a reconstruction after the last.

    These are the encodings and decodings of the program.
    """
    rounds = sum(isinstance(step, Encode) for step in program)
    sides = iter(("(left)", "(right)") if rounds > 1 else ("",))
    phase = 0
    for index, step in enumerate(program):
        match step:
            case Encode():
                yield _compute(StageKind.PROJECT, f"Project{next(sides)}", phase, index, Place.DEVICE)
            case Decode():
                yield _compute(StageKind.RECONSTRUCT, "Reconstruct", phase, index, Place.DEVICE)
            case _:
                yield _collective(step, phase, index, Place.DEVICE)
                phase += 1
