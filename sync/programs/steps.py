"""What programs are made of: steps, the ranks that a collective takes, and their JSON."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, get_args


class ProgramError(ValueError):
    """A program that is not valid; the message names the step."""


class Level(Enum):
    """Which ranks take part in a collective."""

    FLAT = "flat"  # all of them
    INTRA = "intra"  # the devices of one machine
    INTER = "inter"  # the devices of the same number in all machines


class Place(Enum):
    """Where a step computes."""

    DEVICE = "device"  # where the gradient is
    HOST = "host"  # on the processor of the machine


@dataclass(frozen=True)
class _Coding:
    place: Place = Place.DEVICE


@dataclass(frozen=True)
class _Collective:
    level: Level = Level.FLAT


class Encode(_Coding):
    """Raw to payload, with a residual of its own. A method of several rounds encodes again what has come back."""


class Decode(_Coding):
    """Payloads to raw, merged: what comes out is the mean over all that are in them."""


class AllReduce(_Collective):
    """Every rank gets the mean: of raw data, or of the payloads of a summable compressor."""


class ReduceScatter(_Collective):
    """Rank ``r`` gets the mean of all shards ``r`` of raw data."""


class Reduce(_Collective):
    """The root gets the mean of raw data."""


class AllGather(_Collective):
    """Every rank gets every rank's data: payloads to be merged, or the shards of the whole."""


class AllToAll(_Collective):
    """Rank ``r`` gets chunk ``r`` of every rank's payloads."""


class Gather(_Collective):
    """The root gets every rank's payloads."""


class Broadcast(_Collective):
    """Every rank gets what the root has."""


class Hop(_Collective):
    """One hop around a ring: the payload of a shard goes to the next rank; what comes from the one before is decoded,
    added to this rank's own gradient there, and encoded again. After as many hops as there are other ranks, each has
    one shard to which all have added."""


Coding = Encode | Decode
Collective = AllReduce | ReduceScatter | Reduce | AllGather | AllToAll | Gather | Broadcast | Hop
Step = Coding | Collective
Program = tuple[Step, ...]

KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in (*get_args(Coding), *get_args(Collective))}
"""Every kind of step by name."""


def describe(program: Program) -> str:
    """``"Encode AllGather Decode"``; what is not flat, or not on the device, says so: ``"AllGather(inter)"``."""
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
    """``[{"step": "Encode", "place": "device"}, {"step": "AllGather", "level": "flat"}, ...]``."""
    return [
        {"step": type(step).__name__}
        | ({"place": step.place.value} if isinstance(step, Coding) else {"level": step.level.value})
        for step in program
    ]


def program_from_json(records: Any) -> Program:
    """The program that :func:`program_to_json` wrote. A place that is not named is the device.

    Raises:
        ProgramError: unknown step, place or level.
    """
    if not isinstance(records, list):
        raise ProgramError(f"program: expected a list of steps, got {records!r}")
    return tuple(_step_from_json(record) for record in records)


def _step_from_json(record: Any) -> Step:
    kind = KINDS.get(str(record.get("step"))) if isinstance(record, dict) else None
    if kind is None:
        raise ProgramError(f"program: unknown step {record!r}; known are {', '.join(KINDS)}")
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
