"""Layouts: what a rank holds between the steps of a program, for units of all sizes.

:func:`propagate` takes a program through its rules once: raw or encoded, the whole unit or a share of it, how many
payloads. :mod:`.sizes` fills in the size of a unit.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import assert_never

import torch

from gckernels.compressor import Compressor, chunk_numel
from gckernels.method import Method

from .named import ENCODED_ALLREDUCE, POWERSGD
from .rules import Flow, Opened, advance
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
    """A number of elements that follows from the size of a unit.

    Attributes:
        parts: the unit is laid out in this many equal grains (the last ones may hold fewer elements, or none).
        grains: the number of grains; ``None`` for the unit as it is.
    """

    parts: int = 1
    grains: int | None = None

    def elements(self, numel: int) -> int:
        """The number of elements, for a unit of ``numel``."""
        return numel if self.grains is None else self.grains * chunk_numel(numel, self.parts)


@dataclass(frozen=True)
class Layout:
    """What a rank holds of a unit of any size between two steps.

    Attributes:
        flow: raw or encoded, what has been merged, what the rank has a part of.
        piece: elements of the unit, or those that a shard is laid out for.
        sources: payloads of the same elements, side by side, to be merged.
        chunks: parts side by side, each with a payload.
        payload: elements that each payload is laid out for.
        round: which round of its method has made the payloads.
        is_fp32: raw data that is fp32 whatever the gradient is.
    """

    flow: Flow
    piece: Extent = Extent()
    sources: int = 1
    chunks: int = 1
    payload: Extent = Extent()
    round: int = 0
    is_fp32: bool = False


@dataclass(frozen=True)
class Capabilities:
    """The properties of a compressor that decide which programs its units can go through.

    Attributes:
        name: for errors.
        is_one_shot: it turns a vector into a payload and back, as opposed to computing between its collectives.
        summable: payloads can be added.
        rounds: how often it encodes and communicates in a synchronisation.
        averages_sums: it can encode sums on their way around a ring.
        adds_fp32: its payloads are added in fp32, so that they can travel beside the factors of a low-rank method.
    """

    name: str
    is_one_shot: bool
    summable: bool
    rounds: int
    averages_sums: bool
    adds_fp32: bool

    @staticmethod
    def of(method: Method) -> Capabilities:
        """The capabilities of a compressor."""
        one_shot = isinstance(method, Compressor)
        return Capabilities(
            method.name,
            one_shot,
            method.traits.summable,
            method.rounds,
            method.traits.averages and not method.traits.applies_momentum,
            one_shot and method.traits.summable and method.traits.payload_dtype == torch.float32,
        )


def propagate(program: Program, capabilities: Capabilities, topology: Topology) -> tuple[Layout, ...]:
    """The layouts before the first step and after each: ``len(program) + 1`` of them.

    Args:
        program: the steps.
        capabilities: of the compressor that ``Encode`` and ``Decode`` use.
        topology: of the ranks.

    Raises:
        ProgramError: a step does not fit what the data is, or the mean of the whole unit is not what comes out.
    """
    if not isinstance(program, tuple):
        raise ProgramError(f"program: expected a tuple of steps, got {program!r}")
    known = all(isinstance(step, Step) for step in program)  # anything else may have no hash
    return (_propagate if known else _propagate.__wrapped__)(program, capabilities, topology)


@functools.lru_cache(maxsize=16384)
def _propagate(program: Program, capabilities: Capabilities, topology: Topology) -> tuple[Layout, ...]:
    if capabilities.rounds > 1 or program == POWERSGD:
        return _two_rounds(program, capabilities)
    layout = Layout(Flow())
    layouts = [layout]
    shares = Shares(program, topology)
    for index, step in enumerate(program):
        try:
            _refuse(program, index, layout, capabilities)
            flow = advance(layout.flow, step, topology, capabilities.summable)
        except ProgramError as error:
            raise at_step(program, index, error) from error
        layout = _after(shares, index, step, layout, flow)
        layouts.append(layout)
    if not layout.flow.done:
        raise ProgramError(f"program {describe(program)}: does not end with the averaged unit on every rank")
    return tuple(layouts)


def at_step(program: Program, index: int, error: ValueError) -> ProgramError:
    """The error of a step of a program, with both in its message."""
    return ProgramError(f"program {describe(program)}: step {index}, {describe(program[index : index + 1])}: {error}")


def _two_rounds(program: Program, capabilities: Capabilities) -> tuple[Layout, ...]:
    """The layouts of methods of two rounds, and of units that are sent exactly beside them (in the first round)."""
    shown = f"program {describe(program)}"
    if program != POWERSGD:
        raise ProgramError(f"{shown}: {capabilities.name} takes two rounds, {describe(POWERSGD)}")
    if not capabilities.adds_fp32 and capabilities.rounds < 2:
        raise ProgramError(f"{shown}: what {capabilities.name} sends takes one round, and is not added up in fp32")
    merged = frozenset({Level.FLAT})
    flows = [Flow(encoded=True, fresh=True), Flow(encoded=True, merged=merged)]
    rounds = [Layout(flow, round=round_) for round_ in range(2) for flow in flows]
    return (Layout(Flow()), *rounds, Layout(Flow(merged=merged)))


def _refuse(program: Program, index: int, layout: Layout, capabilities: Capabilities) -> None:
    """Raise :class:`ProgramError` if the compressor has no part in this step of the program."""
    name = capabilities.name
    match program[index]:
        case AllReduce() if layout.flow.encoded and not capabilities.summable:
            raise ProgramError(f"payloads of {name} cannot be added")
        case Encode() if not capabilities.is_one_shot and program[index + 1 :] != ENCODED_ALLREDUCE[1:]:
            raise ProgramError(f"what {name} sends has no parts, and is added up, not gathered")
        case Hop() if not capabilities.averages_sums:
            raise ProgramError(f"{name} cannot encode sums on their way around a ring")


def _after(shares: Shares, index: int, step: Step, before: Layout, flow: Flow) -> Layout:
    piece = shares.piece(flow)
    following = shares.program[index + 1] if index + 1 < len(shares.program) else None
    match step:
        case Encode():
            chunks = shares.chunks(index)
            size = shares.chunk(flow, chunks) if chunks > 1 else piece
            if isinstance(following, Hop):  # a shard of the piece
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
    """How much of a unit the ranks hold, wherever its program is.

    Attributes:
        program, topology: as given.
        split_levels: the levels whose ranks get shards at some point.
        parts: grains of a unit, the smallest shards that there are.
    """

    def __init__(self, program: Program, topology: Topology) -> None:
        self.program, self.topology = program, topology
        self.split_levels = {step.level for step in program if isinstance(step, ReduceScatter | AllToAll | Hop)}
        self.parts = self._ranks(self.split_levels)

    def piece(self, flow: Flow) -> Extent:
        """The part of the unit that a rank has, or that its shard is laid out for."""
        if not any(opened.split for opened in flow.opened):
            return Extent()
        return Extent(self.parts, self._grains(flow))

    def chunk(self, flow: Flow, chunks: int) -> Extent:
        """One of several chunks of that part."""
        return Extent(self.parts, self._grains(flow) // chunks)

    def chunks(self, index: int) -> int:
        """Payloads that the encoding of step ``index`` makes: one for every rank that one is sent to before they are
        decoded."""
        parted = set()
        for step in self.program[index + 1 :]:
            if isinstance(step, Decode):
                break
            if isinstance(step, AllToAll):
                parted.add(step.level)
        return self._ranks(parted)

    def _grains(self, flow: Flow) -> int:
        """Grains that a rank has: those of the levels that are not split here, or have been gathered again."""
        return self._ranks(self.split_levels - {opened.level for opened in flow.opened if opened.split})

    def _ranks(self, levels: Iterable[Level]) -> int:
        return math.prod(self.topology.size(level) for level in levels)
