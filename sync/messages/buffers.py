"""Buffers of an encoded message: where its units lie between two stages, raw or encoded.

Payloads of several units travel side by side in one buffer, ``uint8 [sources, chunks, nbytes]``; raw data travels in
one vector, in which every unit is laid out for a full shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from ..programs.layouts import Capabilities, Layout, propagate
from ..programs.residuals import has_part, piece_bounds
from ..programs.rules import Flow
from ..programs.sizes import Data, sent_nbytes, sizes_of
from ..programs.stages import StageSpec, takes_part
from ..programs.steps import Place, Program
from ..resources.communicators import Communicators
from .message import Stage, Unit, Work


@dataclass(frozen=True)
class Raw:
    """Numbers. Of every unit the piece that this rank has, contiguous. Where that is not the gradient itself, all
    pieces lie in ``vector``, each laid out for a full shard."""

    pieces: list[torch.Tensor]
    vector: torch.Tensor | None = None
    place: Place = Place.DEVICE


@dataclass(frozen=True)
class Staged:
    """Raw data on its way: a vector ``[numel]``, or ``[ranks, numel]`` where shards lie side by side."""

    vector: torch.Tensor


@dataclass(frozen=True)
class Payloads:
    """``uint8 [sources, chunks, nbytes]`` with a column for every unit. ``summed``: of how many ranks each payload is
    a sum that has not been divided."""

    buffer: torch.Tensor
    summed: int = 1
    place: Place = Place.DEVICE

    @property
    def factor(self) -> float:
        """The factor that makes a mean of the sum of all payloads."""
        return 1.0 / (self.buffer.shape[0] * self.summed)


@dataclass(frozen=True)
class Travelling(Payloads):
    """The payload of a shard on its way around a ring: ``received`` beside it, the pieces of this rank that are added
    on the way, and room for the sum of one shard of each unit."""

    pieces: list[torch.Tensor] = field(default_factory=list)
    totals: list[torch.Tensor] = field(default_factory=list)
    received: torch.Tensor | None = None


Held = Raw | Staged | Payloads
"""What a rank has of a message between two stages."""


class Buffers:
    """The units of a message on this rank, their sizes, and new buffers for them.

    Args:
        program: of all units.
        units: of one dtype and root.
        communicators: of the ranks.

    Attributes:
        program, units, topology, places, rank: of the message and of this rank.
        root: the rank that is the root.
        capabilities: of the compressor of the first unit.
    """

    def __init__(self, program: Program, units: Sequence[Unit], communicators: Communicators) -> None:
        self.program, self.units = program, tuple(units)
        self.places, self.topology, self.rank = communicators.places, communicators.topology, communicators.rank
        self.root = units[0].plan.root
        self.capabilities = Capabilities.of(units[0].plan.compressor)
        self._layouts: tuple[Layout, ...] = propagate(program, self.capabilities, self.topology)
        self._states = tuple(
            sizes_of(program, unit.grad.numel(), unit.grad.dtype, unit.plan.compressor, self.topology)
            for unit in self.units
        )

    def at(self, index: int) -> list[Data]:
        """What every unit is before step ``index``."""
        return [states[index] for states in self._states]

    def flow(self, index: int) -> Flow:
        """Where all units are before step ``index``."""
        return self._layouts[index].flow

    def has_part(self, index: int) -> bool:
        """Whether this rank has any data before step ``index``."""
        return has_part(self.flow(index), self.topology, self.rank, self.root)

    def takes_part(self, spec: StageSpec) -> bool:
        """Whether this rank has the stage."""
        return takes_part(spec, self.program, self._layouts, self.topology, self.rank, self.root)

    def sent_nbytes(self, spec: StageSpec) -> float:
        """Bytes that a rank sends in a stage, as a mean over all ranks."""
        if spec.level is None:
            return 0.0
        step = self.program[spec.first]
        pairs = zip(self.at(spec.first), self.at(spec.stop), strict=True)
        return sum(sent_nbytes(step, before, after, self.topology) for before, after in pairs)

    def stage(self, spec: StageSpec, work: Work) -> Stage:
        """``work`` as the stage, with its sizes."""
        before, after = self.at(spec.first), self.at(spec.stop)
        elements = sum(data.numel for data in (before if self.has_part(spec.first) else after))
        read, written = (sum(data.nbytes for data in each) for each in (before, after))
        return Stage(spec, work, self.sent_nbytes(spec), elements, read, written)

    def length(self, unit: Unit, index: int) -> int:
        """Elements of a unit that this rank has before step ``index``."""
        start, stop = piece_bounds(self.program, unit.grad.numel(), self.flow(index), self.topology, self.rank)
        return stop - start

    # ---------------------------------------------------------------- raw data

    def gradients(self) -> Raw:
        """The units where they lie."""
        return Raw([unit.grad for unit in self.units])

    def raw(self, index: int, vector: torch.Tensor | None = None, place: Place = Place.DEVICE) -> Raw:
        """The pieces that this rank has before step ``index``, in ``vector``, by default a new one at ``place``."""
        data = self.at(index)
        if vector is None:
            vector = self.places.zeros([sum(each.numel for each in data)], data[0].dtype, place)
        pieces = [
            vector[column][: self.length(unit, index)]
            for unit, column in zip(self.units, columns([each.numel for each in data]), strict=True)
        ]
        return Raw(pieces, vector, place)

    def target(self, index: int, place: Place = Place.DEVICE) -> Raw:
        """Where raw data goes that a rank has before step ``index``: into the gradients if it is all of it, into a new
        vector if it is a part, or lies elsewhere."""
        if self.flow(index).opened or place == Place.HOST:
            return self.raw(index, place=place)
        return self.gradients()

    def pieces(self, held: Held, index: int) -> Raw:
        """Raw data that a rank holds before step ``index``, as pieces."""
        return self.raw(index, held.vector) if isinstance(held, Staged) else as_raw(held)

    # ---------------------------------------------------------------- payloads

    def payloads(self, index: int, place: Place) -> Payloads:
        """A new buffer at ``place`` for the payloads that a rank has before step ``index``."""
        data = self.at(index)
        nbytes = sum(each.nbytes // (each.sources * each.chunks) for each in data)
        shape = (data[0].sources, data[0].chunks, nbytes)
        return Payloads(self.places.zeros(shape, torch.uint8, place), place=place)

    def unit_payloads(self, buffer: torch.Tensor, index: int) -> list[torch.Tensor]:
        """Each unit's payloads in the buffer that a rank has before step ``index``, ``[sources, chunks, nbytes]``."""
        sizes = [data.nbytes // (data.sources * data.chunks) for data in self.at(index)]
        return [buffer[..., column] for column in columns(sizes)]

    # ---------------------------------------------------------------- from place to place

    def elsewhere(self, held: Held, index: int, place: Place) -> tuple[Held, list[torch.Tensor], list[torch.Tensor]]:
        """New buffers at ``place`` for what a rank holds before step ``index``, and the tensors to copy: from where,
        and to where."""
        if isinstance(held, Payloads):
            buffer = self.places.zeros(held.buffer.shape, torch.uint8, place)
            return replace(held, buffer=buffer, place=place), [held.buffer], [buffer]
        held = self.pieces(held, index)
        there = self.target(index, place)
        if held.vector is not None and there.vector is not None:
            return there, [held.vector], [there.vector]
        return there, held.pieces, there.pieces


def as_raw(held: Held) -> Raw:
    """Raw pieces: the stages of a valid program find no payloads here."""
    assert isinstance(held, Raw)
    return held


def as_payloads(held: Held) -> Payloads:
    """Payloads: the stages of a valid program find no raw data here."""
    assert isinstance(held, Payloads)
    return held


# -------------------------------------------------------------------- units in vectors


def columns(sizes: Sequence[int]) -> list[slice]:
    """The slices in which units of these sizes lie, one after the other."""
    slices, first = [], 0
    for size in sizes:
        slices.append(slice(first, first + size))
        first += size
    return slices


def cut(source: torch.Tensor, shards: torch.Tensor, factor: float) -> None:
    """Write ``factor * source`` into ``shards [ranks, numel]``, one after the other, as far as it goes."""
    size = shards.shape[1]
    full = source.numel() // size if size else 0
    torch.mul(source[: full * size].view(full, size), factor, out=shards[:full])
    if (rest := source[full * size :]).numel():
        torch.mul(rest, factor, out=shards[full, : rest.numel()])


def join(shards: torch.Tensor, target: torch.Tensor) -> None:
    """Write the ``shards [ranks, numel]`` into ``target``, one after the other, as far as it goes."""
    size = shards.shape[1]
    full = target.numel() // size if size else 0
    target[: full * size].view(full, size).copy_(shards[:full])
    if (rest := target[full * size :]).numel():
        rest.copy_(shards[full, : rest.numel()])
