"""Launches of codecs to measure: bound as the engine binds them, on cold buffers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from gckernels.batch import bind_decodes, bind_encodes, bind_recodes
from gckernels.codec import Codec, Decoding, Encoding, Recoding
from gckernels.compressor import Compressor
from gckernels.ops import PowerSGD
from gckernels.sync.communication.communicators import DryCommunicators
from gckernels.sync.messages.lowrank import LowRankMessage
from gckernels.sync.messages.message import Unit
from gckernels.sync.messages.seeds import Seeds
from gckernels.sync.plans.plan import UnitPlan
from gckernels.sync.programs.named import default_program
from gckernels.sync.programs.stages import StageKind
from gckernels.sync.resources.feedback import Feedback
from gckernels.sync.resources.memory_spaces import Places

from .memory import Arena
from .session import Session

_SETS = 16  # units that are bound at most, for all buffers of a case
_BURST = 1 << 21  # elements that follow each other at most: memory takes a few quickly, and writes them back later
ALIGN = 16
"""Buffers begin at multiples of this number of elements."""

Work = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """A launch to measure."""

    units: int  # number of units
    elements: int  # number of elements of all of them
    sources: int = 1  # number of payloads to merge
    stretch: int = 1  # rows of a unit's matrix over its columns; low-rank methods only

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


def works_of(method: Compressor) -> tuple[StageKind, ...]:
    """The works of a method that are measured."""
    if not isinstance(method, Codec):
        return StageKind.PROJECT, StageKind.RECONSTRUCT
    if method.traits.summable:
        return StageKind.ENCODE, StageKind.DECODE, StageKind.ADD
    return StageKind.ENCODE, StageKind.DECODE, StageKind.RECODE, StageKind.ADD


def cases_of(session: Session, work: StageKind) -> list[Case]:
    """The launches of a work that are measured."""
    extent, ranks = session.extent, max(session.topology.world_size, 2)
    sizes = [(1, elements) for elements in extent.elements] + list(extent.many)
    merges = work in (StageKind.DECODE, StageKind.RECODE)
    cases = [Case(*size, sources=ranks if merges else 1) for size in sizes]
    match work:
        case StageKind.DECODE:
            cases += [Case(*size) for size in sizes[::2]]
        case StageKind.RECODE:  # never of one payload, whose few entries a selection finds in another way
            other = ranks // 2 if ranks > 3 else ranks + 1
            cases += [Case(*size, sources=other) for size in sizes[2::3]]
        case StageKind.PROJECT | StageKind.RECONSTRUCT:
            cases += [Case(*size, stretch=64) for size in sizes[2::3]]
    return cases


def low_rank_message(session: Session, arena: Arena, method: Compressor, case: Case, start: int) -> LowRankMessage:
    """A message of matrices, which is never sent: it decodes what it has encoded itself."""
    places = Places.of(arena.device)
    communicators: Any = DryCommunicators(0, session.topology, places)
    program = default_program(method, session.topology.world_size)
    fitted = method.fit(case.shape)
    assert isinstance(fitted, PowerSGD)
    units = []
    for index in range(case.units):
        first = (start + index * case.numel) % (arena.numel - case.numel + 1) // ALIGN * ALIGN
        plan = UnitPlan(f"p{index}", case.numel, fitted, program, fitted.traits.needs_feedback)
        units.append(Unit(plan, arena.outs[first : first + case.numel]))  # reconstruction overwrites its gradients
    for unit in units:
        unit.grad.copy_(arena.grads[: case.numel])
    return LowRankMessage(units, communicators, Feedback(places), Seeds(0, places))


# -------------------------------------------------------------------- launches, bound as the engine binds them


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
