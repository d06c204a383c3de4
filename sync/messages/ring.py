"""The ring of CaSync (Bai et al., SOSP 2021, section 3): ranks add their parts to passing shards and encode sums.

Rank ``i`` of ``n`` begins with shard ``i - 1``. In hop ``h`` it receives shard ``i - 1 - h`` from the previous rank, so
after ``n - 1`` hops it has shard ``i`` with the contributions of all ranks, as after a reduce-scatter. Sums go around,
not means, so that the errors of all encodings have the same weight. A rank encodes each shard once, so it has one
residual for the whole piece, shard by shard.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from gckernels.batch import bind_decodes
from gckernels.codec import Decoding, Encoding, chunk_bounds

from ..programs.sizes import Data
from ..programs.stages import StageSpec
from ..programs.steps import Hop
from ..resources.workers import Work
from .buffers import Buffers, Payloads, Raw, Travelling
from .codings import Codings, kind_of
from .message import Unit, compressor_of


def encode_shard(buffers: Buffers, codings: Codings, spec: StageSpec, held: Raw) -> tuple[Work, Travelling]:
    """The work that encodes the shard with which this rank begins; and the payloads that travel."""
    step = buffers.program[spec.stop]
    assert isinstance(step, Hop)
    payloads, data = buffers.payloads(spec.stop, held.place), buffers.data(spec.stop)
    shard = (buffers.topology.index(step.level, buffers.rank) - 1) % buffers.topology.size(step.level)
    encodings = []
    for unit, piece, payload, each in zip(
        buffers.units, held.pieces, buffers.unit_payloads(payloads.buffer, spec.stop), data, strict=True
    ):
        source = _shard(piece, each.size, shard)
        encodings.append(_encoding(codings, spec, held, unit, piece, source, payload, each, shard))
    memory = buffers.places.memory(held.place)
    totals = [torch.zeros(each.size, dtype=torch.float32, device=memory) for each in data]
    travelling = Travelling(payloads.buffer, place=held.place, pieces=held.pieces, totals=totals)
    return codings.bind_encodes(spec, encodings), travelling


def add_shard(buffers: Buffers, codings: Codings, spec: StageSpec, held: Travelling) -> tuple[Work, Payloads]:
    """The work that adds this rank's part to the received shard and encodes the sum; and the new payloads.

    The payloads replace those that were sent, in the same buffer.
    """
    step = buffers.program[spec.first]
    assert isinstance(step, Hop) and held.received is not None
    ranks, index = buffers.topology.size(step.level), buffers.topology.index(step.level, buffers.rank)
    shard = (index - 1 - buffers.flow(spec.first).hops - 1) % ranks
    received, own = (buffers.unit_payloads(buffer, spec.stop) for buffer in (held.received, held.buffer))
    decodings, encodings, mine, sums = [], [], [], []
    for unit, piece, room, source, payload, data in zip(
        buffers.units, held.pieces, held.totals, received, own, buffers.data(spec.stop), strict=True
    ):
        part = _shard(piece, data.size, shard)
        total = room[: part.numel()]
        decodings.append(Decoding(compressor_of(unit), source, total, data.size))
        encodings.append(_encoding(codings, spec, held, unit, piece, total, payload, data, shard))
        mine.append(part)
        sums.append(total)
    decode, encode = bind_decodes(decodings, 1.0, accumulate=True), codings.bind_encodes(spec, encodings)

    def work() -> None:
        torch._foreach_copy_(sums, mine)
        decode()
        encode()

    if buffers.flow(spec.stop).hops:
        return work, replace(held, received=None)
    return work, Payloads(held.buffer, summed=ranks, place=held.place)


def _shard(piece: torch.Tensor, size: int, shard: int) -> torch.Tensor:
    start, stop = chunk_bounds(piece.numel(), size, shard)
    return piece[start:stop]


def _encoding(
    codings: Codings,
    spec: StageSpec,
    held: Raw | Payloads,
    unit: Unit,
    piece: torch.Tensor,
    source: torch.Tensor,
    payload: torch.Tensor,
    data: Data,
    shard: int,
) -> Encoding:
    kind = kind_of(spec)
    kept = codings.residual(kind, unit, piece.numel(), held.place)
    if kept is not None:  # the residual has all states of one shard together, then those of the next
        states = unit.plan.encoder(kind).traits.states
        start, stop = chunk_bounds(piece.numel(), data.size, shard)
        kept = kept[states * start : states * stop]
    seed = codings.seed(kind, unit, spec.stop, shard)
    return Encoding(compressor_of(unit, kind), source, kept, payload[0], seed, data.size)
