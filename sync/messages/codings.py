"""Codings of an encoded message: its encodings and decodings, bound to buffers, residuals and seeds."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gckernels.batch import bind_decodes, bind_encodes, bind_recodes
from gckernels.compressor import Decoding, Encoding, Recoding

from ..programs.residuals import encoder_of
from ..programs.stages import StageSpec
from ..programs.steps import AllReduce, Place
from ..resources.feedback import Feedback
from .buffers import Buffers, Payloads, Raw
from .message import Unit, Work, one_shot, regardless, unit_seed


class Codings:
    """Binds the encodings and decodings of a message.

    Args:
        buffers: of the message.
        feedback: where the residuals are kept.
        seed: of the stochastic compressors.
        keep_unused: a unit whose gradient is all zero takes nothing out of its residual.
    """

    def __init__(self, buffers: Buffers, feedback: Feedback, seed: int, keep_unused: bool) -> None:
        self._buffers, self._feedback = buffers, feedback
        self._seed, self._keep_unused = seed, keep_unused

    def encode(self, spec: StageSpec, held: Raw) -> tuple[Work, Payloads]:
        """Encode the pieces of all units, each in as many chunks as its program wants."""
        buffers, kind = self._buffers, kind_of(spec)
        following, scale = buffers.program[spec.stop], 1.0
        if isinstance(following, AllReduce):  # scaled before they are added, so that 16-bit sums stay in range
            scale /= buffers.topology.size(following.level)
        payloads = buffers.payloads(spec.stop, held.place)
        own = buffers.unit_payloads(payloads.buffer, spec.stop)
        encodings = []
        for unit, piece, payload, data in zip(buffers.units, held.pieces, own, buffers.at(spec.stop), strict=True):
            kept = self.residual(kind, unit, piece.numel(), held.place)
            seed = self.seed(kind, unit, spec.stop)
            encodings.append((Encoding(one_shot(unit, kind), piece, kept, payload[0], seed, data.size), piece))
        return self.bind_encodes(encodings, scale), payloads

    def decode(self, spec: StageSpec, held: Payloads) -> tuple[Work, Raw]:
        """Decode and merge the payloads of all units."""
        buffers = self._buffers
        target = buffers.target(spec.stop, held.place)
        sources = buffers.unit_payloads(held.buffer, spec.first)
        decodings = [
            Decoding(one_shot(unit), payloads, piece, data.size)
            for unit, payloads, piece, data in zip(
                buffers.units, sources, target.pieces, buffers.at(spec.first), strict=True
            )
        ]
        return regardless(bind_decodes(decodings, held.factor)), target

    def recode(self, spec: StageSpec, held: Payloads) -> tuple[Work, Payloads]:
        """Decode, merge and encode again, in one call."""
        buffers, kind = self._buffers, kind_of(spec)
        payloads = buffers.payloads(spec.stop, held.place)
        own = buffers.unit_payloads(payloads.buffer, spec.stop)
        sources = buffers.unit_payloads(held.buffer, spec.first)
        recodings = []
        for unit, source, payload, data in zip(buffers.units, sources, own, buffers.at(spec.stop), strict=True):
            numel = buffers.length(unit, spec.stop)
            kept, seed = self.residual(kind, unit, numel, held.place), self.seed(kind, unit, spec.stop)
            recodings.append(Recoding(one_shot(unit), source[:, 0], kept, payload[0, 0], numel, seed, data.size))
        return bind_recodes(recodings, held.factor), payloads

    def residual(self, kind: str, unit: Unit, numel: int, place: Place) -> torch.Tensor | None:
        """The residual of an encoding at ``place`` of ``numel`` elements of the unit, all states of its compressor;
        ``None`` for an encoding that keeps none."""
        if not unit.plan.has_residual(kind):
            return None
        return self._feedback.residual(kind, unit.plan.key, unit.plan.encoder(kind).traits.states * numel, place)

    def seed(self, kind: str, unit: Unit, index: int, *names: object) -> int:
        """A distinct seed for every unit, rank and encoding of what a rank has before step ``index``.

        Ranks that encode the same data share one, and so do all ranks for payloads that add up, which have to mean the
        same.
        """
        flow = self._buffers.flow(index)
        rank = encoder_of(flow, self._buffers.topology, self._buffers.rank)
        sharer = "all" if unit.plan.compressor.traits.summable else rank
        return unit_seed(self._seed, kind, sharer, unit.plan.key, *names)

    def bind_encodes(self, encodings: Sequence[tuple[Encoding, torch.Tensor]], scale: float = 1.0) -> Work:
        """Encode all units; the tensor beside an encoding tells whether its unit is used on this rank."""
        if not self._keep_unused:
            return bind_encodes([encoding for encoding, _ in encodings], scale)
        holding, together = [], []
        for encoding, own in encodings:
            if encoding.residual is None:
                together.append(encoding)
            else:
                holding.append((bind_encodes([encoding], scale), own, encoding.residual))
        encode = bind_encodes(together, scale)

        def work(offset: int) -> None:
            encode(offset)
            for encode_one, own, kept in holding:
                held = hold_unused(own, kept)
                encode_one(offset)
                kept.add_(held)

        return work


def kind_of(spec: StageSpec) -> str:
    """The kind of the residual of a stage that encodes."""
    assert spec.encoding is not None
    return spec.encoding


def hold_unused(source: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Take the residual out of ``kept`` if ``source`` is all zero (decided on the device, never by the host)."""
    used = source.any()
    held = kept * used.logical_not()
    kept.mul_(used)
    return held
