"""The bytes that a rank holds of a unit between the steps of its program, and the bytes that each step sends.

:func:`sizes_of` returns the sizes of one unit. Messages allocate their buffers from them. Planners, which have many
units in many programs, take the contents of :mod:`.layouts`, which are functions of the unit's size.

Raw data is always a mean over the ranks that have contributed to it.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import assert_never

import torch

from gckernels.compressor import Compressor

from .layouts import Capabilities, Content, Layout, at_step, propagate
from .rules import Flow
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
    Program,
    Reduce,
    ReduceScatter,
    Step,
)
from .topology import Topology


@dataclass(frozen=True)
class Data:
    """The data of a unit that a rank holds between two steps."""

    numel: int  # number of elements of the unit or, for a shard, of a full one (the last shards may have fewer)
    flow: Flow  # the flow between the steps
    dtype: torch.dtype  # dtype of raw data
    sources: int  # number of payloads for the same elements, side by side, to be merged
    chunks: int  # number of chunks, side by side, each with separate payloads
    size: int  # number of elements for which each payload is laid out
    nbytes: int  # bytes of all of it: sources * chunks payloads, or the raw numbers


def sizes_of(
    program: Program,
    numel: int,
    dtype: torch.dtype,
    compressor: Compressor,
    topology: Topology,
    span: Span = MEAN,
) -> tuple[Data, ...]:
    """The data of one unit before the first step and after each step: ``len(program) + 1`` items.

    Args:
        program: the steps.
        numel: number of elements of the unit.
        dtype: dtype of the gradient.
        compressor: the method of ``Encode`` and ``Decode``.
        topology: topology of the ranks.
        span: the states between which the program goes.

    Raises:
        ProgramError: the program is not valid (see :func:`~.layouts.propagate`), or the method refuses a unit of this
            size.
    """
    hashable = isinstance(program, tuple) and all(isinstance(step, Step) for step in program)
    return (_sizes_of if hashable else _sizes_of.__wrapped__)(program, numel, dtype, compressor, topology, span)


@functools.lru_cache(maxsize=4096)
def _sizes_of(
    program: Program, numel: int, dtype: torch.dtype, compressor: Compressor, topology: Topology, span: Span
) -> tuple[Data, ...]:
    """:func:`sizes_of`, cached: a model has hundreds of units but few sizes."""
    states = []
    for index, layout in enumerate(propagate(program, Capabilities.of(compressor), topology, span)):
        piece, size = layout.piece.elements(numel), layout.payload.elements(numel)
        try:
            nbytes = layout.content.nbytes(numel, dtype.itemsize, compressor.round_nbytes)
        except ValueError as error:
            raise at_step(program, index - 1, error) from error
        number = torch.float32 if layout.is_fp32 else dtype
        states.append(Data(piece, layout.flow, number, layout.sources, layout.chunks, size, nbytes))
    return tuple(states)


# -------------------------------------------------------------------- bytes on the wire


@dataclass(frozen=True)
class WireRatio:
    """The bytes that a rank sends for a step, as a mean over all ranks, per byte that it holds.

    The ratio is ``share * numerator / denominator``.
    """

    of_result: bool  # whether it is relative to the bytes held after the step, instead of before it
    numerator: int  # numerator of the ratio for ranks that take part
    denominator: int
    share: float  # fraction of the ranks that take part

    def nbytes(self, before: float, after: float) -> float:
        """The bytes that a rank sends which holds ``before`` bytes before the step and ``after`` bytes after it."""
        return self.share * ((after if self.of_result else before) * self.numerator / self.denominator)


def wire_ratio(step: Step, before: Flow, topology: Topology) -> WireRatio:
    """The ratio of the bytes that ``step`` sends; zero for encode and decode.

    With ``N`` ranks, an all-reduce sends ``2 (N - 1) / N`` of its buffer per rank, as around a ring. An all-gather
    sends a payload to every other rank. Exchanges of ``N`` chunks or shards send all but the own one, and collectives
    with a root all but the root's own. Ranks whose data is at a root send nothing.

    Args:
        topology: topology of the ranks.
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
    """Bytes that a rank sends for ``step``, as a mean over all ranks (see :func:`wire_ratio`).

    Args:
        step: the step.
        before: the data before it, on a rank that has some.
        after: the data after it, likewise.
        topology: topology of the ranks.
    """
    return wire_ratio(step, before.flow, topology).nbytes(before.nbytes, after.nbytes)


def unit_sent_nbytes(
    program: Program, numel: int, dtype: torch.dtype, compressor: Compressor, topology: Topology, span: Span = MEAN
) -> float:
    """Bytes that a rank sends for a unit, as a mean over all ranks; the arguments are those of :func:`sizes_of`.

    Raises:
        ProgramError: as for :func:`sizes_of`.
    """
    if topology.world_size == 1:
        return 0.0
    data = sizes_of(program, numel, dtype, compressor, topology, span)
    return sum(
        sent_nbytes(step, before, after, topology) for step, before, after in zip(program, data, data[1:], strict=False)
    )


def sent_content(step: Step, before: Layout, after: Layout, topology: Topology) -> tuple[Content, float]:
    """The content that a rank sends for ``step``, and how many times, as a mean over all ranks.

    Args:
        topology: topology of the ranks.
    """
    ratio = wire_ratio(step, before.flow, topology)
    return (after if ratio.of_result else before).content, ratio.share * ratio.numerator / ratio.denominator


def plain_sent_nbytes(nbytes: int, world_size: int, span: Span) -> float:
    """Bytes that each rank sends of gradients of ``nbytes`` bytes if nothing is compressed: in a ring all-reduce, or
    half of that if the mean ends in shards."""
    return (2 if span == MEAN else 1) * nbytes * (world_size - 1) / world_size


def allreduce_sent_nbytes(nbytes: int, world_size: int) -> float:
    """Bytes that each rank sends in a ring all-reduce of ``nbytes`` bytes."""
    return 2 * nbytes * (world_size - 1) / world_size
