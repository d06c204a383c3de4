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

from gckernels.compressor import chunk_bounds

from .binder import Binder, Held, Payloads, Raw, all_of
from .collectives import hop
from .message import Unit, Work, one_shot
from .program import Data
from .steps import Hop, Place


def bind_start(binder: Binder, data: Sequence[Data], step: Hop, kind: str, held: Raw) -> Payloads:
    """Encode the shard that this rank begins with."""
    payloads, own = binder.payloads(data, held.place)
    shard = (binder.topology.index(step.level, binder.rank) - 1) % binder.topology.size(step.level)
    works = []
    for unit, piece, payload, each in zip(binder.units, held.pieces, own, data, strict=True):
        source = _shard(piece, each.size, shard)
        works.append(_encode(binder, kind, unit, piece, source, source, payload, each, shard, held.place))
    binder.compute("Encode", all_of(works), held.place)
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
    works: list[Work] = []
    for unit, piece, room, source, payload, data in zip(
        binder.units, held.pieces, held.totals, came, own, after, strict=True
    ):
        mine = _shard(piece, data.size, shard)
        total = room[: mine.numel()]
        works.append(_add(unit, mine, source, total, data.size))
        works.append(_encode(binder, kind, unit, piece, total, mine, payload, data, shard, held.place))
    binder.phase += 1
    binder.compute("Recode", all_of(works), held.place)
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


def _add(unit: Unit, own: torch.Tensor, came: torch.Tensor, total: torch.Tensor, size: int) -> Work:
    compressor = one_shot(unit)

    def work(step: int) -> None:
        total.copy_(own)
        compressor.decode(came, total, 1.0, True, size)

    return work


def _encode(
    binder: Binder,
    kind: str,
    unit: Unit,
    piece: torch.Tensor,
    source: torch.Tensor,
    own: torch.Tensor,
    payload: torch.Tensor,
    data: Data,
    shard: int,
    place: Place,
) -> Work:
    kept = binder.residual(kind, unit, piece.numel(), place)
    if kept is not None:  # all states of one shard lie together
        states = unit.plan.encoder(kind).states
        start, stop = chunk_bounds(piece.numel(), data.size, shard)
        kept = kept[states * start : states * stop]
    seed = binder.seed(kind, unit, data.flow, shard)
    return binder.encode(kind, unit, source, own, kept, payload[0], data.size, seed)
