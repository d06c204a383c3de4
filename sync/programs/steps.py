"""Steps, of which programs are made; the levels and places of steps; programs as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, get_args


class ProgramError(ValueError):
    """Raised for an invalid program; the message names the step."""


class Level(Enum):
    """The ranks that take part in a collective."""

    __hash__ = object.__hash__  # the one of Enum is slow, and programs are looked up often
    FLAT = "flat"  # all ranks
    INTRA = "intra"  # the devices of one machine
    INTER = "inter"  # the devices with the same index in all machines


class Place(Enum):
    """The place where a step computes."""

    __hash__ = object.__hash__  # as for Level
    DEVICE = "device"  # on the device of the gradients
    HOST = "host"  # on the CPU of the machine


@dataclass(frozen=True)
class _Coding:
    place: Place = Place.DEVICE


@dataclass(frozen=True)
class _Collective:
    level: Level = Level.FLAT


class Encode(_Coding):
    """Turns raw data into payloads, with a separate residual. Methods of several rounds encode the received data."""


class Decode(_Coding):
    """Turns payloads into raw data and merges them: the result is the mean over all ranks that have contributed."""


class AllReduce(_Collective):
    """Gives every rank the mean of raw data, or of the payloads of a summable compressor."""


class ReduceScatter(_Collective):
    """Gives rank ``r`` the mean of all shards ``r`` of raw data."""


class Reduce(_Collective):
    """Gives the root the mean of raw data."""


class AllGather(_Collective):
    """Gives every rank the data of all ranks: payloads to be merged, or the shards of the whole."""


class AllToAll(_Collective):
    """Gives rank ``r`` chunk ``r`` of every rank's payloads."""


class Gather(_Collective):
    """Gives the root the payloads of all ranks."""


class Broadcast(_Collective):
    """Gives every rank the data of the root."""


class Hop(_Collective):
    """One hop around a ring.

    Every rank sends the payload of a shard to the next rank. It decodes the payload that it receives, adds its own
    gradient of that shard, and encodes the sum. After ``world_size - 1`` hops each rank has one shard with the
    contributions of all ranks.
    """


Coding = Encode | Decode
Collective = AllReduce | ReduceScatter | Reduce | AllGather | AllToAll | Gather | Broadcast | Hop
Step = Coding | Collective
Program = tuple[Step, ...]

KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in (*get_args(Coding), *get_args(Collective))}
"""The kinds of steps, by name."""


def describe(program: Program) -> str:
    """A program as text, such as ``"Encode AllGather(inter) Decode"``.

    Levels other than flat and places other than the device are in parentheses.
    """
    return " ".join(_describe_step(step) for step in program) or "(empty)"


def _describe_step(step: Step) -> str:
    name = type(step).__name__
    match step:
        case Encode(place) | Decode(place) if place != Place.DEVICE:
            return f"{name}({place.value})"
        case Encode() | Decode():
            return name
    level = getattr(step, "level", Level.FLAT)
    return name if level == Level.FLAT else f"{name}({level.value})"


def program_to_json(program: Program) -> list[dict[str, str]]:
    """A program as JSON: ``[{"step": "Encode", "place": "device"}, {"step": "AllGather", "level": "flat"}, ...]``."""
    return [
        {"step": type(step).__name__}
        | ({"place": step.place.value} if isinstance(step, Coding) else {"level": step.level.value})
        for step in program
    ]


def program_from_json(records: Any) -> Program:
    """The program that :func:`program_to_json` has converted. The default place is the device.

    Raises:
        ProgramError: a step, place or level is unknown.
    """
    if not isinstance(records, list):
        raise ProgramError(f"program: expected a list of steps, got {records!r}")
    return tuple(_step_from_json(record) for record in records)


def _step_from_json(record: Any) -> Step:
    kind = KINDS.get(str(record.get("step"))) if isinstance(record, dict) else None
    if kind is None:
        raise ProgramError(f"program: unknown step {record!r}; known: {', '.join(KINDS)}")
    if kind in get_args(Coding):
        step: Step = kind(_member(Place, record, "place", Place.DEVICE.value))
    else:
        step = kind(_member(Level, record, "level", None))
    return step


def _member(enum: type[Any], record: dict[str, Any], key: str, default: str | None) -> Any:
    try:
        return enum(record.get(key, default))
    except ValueError as error:
        allowed = ", ".join(member.value for member in enum)
        raise ProgramError(f"program: {key} of {record!r} must be one of {allowed}") from error
