"""The buffers of an encoded message, in which its units lie between stages, raw or encoded.

Payloads of all units travel side by side in one buffer, ``uint8 [sources, chunks, nbytes]``. Raw data travels in one
vector, in which every unit has room for a full shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from ..communication.communicators import Communicators
from ..programs.layouts import Capabilities, Layout, propagate
from ..programs.residuals import has_part, piece_bounds
from ..programs.rules import Flow
from ..programs.sizes import Data, sent_nbytes, sizes_of
from ..programs.stages import StageSpec, takes_part
from ..programs.steps import Place
from ..resources.memory_spaces import Allocate
from ..resources.stage import Issue, Stage
from ..resources.workers import Work
from .message import Unit


@dataclass(frozen=True)
class Raw:
    """Raw data of all units."""

    pieces: list[torch.Tensor]  # the piece of each unit that this rank has, contiguous
    vector: torch.Tensor | None = None
    """The vector in which all pieces lie, with room for a full shard each; ``None`` if the pieces are the gradients
    themselves."""
    place: Place = Place.DEVICE  # where they lie


@dataclass(frozen=True)
class Staged:
    """Raw data before or after a collective."""

    rows: torch.Tensor  # [1, numel], or [ranks, numel] for the shards of all ranks


@dataclass(frozen=True)
class Payloads:
    """Payloads of all units."""

    buffer: torch.Tensor  # uint8 [sources, chunks, nbytes]; every unit has a slice of the last dimension
    summed: int = 1  # number of ranks whose sum, not mean, each payload encodes
    place: Place = Place.DEVICE  # where they lie

    @property
    def factor(self) -> float:
        """The factor that turns the sum of the decoded payloads into a mean."""
        return 1.0 / (self.buffer.shape[0] * self.summed)


@dataclass(frozen=True)
class Travelling(Payloads):
    """The payloads of one shard on its way around a ring."""

    pieces: list[torch.Tensor] = field(default_factory=list)
    """This rank's piece of each unit, which is added shard by shard."""
    totals: list[torch.Tensor] = field(default_factory=list)  # room for the sum of a shard of each unit, fp32 [size]
    received: torch.Tensor | None = None  # the payloads from the previous rank, after a hop


Held = Raw | Staged | Payloads
"""The data of a message that a rank holds between two stages."""


