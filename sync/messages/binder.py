"""What the parts of an encoded message share while it is built: its units, their sizes, buffers, residuals, seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from gckernels.batch import bind_decodes, bind_encodes
from gckernels.compressor import Decoding, Encoding

from ..programs.residuals import encoder_of, has_part, piece_bounds
from ..programs.rules import Flow, needed_at
from ..programs.sizes import Data, sent_nbytes, sizes_of
from ..programs.steps import Collective, Level, Place, Program, describe
from ..resources.communicators import Communicators
from ..resources.feedback import Feedback
from ..resources.lanes import Resource
from .collectives import Call, columns
from .message import Stage, Unit, Work, hold_unused, step_seed, unit_seed


@dataclass(frozen=True)
class Raw:
    """Numbers: of every unit the piece that this rank has, contiguous. Where that is not the gradient itself, all lie
    in ``vector``, each laid out for a full shard."""

    pieces: list[torch.Tensor]
    vector: torch.Tensor | None = None
    place: Place = Place.DEVICE


@dataclass(frozen=True)
class Payloads:
    """``uint8 [sources, chunks, nbytes]`` with a column for every unit. ``summed``: of how many ranks each payload is
    a sum that has not been divided."""

    buffer: torch.Tensor
    summed: int = 1
    place: Place = Place.DEVICE

    @property
    def factor(self) -> float:
        """What makes a mean of the sum of all that is held."""
        return 1.0 / (self.buffer.shape[0] * self.summed)


Held = Raw | Payloads | None
"""What a rank has of a message; None where another rank, a root, has it."""


class Binder:
    """The arguments of a message (see :class:`~.encoded.EncodedMessage`), and the stages so far."""

    def __init__(
        self,
        program: Program,
        units: Sequence[Unit],
        communicators: Communicators,
        feedback: Feedback,
        seed: int,
        keep_unused: bool,
        channel: int,
    ) -> None:
        self.program, self.units = program, tuple(units)
        self.places, self.topology = communicators.places, communicators.topology
        self.rank = communicators.rank
        self.keep_unused = keep_unused
        self.root = units[0].plan.root
        self.states = tuple(
            sizes_of(program, unit.grad.numel(), unit.grad.dtype, unit.plan.compressor, self.topology)
            for unit in self.units
        )
        self.stages: list[Stage] = []
        self.phase = 0
        self._communicators, self._channel = communicators, channel
        self._feedback, self._seed = feedback, seed

    def place(self, index: int) -> Place:
        """Where step ``index``, or what comes after the last one, needs its data."""
        following = self.program[index] if index < len(self.program) else None
        return self.places.actual(needed_at(self.states[0][index].flow, following))

    def at(self, index: int) -> list[Data]:
        """What every unit is before step ``index``."""
        return [states[index] for states in self.states]

    def has_part(self, flow: Flow) -> bool:
        return has_part(flow, self.topology, self.rank, self.root)

    def length(self, unit: Unit, flow: Flow) -> int:
        """Elements of a unit that this rank has."""
        start, stop = piece_bounds(self.program, unit.grad.numel(), flow, self.topology, self.rank)
        return stop - start

    def group(self, level: Level, place: Place = Place.DEVICE) -> torch.distributed.ProcessGroup:
        """That of a collective of ``level`` in this phase, of what lies at ``place``."""
        return self._communicators.group(self.phase, level, self._channel, place)

    # ---------------------------------------------------------------- stages

    def compute(self, name: str, work: Work, place: Place = Place.DEVICE) -> None:
        resource = Resource.HOST_COMPUTE if place == Place.HOST else Resource.COMPUTE
        self.stages.append(Stage(self.phase, resource, work, name))

    def send(
        self,
        step: Collective,
        before: Sequence[Data],
        after: Sequence[Data],
        call: Call,
        place: Place = Place.DEVICE,
    ) -> None:
        """A collective of what lies at ``place``; what comes after it is of the next phase."""

        def work(step: int) -> None:
            call()

        nbytes = sum(sent_nbytes(step, *data, self.topology) for data in zip(before, after, strict=True))
        resource = Resource.HOST_COMMUNICATE if place == Place.HOST else Resource.COMMUNICATE
        self.stages.append(Stage(self.phase, resource, work, describe((step,)), nbytes))

    def moved(self, held: Held, data: Sequence[Data], place: Place) -> Held:
        """What is ``held`` of ``data`` at ``place``, copied there if it is not."""
        if held is None or held.place == place:
            return held
        if isinstance(held, Payloads):
            buffer = self.places.zeros(held.buffer.shape, torch.uint8, place)
            self._copy([held.buffer], [buffer], place)
            return replace(held, buffer=buffer, place=place)
        there = self.raw(data, place=place) if place == Place.HOST else self.target(data)
        if held.vector is not None and there.vector is not None:
            self._copy([held.vector], [there.vector], place)
        else:
            self._copy(held.pieces, there.pieces, place)
        return there

    def _copy(self, sources: list[torch.Tensor], targets: list[torch.Tensor], place: Place) -> None:
        def work(step: int) -> None:
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source, non_blocking=True)

        resource = Resource.TO_HOST if place == Place.HOST else Resource.TO_DEVICE
        self.stages.append(Stage(self.phase, resource, work, f"Copy({place.value})"))

    # ---------------------------------------------------------------- buffers

    def payloads(self, encoded: Sequence[Data], place: Place) -> tuple[Payloads, list[torch.Tensor]]:
        """A buffer at ``place`` for the payloads of all units, and each unit's in it."""
        first = encoded[0]
        nbytes = sum(data.nbytes // (first.sources * first.chunks) for data in encoded)
        shape = (first.sources, first.chunks, nbytes)
        buffer = self.places.zeros(shape, torch.uint8, place)
        return Payloads(buffer, place=place), self.unit_payloads(buffer, encoded)

    @staticmethod
    def unit_payloads(buffer: torch.Tensor, encoded: Sequence[Data]) -> list[torch.Tensor]:
        """Each unit's payloads in the buffer, ``[sources, chunks, payload_nbytes]``."""
        return [
            buffer[..., column] for column in columns([data.nbytes // (data.sources * data.chunks) for data in encoded])
        ]

    def raw(self, raw: Sequence[Data], vector: torch.Tensor | None = None, place: Place = Place.DEVICE) -> Raw:
        """The pieces of this rank in ``vector``, by default a new one at ``place``."""
        if vector is None:
            vector = self.places.zeros([sum(data.numel for data in raw)], raw[0].dtype, place)
        pieces = [
            vector[column][: self.length(unit, data.flow)]
            for unit, data, column in zip(self.units, raw, columns([data.numel for data in raw]), strict=True)
        ]
        return Raw(pieces, vector, place)

    def target(self, raw: Sequence[Data], place: Place = Place.DEVICE) -> Raw:
        """Where raw data goes: into the gradients when all of it is there, into a vector while it is not, or lies
        elsewhere."""
        return self.raw(raw, place=place) if raw[0].flow.opened or place == Place.HOST else self.gradients()

    def gradients(self) -> Raw:
        return Raw([unit.grad for unit in self.units])

    # ---------------------------------------------------------------- what an encoding takes

    def residual(self, kind: str, unit: Unit, numel: int, place: Place) -> torch.Tensor | None:
        """Of an encoding at ``place`` of ``numel`` elements of the unit, all states of its compressor."""
        if not unit.plan.remembers(kind):
            return None
        return self._feedback.residual(kind, unit.plan.key, unit.plan.encoder(kind).states * numel, place)

    def seed(self, kind: str, unit: Unit, flow: Flow, *what: object) -> int:
        """Of its own for every unit, rank and encoding of what is at ``flow``. Ranks that encode the same have the same
        seed, and so have all ranks for payloads that add up, which have to mean the same."""
        rank = "all" if unit.plan.compressor.summable else encoder_of(flow, self.topology, self.rank)
        return unit_seed(self._seed, kind, rank, unit.plan.key, *what)

    def encode(self, encodings: Sequence[tuple[Encoding, torch.Tensor]], scale: float = 1.0) -> Work:
        """Encode all units; the tensor beside an encoding is what tells whether its unit is used here."""
        holding, together = [], []
        for encoding, own in encodings:
            if encoding.residual is None or not self.keep_unused:
                together.append(encoding)
            else:
                holding.append((bind_encodes([encoding], scale), own, encoding.residual))
        encode = bind_encodes(together, scale)

        def work(step: int) -> None:
            added = step_seed(0, step)
            encode(added)
            for encode_one, own, kept in holding:
                held = hold_unused(own, kept)
                encode_one(added)
                kept.add_(held)

        return work


def decode_all(decodings: Sequence[Decoding], scale: float, accumulate: bool = False) -> Work:
    """Decode all units."""
    decode = bind_decodes(decodings, scale, accumulate)

    def work(step: int) -> None:
        decode()

    return work


def all_of(works: Sequence[Work]) -> Work:
    """One work after the other."""

    def work(step: int) -> None:
        for each in works:
            each(step)

    return work
