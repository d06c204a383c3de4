"""Programs: how a unit is synchronised, as data.

A program is a tuple of steps. :func:`trace` derives what the data is after each step (raw or encoded, the whole unit
or a shard, how many bytes) and refuses programs that do not end with the averaged unit on every rank. The engine
allocates its buffers from that function, the planner takes its sizes from it: nobody else works them out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch

from gckernels import Identity
from gckernels.compressor import Compressor, chunk_numel
from gckernels.method import Method


class Level(Enum):
    """Which ranks take part in a collective."""

    FLAT = "flat"  # all of them


@dataclass(frozen=True)
class Encode:
    """Raw to payload, with the residual of the place (worker or shard) where it happens. A method of several rounds
    encodes again what has come back."""


@dataclass(frozen=True)
class Decode:
    """Payloads to raw, merged; the sum over all ranks is turned into their mean here."""


@dataclass(frozen=True)
class AllReduce:
    """Sum over the ranks: of raw data, or of the payloads of a summable compressor."""

    level: Level = Level.FLAT


@dataclass(frozen=True)
class AllGather:
    """Every rank gets every rank's data."""

    level: Level = Level.FLAT


@dataclass(frozen=True)
class AllToAll:
    """Rank ``r`` gets chunk ``r`` of every rank's data."""

    level: Level = Level.FLAT


Step = Encode | Decode | AllReduce | AllGather | AllToAll
Collective = (AllReduce, AllGather, AllToAll)
Program = tuple[Step, ...]

ALLREDUCE: Program = (AllReduce(),)
ENCODED_ALLREDUCE: Program = (Encode(), AllReduce(), Decode())
ALLGATHER: Program = (Encode(), AllGather(), Decode())
POWERSGD: Program = (Encode(), AllReduce(), Encode(), AllReduce(), Decode())
ALLTOALL: Program = (Encode(), AllToAll(), Decode(), Encode(), AllGather(), Decode())

PROGRAMS: dict[str, Program] = {
    "allreduce": ALLREDUCE,
    "encoded_allreduce": ENCODED_ALLREDUCE,
    "allgather": ALLGATHER,
    "alltoall": ALLTOALL,
    "powersgd": POWERSGD,
}
"""Programs by name, for plans in JSON and for users."""


@dataclass(frozen=True)
class Data:
    """What a rank holds of a unit between two steps.

    Attributes:
        numel: elements of the unit, or those that a shard is laid out for (the last shards may hold fewer).
        encoded: payloads, not numbers.
        sharded: this rank's shard of the unit, not all of it.
        sources: copies side by side, one for each rank that contributed, not merged yet.
        chunks: parts side by side, each with a payload of its own.
        reduced: every rank's contribution is in it.
        nbytes: bytes of all of it: ``sources * chunks`` payloads, or the raw numbers.
    """

    numel: int
    encoded: bool
    sharded: bool
    sources: int
    chunks: int
    reduced: bool
    nbytes: int


class ProgramError(ValueError):
    """A program that is not valid; the message names the step."""


def trace(program: Program, numel: int, dtype: torch.dtype, compressor: Method, world_size: int) -> tuple[Data, ...]:
    """What the data is before the first step and after each: ``len(program) + 1`` entries.

    Args:
        program: the steps.
        numel: elements of the unit.
        dtype: of the gradient.
        compressor: what ``Encode`` and ``Decode`` use.
        world_size: number of ranks.

    Raises:
        ProgramError: a step does not fit what the data is, or the mean of the whole unit is not what comes out.
    """
    if not isinstance(program, tuple):
        raise ProgramError(f"program: expected a tuple of steps, got {program!r}")
    data = Data(numel, False, False, 1, 1, False, numel * dtype.itemsize)
    states = [data]
    for index in range(len(program)):
        data = _after(program, index, data, numel, dtype, compressor, world_size)
        states.append(data)
    if data.encoded or data.sharded or not data.reduced:
        raise ProgramError(f"program {describe(program)}: does not end with the averaged unit on every rank")
    return tuple(states)


