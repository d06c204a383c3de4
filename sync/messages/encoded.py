"""Messages whose units are encoded: the stages of a program, bound to buffers.

:class:`EncodedMessage` binds the stages once, when it is built. Every stage takes a buffer into which it writes,
with the size that :func:`~gckernels.sync.programs.sizes.sizes_of` returns.
``examples/two_phases.py`` shows the stages of the program ``alltoall`` once, step by step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import assert_never

import torch

from ..communication.communicators import Communicators
from ..programs.stages import MessageKind, StageKind, StageSpec, stages_of
from ..programs.steps import Collective, ReduceScatter
from ..resources.feedback import Feedback
from ..resources.memory_spaces import Allocate
from ..resources.stage import Issue
from ..resources.workers import Work
from .buffers import Buffers, Held, Raw, Staged, Travelling, as_payloads, cut, join
from .codings import Codings
from .collectives import New, bind_collective
from .message import Message, Unit, compressor_names
from .seeds import Seeds


class EncodedMessage(Message):
    """Units that go through a program together.

    Args:
        units: units with the same program, dtype and root, and the same payload dtype if payloads are added.
        communicators: the process groups of this rank.
        feedback: the residuals.
        seeds: the seeds of the stochastic compressors.
        channel: channel of the communicators.
        allocate: as for :class:`~.buffers.Buffers`.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        communicators: Communicators,
        feedback: Feedback,
        seeds: Seeds,
        channel: int = 0,
        allocate: Allocate | None = None,
    ) -> None:
        self.keys, self.compressors = tuple(unit.plan.key for unit in units), compressor_names(units)
        self.channel = channel
        self._communicators = communicators
        self._buffers = Buffers(units, communicators, allocate)
        self._codings = Codings(self._buffers, feedback, seeds)
        apart, topology = communicators.places.apart, communicators.topology
        specs = stages_of(MessageKind.ENCODED, self._buffers.program, self._buffers.capabilities, topology, apart)
        self.sent_nbytes = sum(self._buffers.sent_nbytes(spec) for spec in specs)
        stages = []
        held: Held = self._buffers.gradients()
        for spec in specs:
            if self._buffers.takes_part(spec):
                if spec.kind == StageKind.COLLECTIVE:
                    issue, held = self._communicate(spec, held)
                    stages.append(self._buffers.collective(spec, issue))
                else:
                    work, held = self._bind(spec, held)
                    stages.append(self._buffers.stage(spec, work))
        self.stages = stages

    def _bind(self, spec: StageSpec, held: Held) -> tuple[Work, Held]:
        """The work of a stage, and the data that a rank holds after it."""
        buffers, codings = self._buffers, self._codings
        match spec.kind:
            case StageKind.ENCODE:
                return codings.encode(spec, buffers.pieces(held, spec.first))
            case StageKind.DECODE:
                return codings.decode(spec, as_payloads(held))
            case StageKind.RECODE:
                return codings.recode(spec, as_payloads(held))
            case StageKind.ENCODE_SHARD | StageKind.ADD:
                from . import ring

                bound: tuple[Work, Held] = ring.bind(buffers, codings, spec, held)
                return bound
            case StageKind.CUT:
                return self._cut(spec, buffers.pieces(held, spec.first))
            case StageKind.JOIN:
                assert isinstance(held, Staged)
                return self._join(spec, held)
            case StageKind.COPY:
                return self._copy(spec, held)
            case StageKind.AVERAGE | StageKind.COLLECTIVE | StageKind.PROJECT | StageKind.RECONSTRUCT:
                raise AssertionError(f"no computing or copying of an encoded message: {spec}")
            case _:
                assert_never(spec.kind)

    # ---------------------------------------------------------------- raw data and copies

    def _cut(self, spec: StageSpec, held: Raw) -> tuple[Work, Staged]:
        """The work that copies this rank's share of the mean into the rows to send; and these.

        There is one row, or one for each rank in a reduce-scatter.
        """
        step = self._buffers.program[spec.first]
        assert isinstance(step, Collective)
        ranks = self._buffers.topology.size(step.level)
        sizes = [data.numel for data in self._buffers.data(spec.stop)]
        shape = ranks if isinstance(step, ReduceScatter) else 1, sum(sizes)
        rows = self._buffers.allocate(shape, held.pieces[0].dtype, held.place)
        rooms = torch.split(rows, sizes, dim=1)

        def work() -> None:
            for piece, room in zip(held.pieces, rooms, strict=True):
                cut(piece, room, 1.0 / ranks)

        return work, Staged(rows)

    def _join(self, spec: StageSpec, held: Staged) -> tuple[Work, Raw]:
        """The work that copies the received rows, whole or as shards of all ranks, to their target; and that."""
        target = self._buffers.target(spec.stop)
        shards = torch.split(held.rows, [data.numel for data in self._buffers.data(spec.first)], dim=1)

        def work() -> None:
            for piece, each in zip(target.pieces, shards, strict=True):
                join(each, piece)

        return work, target

    def _copy(self, spec: StageSpec, held: Held) -> tuple[Work, Held]:
        there, sources, targets = self._buffers.copy_to(held, spec.first, spec.place)

        def work() -> None:
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source, non_blocking=True)

        return work, there

    # ---------------------------------------------------------------- collectives

    def _communicate(self, spec: StageSpec, held: Held) -> tuple[Issue, Held]:
        """The function that issues a collective, and the received data. A rank that only receives gets a new buffer."""
        buffers, step = self._buffers, self._buffers.program[spec.first]
        assert isinstance(step, Collective)
        link = self._communicators.link(spec.phase, step.level, self.channel, spec.place)
        root = buffers.topology.index(step.level, buffers.root)
        has_part = buffers.has_part(spec.first)

        def like(sent: torch.Tensor) -> New:
            return lambda shape: buffers.allocate(shape, sent.dtype, spec.place)

        closes = len(buffers.flow(spec.stop).opened) < len(buffers.flow(spec.first).opened)
        if buffers.flow(spec.first).encoded:
            payloads = as_payloads(held) if has_part else buffers.payloads(spec.first, spec.place)
            dtype = buffers.units[0].plan.compressor.traits.payload_dtype
            received, issue = bind_collective(step, payloads.buffer, link, root, closes, dtype, like(payloads.buffer))
            if isinstance(payloads, Travelling):
                return issue, replace(payloads, received=received)
            return issue, replace(payloads, buffer=received)
        rows = buffers.rows(held if has_part else buffers.raw(spec.first))
        received, issue = bind_collective(step, rows[None], link, root, closes, rows.dtype, like(rows))
        return issue, Staged(received[0])
