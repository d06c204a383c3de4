"""The encodings and decodings of an encoded message, bound to buffers, residuals and seeds."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gckernels.batch import bind_decodes, bind_encodes, bind_recodes
from gckernels.codec import Decoding, Encoding, Recoding

from ..programs.residuals import encoder_of
from ..programs.stages import StageSpec
from ..programs.steps import AllReduce, Place
from ..resources.error_probe import Decoded, Encoded, ProbedPiece, ProbeSchedule
from ..resources.feedback import Feedback
from ..resources.residual import EncodedForm, Residual
from ..resources.workers import Work
from .buffers import Buffers, Payloads, Raw
from .message import Unit, compressor_of
from .seeds import Seeds


class Codings:
    """Binds the encodings and decodings of a message.

    Args:
        buffers: the buffers of the message.
        feedback: the residuals.
        seeds: the seeds of the stochastic compressors.
    """

    def __init__(self, buffers: Buffers, feedback: Feedback, seeds: Seeds) -> None:
        self._buffers, self._feedback, self._seeds = buffers, feedback, seeds

    def encode(self, spec: StageSpec, held: Raw) -> tuple[Work, Payloads]:
        """The work that encodes the pieces of all units, in chunks if the program exchanges these; and the payloads."""
        buffers, kind = self._buffers, kind_of(spec)
        following, scale = buffers.program[spec.stop], 1.0
        if isinstance(following, AllReduce):  # scaled before the addition, so that 16-bit sums stay in range
            scale /= buffers.topology.size(following.level)
        payloads = buffers.payloads(spec.stop, held.place)
        own = buffers.unit_payloads(payloads.buffer, spec.stop)
        encodings: list[Encoding] = []
        kept: list[Residual | None] = []
        for unit, piece, payload, data in zip(buffers.units, held.pieces, own, buffers.data(spec.stop), strict=True):
            kept.append(self.residual(kind, unit, piece.numel(), held.place, EncodedForm(payload.shape[1], data.size)))
            seed, method = self.seed(kind, unit, spec.stop), compressor_of(unit, kind)
            encodings.append(Encoding(method, piece, tensor_of(kept[-1]), payload[0], seed, data.size))
        return self.bind_encodes(spec, encodings, kept, scale), payloads

    def decode(self, spec: StageSpec, held: Payloads) -> tuple[Work, Raw]:
        """The work that decodes and merges the payloads of all units; and its result."""
        buffers = self._buffers
        target = buffers.target(spec.stop, held.place)
        sources = buffers.unit_payloads(held.buffer, spec.first)
        decodings = [
            Decoding(compressor_of(unit), payloads, piece, data.size)
            for unit, payloads, piece, data in zip(
                buffers.units, sources, target.pieces, buffers.data(spec.first), strict=True
            )
        ]
        return bind_decodes(decodings, held.factor), target

    def recode(self, spec: StageSpec, held: Payloads) -> tuple[Work, Payloads]:
        """The work that decodes, merges and encodes all units in one call; and the new payloads."""
        buffers, kind = self._buffers, kind_of(spec)
        payloads = buffers.payloads(spec.stop, held.place)
        own = buffers.unit_payloads(payloads.buffer, spec.stop)
        sources = buffers.unit_payloads(held.buffer, spec.first)
        recodings: list[Recoding] = []
        residuals: list[Residual | None] = []
        for unit, source, payload, data in zip(buffers.units, sources, own, buffers.data(spec.stop), strict=True):
            numel = buffers.length(unit, spec.stop)
            residuals.append(self.residual(kind, unit, numel, held.place, EncodedForm(1, data.size)))
            arguments = source[:, 0], tensor_of(residuals[-1]), payload[0, 0], numel, self.seed(kind, unit, spec.stop)
            recodings.append(Recoding(compressor_of(unit), *arguments, data.size))
        work = bind_recodes(recodings, held.factor, self._seeds.added(spec.place))
        return self._sparing(spec, residuals, work), payloads

    def residual(self, kind: str, unit: Unit, numel: int, place: Place, form: EncodedForm) -> Residual | None:
        """The residual of an encoding, of ``states * numel`` values; ``None`` if it keeps none.

        Args:
            kind: kind of the residual.
            unit: the encoded unit.
            numel: number of encoded elements.
            place: place of the encoding.
            form: the form in 8 bits for the payloads that it writes.
        """
        if not unit.plan.has_residual(kind):
            return None
        method = compressor_of(unit, kind)
        encoded = form if method.encodes_residuals else None
        return self._feedback.residual(kind, unit.plan.key, method.traits.states * numel, place, encoded)

    def seed(self, kind: str, unit: Unit, index: int, *names: object) -> int:
        """A distinct seed for every unit, rank and encoding.

        Ranks that encode the same data share a seed. For summable payloads all ranks share one, because the numbers in
        their payloads must belong to the same elements.

        Args:
            kind: kind of the encoding's residual.
            unit: the encoded unit.
            index: step after which the payloads exist.
            names: further distinctions, such as the number of a shard.
        """
        flow = self._buffers.flow(index)
        rank = encoder_of(flow, self._buffers.topology, self._buffers.rank)
        sharer = "all" if unit.plan.compressor.traits.summable else rank
        return self._seeds.of(kind, sharer, unit.plan.key, *names)

    def bind_encodes(
        self, spec: StageSpec, encodings: Sequence[Encoding], residuals: Sequence[Residual | None], scale: float = 1.0
    ) -> Work:
        """The work that encodes all units, times ``scale``.

        Args:
            encodings: an encoding for every unit.
            residuals: the residual of each encoding.
            scale: factor of the payloads.
        """
        kind = kind_of(spec)
        encode = bind_encodes(encodings, scale, self._seeds.added(spec.place))
        work = self._sparing(spec, residuals, encode)
        keys = [unit.plan.key for unit in self._buffers.units]
        return watched(self._feedback.watch, keys, encodings, residuals, work, scale) if kind == "worker" else work

    def _sparing(self, spec: StageSpec, residuals: Sequence[Residual | None], encode: Work) -> Work:
        """``encode`` as work that does not send the residuals of units that this rank has not used.

        The gradient of such a unit is zero, or an old one, of which nothing may be lost. So it is encoded by itself,
        and its error is added to the residual. A residual of data of several ranks is sent in any case, because one of
        them may have used the unit.

        Args:
            residuals: the residual of every unit, or a part of it.
        """
        unused, units = self._feedback.unused, self._buffers.units
        pairs = zip(units, residuals, strict=True)
        kept = {unit.plan.key: residual for unit, residual in pairs if residual is not None}
        if not kept:
            return encode
        is_own, tensors = not self._buffers.flow(spec.first).merged, [(key, each.tensor) for key, each in kept.items()]

        def work() -> None:
            copies = unused.keep(tensors)
            spared = copies if is_own else {}
            for key in spared:
                kept[key].zero()
            encode()
            for key, copy in spared.items():
                kept[key].add(kept[key].with_tensor(copy))

        return work


def tensor_of(residual: Residual | None) -> torch.Tensor | None:
    """The tensor of a residual, if there is one."""
    return None if residual is None else residual.tensor


def _watchable(key: str, encoding: Encoding, residual: Residual | None, scale: float) -> Encoded | None:
    """The piece that an encoding encodes, times ``scale``; ``None`` if it has no error."""
    traits = encoding.compressor.traits
    if not traits.averages:
        return None
    if residual is not None and traits.conserves and traits.states == 1:
        return ProbedPiece(key, encoding.grad, residual)

    def decode(decoded: torch.Tensor) -> None:
        bind_decodes([Decoding(encoding.compressor, encoding.payload[None], decoded, encoding.size)], 1.0 / scale)()

    return Decoded(key, encoding.grad, decode, encoding.residual, encoding.compressor.accumulate)


def watched(
    watch: ProbeSchedule,
    keys: Sequence[str],
    encodings: Sequence[Encoding],
    residuals: Sequence[Residual | None],
    encode: Work,
    scale: float = 1.0,
) -> Work:
    """``encode`` as work that takes norms of what it encodes as well, in steps of which these are wanted.

    Args:
        watch: takes the norms.
        keys: the name of the unit of each encoding.
        residuals: the residual of each encoding.
        encode: encodes them, times ``scale``.
        scale: the factor of the payloads.
    """
    found = (_watchable(*each, scale) for each in zip(keys, encodings, residuals, strict=True))
    pieces = [piece for piece in found if piece is not None]
    if not pieces:
        return encode

    def work() -> None:
        readings = watch.now
        if readings is None:
            encode()
        else:
            readings.around(pieces, encode)

    return work


def kind_of(spec: StageSpec) -> str:
    """The kind of the residual in a stage that encodes."""
    assert spec.encoding is not None
    return spec.encoding