class Buffers:
    """The units of a message with their sizes, and a factory for their buffers.

    Args:
        units: units with the same program, dtype and root.
        communicators: the process groups of this rank.
        allocate: makes the buffers; by default each has memory of its own.

    Attributes:
        units, allocate: as given.
        program: the program of all units.
        topology: topology of the ranks.
        places: the memories of this rank.
        rank: this rank.
        root: the rank that is the root of the units.
        capabilities: capabilities of the first unit's compressor.
    """

    def __init__(self, units: Sequence[Unit], communicators: Communicators, allocate: Allocate | None = None) -> None:
        self.allocate = allocate or communicators.places.zeros
        self.units, self.program = tuple(units), units[0].plan.program
        self.places, self.topology, self.rank = communicators.places, communicators.topology, communicators.rank
        self.root = units[0].plan.root
        self.capabilities = Capabilities.of(units[0].plan.compressor)
        self._layouts: tuple[Layout, ...] = propagate(self.program, self.capabilities, self.topology)
        self._states = tuple(
            sizes_of(self.program, unit.grad.numel(), unit.grad.dtype, unit.plan.compressor, self.topology)
            for unit in self.units
        )

    def data(self, index: int) -> list[Data]:
        """The sizes of every unit before step ``index``."""
        return [states[index] for states in self._states]

    def flow(self, index: int) -> Flow:
        """The flow of all units before step ``index``."""
        return self._layouts[index].flow

    def has_part(self, index: int) -> bool:
        """Whether this rank has any data before step ``index``."""
        return has_part(self.flow(index), self.topology, self.rank, self.root)

    def takes_part(self, spec: StageSpec) -> bool:
        """Whether this rank takes part in a stage."""
        return takes_part(spec, self.program, self._layouts, self.topology, self.rank, self.root)

    def sent_nbytes(self, spec: StageSpec) -> float:
        """Bytes that a rank sends in a stage, as a mean over all ranks."""
        if spec.level is None:
            return 0.0
        step = self.program[spec.first]
        pairs = zip(self.data(spec.first), self.data(spec.stop), strict=True)
        return sum(sent_nbytes(step, before, after, self.topology) for before, after in pairs)

    def stage(self, spec: StageSpec, work: Work) -> Stage:
        """``work`` as the stage, with its sizes."""
        before, after = self.data(spec.first), self.data(spec.stop)
        elements = sum(data.numel for data in (before if self.has_part(spec.first) else after))
        read, written = (sum(data.nbytes for data in each) for each in (before, after))
        return Stage(spec, work, self.sent_nbytes(spec), elements, read, written)

    def collective(self, spec: StageSpec, issue: Issue) -> Stage:
        """The stage of a collective, with its sizes."""
        return replace(self.stage(spec, lambda: issue()()), issue=issue)

    def length(self, unit: Unit, index: int) -> int:
        """Number of elements of a unit that this rank has before step ``index``."""
        start, stop = piece_bounds(self.program, unit.grad.numel(), self.flow(index), self.topology, self.rank)
        return stop - start

    # ---------------------------------------------------------------- raw data

    def gradients(self) -> Raw:
        """The gradients of the units, where they lie."""
        return Raw([unit.grad for unit in self.units])

    def raw(self, index: int, vector: torch.Tensor | None = None, place: Place = Place.DEVICE) -> Raw:
        """Pieces for the raw data before step ``index``, in ``vector`` or in a new vector at ``place``."""
        data = self.data(index)
        if vector is None:
            vector = self.allocate([sum(each.numel for each in data)], data[0].dtype, place)
        rooms = torch.split(vector, [each.numel for each in data])
        pieces = [room[: self.length(unit, index)] for unit, room in zip(self.units, rooms, strict=True)]
        return Raw(pieces, vector, place)

    def target(self, index: int, place: Place = Place.DEVICE) -> Raw:
        """The target for raw data before step ``index``.

        The gradients if the data is whole units on the device, otherwise a new vector at ``place``.
        """
        if self.flow(index).opened or place == Place.HOST:
            return self.raw(index, place=place)
        return self.gradients()

    def pieces(self, held: Held, index: int) -> Raw:
        """The raw data ``held`` before step ``index``, as pieces."""
        if isinstance(held, Staged):
            return self.raw(index, held.rows[0])
        assert isinstance(held, Raw)
        return held

    def rows(self, held: Held) -> torch.Tensor:
        """The raw data ``held``, which are no gradients, ``[1, numel]`` or ``[ranks, numel]``."""
        if isinstance(held, Staged):
            return held.rows
        assert isinstance(held, Raw) and held.vector is not None
        return held.vector[None]

    # ---------------------------------------------------------------- payloads

    def payloads(self, index: int, place: Place) -> Payloads:
        """A new buffer at ``place`` for the payloads before step ``index``."""
        data = self.data(index)
        nbytes = sum(each.nbytes // (each.sources * each.chunks) for each in data)
        shape = (data[0].sources, data[0].chunks, nbytes)
        return Payloads(self.allocate(shape, torch.uint8, place), place=place)

    def unit_payloads(self, buffer: torch.Tensor, index: int) -> Sequence[torch.Tensor]:
        """The payloads of each unit, ``[sources, chunks, nbytes]``, in a buffer of those before step ``index``."""
        sizes = [data.nbytes // (data.sources * data.chunks) for data in self.data(index)]
        return torch.split(buffer, sizes, dim=-1)

    # ---------------------------------------------------------------- copies between places

    def copy_to(self, held: Held, index: int, place: Place) -> tuple[Held, list[torch.Tensor], list[torch.Tensor]]:
        """New buffers at ``place`` for ``held``, the data before step ``index``, and the copies that fill them.

        Returns:
            The new data, the tensors to copy from, and the tensors to copy to.
        """
        if isinstance(held, Payloads):
            buffer = self.allocate(held.buffer.shape, torch.uint8, place)
            return replace(held, buffer=buffer, place=place), [held.buffer], [buffer]
        held = self.pieces(held, index)
        there = self.target(index, place)
        if held.vector is not None and there.vector is not None:
            return there, [held.vector], [there.vector]
        return there, held.pieces, there.pieces


def as_payloads(held: Held) -> Payloads:
    """``held``, which is payloads if the program is valid."""
    assert isinstance(held, Payloads)
    return held


# -------------------------------------------------------------------- units in vectors


def cut(source: torch.Tensor, shards: torch.Tensor, factor: float) -> None:
    """Write ``factor * source`` into the rows of ``shards [ranks, numel]``, one after the other."""
    size = shards.shape[1]
    full = source.numel() // size if size else 0
    torch.mul(source[: full * size].view(full, size), factor, out=shards[:full])
    if (rest := source[full * size :]).numel():
        torch.mul(rest, factor, out=shards[full, : rest.numel()])


def join(shards: torch.Tensor, target: torch.Tensor) -> None:
    """Write the rows of ``shards [ranks, numel]`` one after the other into ``target``, until that is full."""
    size = shards.shape[1]
    full = target.numel() // size if size else 0
    target[: full * size].view(full, size).copy_(shards[:full])
    if (rest := target[full * size :]).numel():
        rest.copy_(shards[full, : rest.numel()])
