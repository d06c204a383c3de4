"""Launches of codecs, bound to buffers as the engine binds them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from gckernels.batch import bind_decodes, bind_encodes, bind_recodes
from gckernels.codec import Codec, Decoding, Encoding, Recoding

from ...programs.stages import StageKind
from .memory import Arena

_SETS = 16  # units that are bound at most, for all buffers of a case
_BURST = 1 << 21  # elements that follow each other at most: memory takes a few quickly, and writes them back later
ALIGN = 16
"""Buffers begin at multiples of this number of elements."""

Work = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """A launch to measure.

    Attributes:
        units: number of units.
        elements: number of elements of all of them.
        sources: number of payloads to merge.
        stretch: rows of a unit's matrix over its columns; low-rank methods only.
    """

    units: int
    elements: int
    sources: int = 1
    stretch: int = 1

    @property
    def numel(self) -> int:
        """Number of elements of a unit."""
        return max(self.elements // self.units // ALIGN, 1) * ALIGN

    @property
    def sets(self) -> int:
        """Number of different buffers that follow each other."""
        return max(min(_SETS // self.units, _BURST // self.elements), 1)

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of a unit as a matrix, with powers of two."""
        columns = 1 << max(int(math.log2(self.numel / self.stretch)) // 2, 0)
        return self.numel // columns, columns


def bound(arena: Arena, method: Codec, work: StageKind, case: Case, start: int) -> Work:
    """A launch on buffers whose gradients begin at ``start``. Its payloads have been encoded from gradients."""
    numel, units = case.numel, case.units
    states = method.traits.states * numel
    keeps = method.traits.needs_feedback
    nbytes = method.payload_nbytes(numel)
    payloads = torch.zeros(case.sources, 1, units * nbytes, dtype=torch.uint8, device=arena.device)
    shares = [payloads[..., index * nbytes : (index + 1) * nbytes] for index in range(units)]
    residuals = [torch.zeros(states if keeps else 0, dtype=torch.float32, device=arena.device) for _ in range(units)]
    kept = [residual if keeps else None for residual in residuals]

    def piece(of: torch.Tensor, index: int, source: int = 0) -> torch.Tensor:
        first = (start + (source * units + index) * numel) % (of.numel() - numel + 1) // ALIGN * ALIGN
        return of[first : first + numel]

    def encodings(source: int) -> Iterator[Encoding]:
        for index, share in enumerate(shares):
            yield Encoding(method, piece(arena.grads, index, source), kept[index], share[source], index)

    if work == StageKind.ENCODE:
        return bind_encodes(encodings(0))
    for source in range(case.sources):
        bind_encodes(encodings(source))()
    if work == StageKind.DECODE:
        decodings = [Decoding(method, share, piece(arena.outs, index)) for index, share in enumerate(shares)]
        return bind_decodes(decodings, 1.0 / case.sources)
    results = torch.zeros(units, nbytes, dtype=torch.uint8, device=arena.device)
    if work == StageKind.ADD:
        sums = [piece(arena.outs, index) for index in range(units)]
        return _bound_add(method, list(encodings(0)), shares, sums, results[:, None])
    shard_keeps = method.shard_compressor.traits.needs_feedback
    shard_states = method.shard_compressor.traits.states * numel
    recodings = [
        Recoding(
            method,
            share[:, 0],
            torch.zeros(shard_states, dtype=torch.float32, device=arena.device) if keeps and shard_keeps else None,
            results[index],
            numel,
            index,
        )
        for index, share in enumerate(shares)
    ]
    return bind_recodes(recodings, 1.0 / case.sources)


def _bound_add(
    method: Codec,
    encodings: Sequence[Encoding],
    received: Sequence[torch.Tensor],
    sums: Sequence[torch.Tensor],
    results: torch.Tensor,
) -> Work:
    """The stage of a ring that adds the own part to a shard that has arrived, and encodes the sum."""
    mine = [encoding.grad for encoding in encodings]
    decodings = [Decoding(method, payload, total) for payload, total in zip(received, sums, strict=True)]
    decode = bind_decodes(decodings, 1.0, accumulate=True)
    encode = bind_encodes(
        replace(each, grad=total, payload=result) for each, total, result in zip(encodings, sums, results, strict=True)
    )

    def add() -> None:
        torch._foreach_copy_(list(sums), mine)
        decode()
        encode()

    return add
