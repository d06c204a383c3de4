"""The ring of CaSync (Bai et al., SOSP 2021, section 3): ranks add their parts to passing shards and encode sums.

Rank ``i`` of ``n`` begins with shard ``i - 1``. In hop ``h`` it receives shard ``i - 1 - h`` from the previous rank, so
after ``n - 1`` hops it has shard ``i`` with the contributions of all ranks, as after a reduce-scatter. Sums go around,
not means, so that the errors of all encodings have the same weight. A rank encodes each shard once, so it has one
residual for the whole piece, shard by shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from gckernels.batch import bind_decodes
from gckernels.codec import Decoding, Encoding, chunk_bounds

from ..programs.sizes import Data
from ..programs.stages import StageKind, StageSpec
from ..programs.steps import Hop
from ..resources.residual import EncodedForm, Residual
from ..resources.workers import Work
from .buffers import Buffers, Held, Payloads, Raw, Travelling
from .codings import Codings, kind_of, tensor_of
from .message import compressor_of


def bind(buffers: Buffers, codings: Codings, spec: StageSpec, held: Held) -> tuple[Work, Held]:
    """The work of a stage of a ring, and the payloads that travel after it."""
    if spec.kind == StageKind.ENCODE_SHARD:
        return _encode_shard(buffers, codings, spec, buffers.pieces(held, spec.first))
    assert isinstance(held, Travelling)
    return _add_shard(buffers, codings, spec, held)


def _encode_shard(buffers: Buffers, codings: Codings, spec: StageSpec, held: Raw) -> tuple[Work, Travelling]:
    """The work that encodes the shard with which this rank begins; and the payloads that travel."""
    step = buffers.program[spec.stop]
    assert isinstance(step, Hop)
    payloads, data = buffers.payloads(spec.stop, held.place), buffers.data(spec.stop)
    ranks = buffers.topology.size(step.level)
    shard = (buffers.topology.index(step.level, buffers.rank) - 1) % ranks
    totals = [buffers.allocate([each.size], torch.float32, held.place) for each in data]
    travelling = Travelling(payloads.buffer, place=held.place, pieces=held.pieces, totals=totals)
    sources = _shards(travelling, data, shard)
    return _bind_encodes(buffers, codings, spec, travelling, shard, ranks, sources), travelling


def _add_shard(buffers: Buffers, codings: Codings, spec: StageSpec, held: Travelling) -> tuple[Work, Payloads]:
    """The work that adds this rank's part to the received shard and encodes the sum; and the new payloads.

    The payloads replace those that were sent, in the same buffer.
    """
    step = buffers.program[spec.first]
    assert isinstance(step, Hop) and held.received is not None
    ranks, index = buffers.topology.size(step.level), buffers.topology.index(step.level, buffers.rank)
    shard = (index - 1 - buffers.flow(spec.first).hops - 1) % ranks
    data = buffers.data(spec.stop)
    mine, received = _shards(held, data, shard), buffers.unit_payloads(held.received, spec.stop)
    sums = [room[: part.numel()] for room, part in zip(held.totals, mine, strict=True)]
    decodings = [
        Decoding(compressor_of(unit), source, total, each.size)
        for unit, source, total, each in zip(buffers.units, received, sums, data, strict=True)
    ]
    decode = bind_decodes(decodings, 1.0, accumulate=True)
    encode = _bind_encodes(buffers, codings, spec, held, shard, ranks, sums)

    def work() -> None:
        torch._foreach_copy_(sums, mine)
        decode()
        encode()

    if buffers.flow(spec.stop).hops:
        return work, replace(held, received=None)
    return work, Payloads(held.buffer, summed=ranks, place=held.place)


def _shards(held: Travelling, data: Sequence[Data], shard: int) -> list[torch.Tensor]:
    """A shard of the piece of each unit."""
    bounds = (chunk_bounds(piece.numel(), each.size, shard) for piece, each in zip(held.pieces, data, strict=True))
    return [piece[start:stop] for piece, (start, stop) in zip(held.pieces, bounds, strict=True)]


def _bind_encodes(
    buffers: Buffers,
    codings: Codings,
    spec: StageSpec,
    held: Travelling,
    shard: int,
    ranks: int,
    sources: Sequence[torch.Tensor],
) -> Work:
    """The work that encodes ``sources``, one of ``ranks`` shards of each unit or a sum of it, into the buffer that
    travels."""
    kind = kind_of(spec)
    encodings: list[Encoding] = []
    residuals: list[Residual | None] = []
    own = buffers.unit_payloads(held.buffer, spec.stop)
    for unit, piece, source, payload, data in zip(
        buffers.units, held.pieces, sources, own, buffers.data(spec.stop), strict=True
    ):
        whole = codings.residual(kind, unit, piece.numel(), held.place, EncodedForm(ranks, data.size))
        method, seed = compressor_of(unit, kind), codings.seed(kind, unit, spec.stop, shard)
        residuals.append(None if whole is None else whole.part(shard, data.size, method.traits.states))
        encodings.append(Encoding(method, source, tensor_of(residuals[-1]), payload[0], seed, data.size))
    return codings.bind_encodes(spec, encodings, residuals)
