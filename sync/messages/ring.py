"""The ring: a shard goes around, and every rank adds its own part and encodes the sum anew (CaSync, SOSP 2021).

Rank ``i`` of ``n`` begins with shard ``i - 1``. In its hop ``h`` shard ``i - 1 - h`` comes from the rank before it, so
that after ``n - 1`` hops it has shard ``i``, to which all have added, as after a reduce-scatter. Sums go around, not
means: what an encoding leaves out is worth the same on every rank. A rank encodes each shard once, so it has one
residual for the whole piece, shard by shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from gckernels.compressor import Decoding, Encoding, chunk_bounds

from ..programs.sizes import Data
from ..programs.steps import Hop, Place
from .binder import Binder, Held, Payloads, Raw, all_of, decode_all
from .collectives import hop
from .message import Unit, Work, one_shot


def bind_start(binder: Binder, data: Sequence[Data], step: Hop, kind: str, held: Raw) -> Payloads:
    """Encode the shard that this rank begins with."""
    payloads, own = binder.payloads(data, held.place)
    shard = (binder.topology.index(step.level, binder.rank) - 1) % binder.topology.size(step.level)
    encodings = []
    for unit, piece, payload, each in zip(binder.units, held.pieces, own, data, strict=True):
        source = _shard(piece, each.size, shard)
        encodings.append((_encoding(binder, kind, unit, piece, source, payload, each, shard, held.place), source))
    binder.compute("Encode", binder.encode(encodings), held.place)
    memory = binder.places.memory(held.place)
    totals = [torch.zeros(each.size, dtype=torch.float32, device=memory) for each in data]
    return _Ring(payloads.buffer, place=held.place, pieces=held.pieces, totals=totals)


def bind_hop(
    binder: Binder, before: Sequence[Data], after: Sequence[Data], step: Hop, kind: str, held: Held
) -> Payloads:
    """Pass on what was encoded; add to what comes, and encode it in the same place."""
    assert isinstance(held, _Ring)
    ranks, index = binder.topology.size(step.level), binder.topology.index(step.level, binder.rank)
    received, call = hop(held.buffer, binder.group(step.level, held.place), ranks, index)
    binder.send(step, before, after, call, held.place)
    shard = (index - 1 - before[0].flow.hops - 1) % ranks
    came, own = (binder.unit_payloads(buffer, after) for buffer in (received, held.buffer))
    decodings, encodings = [], []
    for unit, piece, room, source, payload, data in zip(
        binder.units, held.pieces, held.totals, came, own, after, strict=True
    ):
        mine = _shard(piece, data.size, shard)
        total = room[: mine.numel()]
        decodings.append((Decoding(one_shot(unit), source, total, data.size), mine))
        encodings.append((_encoding(binder, kind, unit, piece, total, payload, data, shard, held.place), mine))
    binder.phase += 1
    binder.compute("Recode", all_of([_add(decodings), binder.encode(encodings)]), held.place)
    binder.phase -= 1
    return held if after[0].flow.hops else Payloads(held.buffer, summed=ranks, place=held.place)


@dataclass(frozen=True)
class _Ring(Payloads):
    """A payload on its way around, the pieces that are added to it, and room for the sum of one shard of each."""

    pieces: list[torch.Tensor] = field(default_factory=list)
    totals: list[torch.Tensor] = field(default_factory=list)


def _shard(piece: torch.Tensor, size: int, shard: int) -> torch.Tensor:
    start, stop = chunk_bounds(piece.numel(), size, shard)
    return piece[start:stop]


def _add(decodings: Sequence[tuple[Decoding, torch.Tensor]]) -> Work:
    """Add what came to a rank's own."""
    totals, owns = [decoding.out for decoding, _ in decodings], [own for _, own in decodings]
    decode = decode_all([decoding for decoding, _ in decodings], 1.0, accumulate=True)

    def work(step: int) -> None:
        torch._foreach_copy_(totals, owns)
        decode(step)

    return work


def _encoding(
    binder: Binder,
    kind: str,
    unit: Unit,
    piece: torch.Tensor,
    source: torch.Tensor,
    payload: torch.Tensor,
    data: Data,
    shard: int,
    place: Place,
) -> Encoding:
    kept = binder.residual(kind, unit, piece.numel(), place)
    if kept is not None:  # all states of one shard lie together
        states = unit.plan.encoder(kind).states
        start, stop = chunk_bounds(piece.numel(), data.size, shard)
        kept = kept[states * start : states * stop]
    seed = binder.seed(kind, unit, data.flow, shard)
    return Encoding(one_shot(unit, kind), source, kept, payload[0], seed, data.size)
