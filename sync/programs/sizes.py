"""Sizes: the bytes that a rank holds of a unit between the steps of its program, and those that each step sends.

:func:`sizes_of` has the sizes of one unit, :mod:`.size_tables` those of many units and programs. Messages allocate
their buffers from these functions and the planner takes its sizes from them: nobody else works them out.

Raw data is always a mean over the ranks whose contributions are in it.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import assert_never

import torch

from gckernels.method import Method

from .layouts import Capabilities, Layout, at_step, propagate
from .rules import Flow
from .steps import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Decode,
    Encode,
    Gather,
    Hop,
    Program,
    Reduce,
    ReduceScatter,
    Step,
)
from .topology import Topology


@dataclass(frozen=True)
class Data:
    """What a rank holds of a unit between two steps.

    Attributes:
        numel: elements of the unit, or those that a shard is laid out for (the last shards may hold fewer).
        flow: raw or encoded, what has been merged, what the rank has a part of.
        dtype: of raw data.
        sources: payloads of the same elements, side by side, to be merged.
        chunks: parts side by side, each with a payload.
        size: elements that each payload is laid out for.
        nbytes: bytes of all of it: ``sources * chunks`` payloads, or the raw numbers.
    """

    numel: int
    flow: Flow
    dtype: torch.dtype
    sources: int
    chunks: int
    size: int
    nbytes: int


def sizes_of(
    program: Program, numel: int, dtype: torch.dtype, compressor: Method, topology: Topology
) -> tuple[Data, ...]:
    """What a rank holds of one unit before the first step and after each: ``len(program) + 1`` entries.

    Args:
        program: the steps.
        numel: elements of the unit.
        dtype: of the gradient.
        compressor: what ``Encode`` and ``Decode`` use.
        topology: of the ranks.

    Raises:
        ProgramError: the program is not valid (see :func:`~.layouts.propagate`), or the compressor refuses a unit of
            this size.
    """
    layouts = propagate(program, Capabilities.of(compressor), topology)
    return _sizes_of(program, layouts, numel, dtype, compressor)


@functools.lru_cache(maxsize=4096)
def _sizes_of(
    program: Program, layouts: tuple[Layout, ...], numel: int, dtype: torch.dtype, compressor: Method
) -> tuple[Data, ...]:
    """Cached: a model has hundreds of units of a few sizes, and each is looked at when the plan is checked and again
    when its message is built."""
    states = []
    for index, layout in enumerate(layouts):
        piece, size = layout.piece.elements(numel), layout.payload.elements(numel)
        count, number = layout.sources * layout.chunks, torch.float32 if layout.is_fp32 else dtype
        if not layout.flow.encoded:
            states.append(Data(piece, layout.flow, number, 1, 1, piece, piece * number.itemsize))
            continue
        try:
            nbytes = count * compressor.round_nbytes(size, layout.round)
        except ValueError as error:
            raise at_step(program, index - 1, error) from error
        states.append(Data(piece, layout.flow, dtype, layout.sources, layout.chunks, size, nbytes))
    return tuple(states)


# -------------------------------------------------------------------- bytes on the wire


@dataclass(frozen=True)
class WireRatio:
    """Bytes that a rank sends for a step, as a mean over all ranks, per byte that it holds.

    Attributes:
        of_result: per byte held after the step; otherwise before it.
        numerator, denominator: their ratio is what the ranks that take part send.
        share: the share of the ranks that take part.
    """

    of_result: bool
    numerator: int
    denominator: int
    share: float

    def nbytes(self, before: float, after: float) -> float:
        """The bytes, for a rank that holds ``before`` and ``after`` bytes."""
        return self.share * ((after if self.of_result else before) * self.numerator / self.denominator)


def wire_ratio(step: Step, before: Flow, topology: Topology) -> WireRatio:
    """The bytes that ``step`` puts on the wire; none for encode and decode.

    A reduced buffer travels twice around a ring, ``2 (N - 1) / N`` of it per rank; a gathered payload goes to every
    other rank; of ``N`` chunks or shards all but the own one are sent. To a root, and from it, all but the root's own
    travel. Ranks that have nothing, because a root has it, send nothing.

    Args:
        step: one step.
        before: where the data is before it.
        topology: of the ranks.
    """
    if isinstance(step, Encode | Decode):
        return WireRatio(False, 0, 1, 1.0)
    ranks = topology.size(step.level)
    idle = [opened.level for opened in before.opened if not opened.split and opened.level != step.level]
    share = 1 / math.prod(topology.size(level) for level in idle)
    match step:
        case AllReduce():
            return WireRatio(False, 2 * (ranks - 1), ranks, share)
        case ReduceScatter():
            return WireRatio(True, ranks - 1, 1, share)
        case AllGather():
            return WireRatio(False, ranks - 1, 1, share)
        case Hop():
            return WireRatio(True, 1, 1, share)
        case Reduce() | AllToAll() | Gather() | Broadcast():
            return WireRatio(False, ranks - 1, ranks, share)
        case _:
            assert_never(step)


def sent_nbytes(step: Step, before: Data, after: Data, topology: Topology) -> float:
    """Bytes that a rank puts on the wire for ``step``, as a mean over all ranks (see :func:`wire_ratio`).

    Args:
        step: one step.
        before, after: what a rank that has something holds, before and after it.
        topology: of the ranks.
    """
    return wire_ratio(step, before.flow, topology).nbytes(before.nbytes, after.nbytes)


def allreduce_sent_nbytes(nbytes: int, world_size: int) -> float:
    """Bytes that each rank sends in a ring allreduce of ``nbytes``."""
    return 2 * nbytes * (world_size - 1) / world_size
