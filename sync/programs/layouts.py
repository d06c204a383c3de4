"""Layouts: the form of the data that a rank holds between the steps of a program, independent of the unit's size.

:func:`propagate` derives from the rules whether the data is raw or encoded, the whole unit or a part of it, and how
many payloads it has. :mod:`.sizes` adds the size of a unit.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, assert_never

import torch

from gckernels.codec import Codec, chunk_numel
from gckernels.compressor import Compressor

from .named import ENCODED_ALLREDUCE, POWERSGD
from .rules import START, Flow, Opened, advance
from .spans import MEAN, Span
from .steps import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Decode,
    Encode,
    Gather,
    Hop,
    Level,
    Program,
    ProgramError,
    Reduce,
    ReduceScatter,
    Step,
    describe,
)
from .topology import Topology


@dataclass(frozen=True)
class Extent:
    """A number of elements as a function of the size of a unit."""

    parts: int = 1
    """Number of equal grains in which the unit is laid out (the last ones may have fewer elements, or none)."""
    grains: int | None = None  # number of these grains; None for the whole unit

    def elements(self, numel: int) -> int:
        """The number of elements for a unit of ``numel`` elements."""
        return numel if self.grains is None else self.grains * chunk_numel(numel, self.parts)


RAW, RAW_FP32 = -2, -1
"""Data that is not encoded, in the dtype of the gradients or in fp32."""


class Content(NamedTuple):
    """The form and size of the data that a rank holds. Many programs hold the same few contents."""

    extent: Extent  # the elements of a piece
    form: int  # RAW, RAW_FP32 or the round of the method that has made the payloads
    pieces: int  # the number of pieces

    def nbytes(self, numel: int, itemsize: int, payload_nbytes: Callable[[int, int], int]) -> int:
        """The bytes for a unit.

        Args:
            numel: the elements of the unit.
            itemsize: the bytes of an element of its gradient.
            payload_nbytes: the bytes of a payload, for a number of elements and a round.
        """
        elements = self.extent.elements(numel)
        if self.form >= 0:
            return self.pieces * payload_nbytes(elements, self.form)
        return self.pieces * elements * (itemsize if self.form == RAW else 4)


@dataclass(frozen=True)
class Layout:
    """The form of the data that a rank holds between two steps."""

    flow: Flow  # the flow between the steps
    piece: Extent = Extent()  # elements of the unit or, for a shard, of a full one
    sources: int = 1  # number of payloads for the same elements, side by side, to be merged; 1 for raw data
    chunks: int = 1  # number of chunks, side by side, each with separate payloads; 1 for raw data
    payload: Extent = Extent()  # elements for which each payload is laid out; piece for raw data
    round: int = 0  # index of the method's round that has made the payloads
    is_fp32: bool = False  # whether raw data is fp32, whatever the dtype of the gradient

    @property
    def content(self) -> Content:
        """The content of the layout."""
        raw = RAW_FP32 if self.is_fp32 else RAW
        return Content(self.payload, self.round if self.flow.encoded else raw, self.sources * self.chunks)


@dataclass(frozen=True)
class Capabilities:
    """The properties of a compressor that decide which programs its units can go through."""

    name: str  # name of the method, for errors
    is_one_shot: bool  # whether it encodes and decodes a vector in one step, without computing between collectives
    summable: bool  # whether its payloads can be added
    rounds: int  # number of times it encodes and communicates in a synchronisation
    averages_sums: bool  # whether it can encode partial sums on their way around a ring
    adds_fp32: bool
    """Whether its payloads are added in fp32, so that they can travel with the factors of a low-rank method."""

    @staticmethod
    def of(method: Compressor) -> Capabilities:
        """The capabilities of a compressor."""
        one_shot = isinstance(method, Codec)
        return Capabilities(
            method.name,
            one_shot,
            method.traits.summable,
            method.rounds,
            method.traits.averages and not method.traits.applies_momentum,
            one_shot and method.traits.summable and method.traits.payload_dtype == torch.float32,
        )


def propagate(
    program: Program, capabilities: Capabilities, topology: Topology, span: Span = MEAN
) -> tuple[Layout, ...]:
    """The layouts before the first step and after each step: ``len(program) + 1`` items.

    Args:
        program: the steps.
        capabilities: capabilities of the method of ``Encode`` and ``Decode``.
        topology: topology of the ranks.
        span: the states between which the program must go.

    Raises:
        ProgramError: a step cannot follow, or the program does not end where the span does.
    """
    if not isinstance(program, tuple):
        raise ProgramError(f"program: expected a tuple of steps, got {program!r}")
    hashable = all(isinstance(step, Step) for step in program)
    return (_propagate if hashable else _propagate.__wrapped__)(program, capabilities, topology, span)


@functools.lru_cache(maxsize=16384)
def _propagate(program: Program, capabilities: Capabilities, topology: Topology, span: Span) -> tuple[Layout, ...]:
    if span == MEAN and (capabilities.rounds > 1 or program == POWERSGD):
        return _two_rounds(program, capabilities)
    shares = Shares(program, topology, span.begin)
    whole = shares.piece(span.begin)
    layout = Layout(span.begin, whole, payload=whole)
    layouts = [layout]
    for index, step in enumerate(program):
        try:
            _refuse(program, index, layout, capabilities)
            flow = advance(layout.flow, step, topology, capabilities.summable)
        except ProgramError as error:
            raise at_step(program, index, error) from error
        layout = _after(shares, index, step, layout, flow)
        layouts.append(layout)
    if not span.ends_at(layout.flow):
        raise ProgramError(f"program {describe(program)}: does not end with {span.end}")
    return tuple(layouts)


def at_step(program: Program, index: int, error: ValueError) -> ProgramError:
    """An error whose message names the program, the step and the reason."""
    return ProgramError(f"program {describe(program)}: step {index}, {describe(program[index : index + 1])}: {error}")


def _two_rounds(program: Program, capabilities: Capabilities) -> tuple[Layout, ...]:
    """The layouts for methods of two rounds, and for units that are sent exactly beside them, in the first round."""
    described = f"program {describe(program)}"
    if program != POWERSGD:
        raise ProgramError(f"{described}: {capabilities.name} has two rounds and needs {describe(POWERSGD)}")
    if not capabilities.adds_fp32 and capabilities.rounds < 2:
        raise ProgramError(
            f"{described}: needs a method of two rounds, or one whose payloads are added in fp32; {capabilities.name} "
            "is neither"
        )
    merged = frozenset({Level.FLAT})
    flows = [Flow(encoded=True, fresh=True), Flow(encoded=True, merged=merged)]
    rounds = [Layout(flow, round=round_) for round_ in range(2) for flow in flows]
    return (Layout(START), *rounds, Layout(Flow(merged=merged)))


def _refuse(program: Program, index: int, layout: Layout, capabilities: Capabilities) -> None:
    """Raise :class:`ProgramError` if the method is not capable of step ``index`` of the program."""
    name = capabilities.name
    match program[index]:
        case AllReduce() if layout.flow.encoded and not capabilities.summable:
            raise ProgramError(f"payloads of {name} cannot be added")
        case Encode() if not capabilities.is_one_shot and program[index + 1 :] != ENCODED_ALLREDUCE[1:]:
            raise ProgramError(f"payloads of {name} cannot be cut into chunks or gathered, only added")
        case Hop() if not capabilities.averages_sums:
            raise ProgramError(f"{name} cannot encode sums on their way around a ring")


def _after(shares: Shares, index: int, step: Step, before: Layout, flow: Flow) -> Layout:
    piece = shares.piece(flow)
    following = shares.program[index + 1] if index + 1 < len(shares.program) else None
    match step:
        case Encode():
            chunks = shares.chunks(index)
            size = shares.chunk(flow, chunks) if chunks > 1 else piece
            if isinstance(following, Hop):  # each payload is of a shard of the piece
                size = shares.piece(Flow(opened=(*flow.opened, Opened(following.level, True))))
            return Layout(flow, piece, 1, chunks, size)
        case Decode():
            return Layout(flow, piece, payload=piece, is_fp32=isinstance(following, Encode) and bool(flow.opened))
        case _ if not flow.encoded:
            return Layout(flow, piece, payload=piece)
    ranks, sources, chunks = shares.topology.size(step.level), before.sources, before.chunks
    match step:
        case AllToAll():
            sources, chunks = sources * ranks, chunks // ranks
        case Gather():
            sources *= ranks
        case AllGather() if flow.opened == before.flow.opened:
            sources *= ranks
        case AllGather():
            chunks *= ranks
        case AllReduce() | Broadcast() | Hop() | Reduce() | ReduceScatter():
            pass
        case _:
            assert_never(step)
    return Layout(flow, piece, sources, chunks, before.payload)


class Shares:
    """The sizes of the parts that ranks hold of a unit in a program, which begins with the flow ``begin``.

    Attributes:
        program: as given.
        topology: as given.
        split_levels: the levels whose ranks have shards at some point.
        parts: number of grains of the unit; a grain is the smallest shard in the program.
    """

    def __init__(self, program: Program, topology: Topology, begin: Flow = START) -> None:
        self.program, self.topology = program, topology
        self.split_levels = {step.level for step in program if isinstance(step, ReduceScatter | AllToAll | Hop)}
        self.split_levels |= {opened.level for opened in begin.opened if opened.split}
        self.parts = self._ranks(self.split_levels)

    def piece(self, flow: Flow) -> Extent:
        """The extent of the data that a rank has at ``flow``; for a shard, the extent of a full one."""
        if not any(opened.split for opened in flow.opened):
            return Extent()
        return Extent(self.parts, self._grains(flow))

    def chunk(self, flow: Flow, chunks: int) -> Extent:
        """The extent of one of ``chunks`` chunks of that data."""
        return Extent(self.parts, self._grains(flow) // chunks)

    def chunks(self, index: int) -> int:
        """Number of chunks that the encoding at step ``index`` makes: one for each rank that receives one."""
        exchanged = set()
        for step in self.program[index + 1 :]:
            if isinstance(step, Decode):
                break
            if isinstance(step, AllToAll):
                exchanged.add(step.level)
        return self._ranks(exchanged)

    def _grains(self, flow: Flow) -> int:
        """Number of grains that a rank has at ``flow``."""
        return self._ranks(self.split_levels - {opened.level for opened in flow.opened if opened.split})

    def _ranks(self, levels: Iterable[Level]) -> int:
        return math.prod(self.topology.size(level) for level in levels)