def _after(
    program: Program,
    index: int,
    data: Data,
    unit_numel: int,
    dtype: torch.dtype,
    compressor: Method,
    world_size: int,
) -> Data:
    one_shot = isinstance(compressor, Compressor)
    sent = program[:index].count(AllReduce())  # rounds, of a method that is reduced

    def refuse(why: str) -> ProgramError:
        return ProgramError(f"program {describe(program)}: step {index}, {describe((program[index],))}: {why}")

    def nbytes_of(round_: int, numel: int = data.numel) -> int:
        try:
            return compressor.round_nbytes(numel, round_)
        except ValueError as error:
            raise refuse(str(error)) from error

    match program[index]:
        case Encode():
            if data.encoded:
                if not _goes_on(program, index, compressor):
                    raise refuse("the data is encoded already")
                return replace(data, reduced=False, nbytes=nbytes_of(sent))
            split = not data.sharded and _next_collective(program, index) == AllToAll
            chunks = world_size if split else 1
            if split and not one_shot:
                raise refuse(f"{compressor.name} has no payloads of chunks")
            nbytes = chunks * nbytes_of(0, chunk_numel(data.numel, chunks))
            return replace(data, encoded=True, chunks=chunks, nbytes=nbytes)
        case Decode():
            if not data.encoded:
                raise refuse("the data is not encoded")
            if program[index - 1] == Encode():
                raise refuse("nothing has been sent since it was encoded")
            if sent < compressor.rounds and not one_shot:
                raise refuse(f"{compressor.name} sends in {compressor.rounds} rounds, of which there was {sent}")
            merged = data.reduced or data.sources == world_size
            # a shard waits for its second encoding in fp32, the whole unit goes back into the gradient
            nbytes = data.numel * (torch.float32 if data.sharded else dtype).itemsize
            return replace(data, encoded=False, sources=1, chunks=1, reduced=merged, nbytes=nbytes)
        case AllReduce():
            if data.reduced or data.sharded or data.sources != 1 or data.chunks != 1:
                raise refuse("only a whole unit that is not reduced yet can be reduced")
            if not data.encoded and len(program) > 1:
                raise refuse("raw data is reduced by a program of its own, of this one step")
            if data.encoded and not compressor.summable:
                raise refuse(f"payloads of {compressor.name} cannot be added")
            return replace(data, reduced=True)
        case AllGather():
            if not data.encoded:
                raise refuse("raw data is reduced, not gathered")
            if not one_shot:
                raise refuse(f"what {compressor.name} sends is added up, not gathered")
            if data.sources != 1 or data.chunks != 1 or data.sharded != data.reduced:
                raise refuse("only one payload of a whole unit, or of a reduced shard, can be gathered")
            if data.sharded:
                whole = replace(data, numel=unit_numel, sharded=False, chunks=world_size)
                return replace(whole, nbytes=world_size * data.nbytes)
            return replace(data, sources=world_size, nbytes=world_size * data.nbytes)
        case AllToAll():
            if not data.encoded or data.sharded or data.sources != 1 or data.chunks != world_size or data.reduced:
                raise refuse("only an encoded whole unit, one chunk for each rank, can be exchanged")
            shard = chunk_numel(data.numel, world_size)
            return replace(data, numel=shard, sharded=True, sources=world_size, chunks=1)
    raise refuse("not a step")


def _goes_on(program: Program, index: int, compressor: Method) -> bool:
    """Whether step ``index`` encodes a sum that has come back, for another round of a method that has several. What is
    sent exactly beside it has one round, and nothing to say in the others."""
    exact = isinstance(compressor, Compressor) and compressor.summable and compressor.payload_dtype == torch.float32
    return program[:index] == POWERSGD[:index] and (exact or compressor.rounds > 1)


def _next_collective(program: Program, index: int) -> type[Any] | None:
    return next((type(step) for step in program[index:] if isinstance(step, Collective)), None)


def sent_nbytes(step: Step, before: Data, world_size: int) -> float:
    """Bytes that each rank puts on the wire for ``step`` when it holds ``before``; 0 for encode and decode.

    A reduced buffer travels twice around a ring, ``2 (W - 1) / W`` of it per rank; a gathered payload goes to every
    other rank; of ``W`` chunks all but the own one are sent.
    """
    match step:
        case AllReduce():
            return allreduce_sent_nbytes(before.nbytes, world_size)
        case AllGather():
            return float((world_size - 1) * before.nbytes)
        case AllToAll():
            return before.nbytes * (world_size - 1) / world_size
    return 0.0


def allreduce_sent_nbytes(nbytes: int, world_size: int) -> float:
    """Bytes that each rank sends in a ring allreduce of ``nbytes``."""
    return 2 * nbytes * (world_size - 1) / world_size


def default_program(compressor: Method, world_size: int) -> Program:
    """The program used when a plan's author names none.

    Payloads that add up are reduced, in as many rounds as the method takes. Others are gathered between two ranks,
    where that is as many bytes as any other way and takes one phase; among more ranks they go to the owner of each
    shard and back, so that what a rank sends does not grow with the number of ranks.
    """
    if not isinstance(compressor, Compressor):
        return POWERSGD if compressor.rounds > 1 else ENCODED_ALLREDUCE
    if compressor.summable:
        return ALLREDUCE if isinstance(compressor, Identity) else ENCODED_ALLREDUCE
    return ALLGATHER if world_size <= 2 else ALLTOALL


def describe(program: Program) -> str:
    """``"Encode AllGather Decode"``."""
    return " ".join(type(step).__name__ for step in program) or "(empty)"


def program_to_json(program: Program) -> list[dict[str, str]]:
    """``[{"step": "Encode"}, {"step": "AllGather", "level": "flat"}, ...]``."""
    return [
        {"step": type(step).__name__} | ({"level": step.level.value} if isinstance(step, Collective) else {})
        for step in program
    ]


def program_from_json(records: Any) -> Program:
    """The program that :func:`program_to_json` wrote.

    Raises:
        ProgramError: unknown step or level.
    """
    steps: list[Step] = []
    kinds = {kind.__name__: kind for kind in (Encode, Decode, *Collective)}
    if not isinstance(records, list):
        raise ProgramError(f"program: expected a list of steps, got {records!r}")
    for record in records:
        kind = kinds.get(str(record.get("step"))) if isinstance(record, dict) else None
        if kind is None:
            raise ProgramError(f"program: unknown step {record!r}; known are {', '.join(kinds)}")
        try:
            steps.append(kind(Level(record["level"])) if kind in Collective else kind())
        except (KeyError, ValueError) as error:
            levels = ", ".join(level.value for level in Level)
            raise ProgramError(f"program: level of {record!r} must be one of {levels}") from error
    return tuple(steps)
