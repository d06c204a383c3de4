"""Measurement of codecs: bound as the engine binds them, on cold buffers, on all ranks at once."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gckernels.batch import bind_decodes, bind_encodes, bind_recodes
from gckernels.compressor import Compressor, Decoding, Encoding, Recoding
from gckernels.method import Method
from gckernels.ops import PowerSGD

from ..messages.lowrank import LowRankMessage
from ..messages.message import Unit
from ..planner.machines.curves import CodecModel
from ..plans.plan import UnitPlan
from ..programs.named import default_program
from ..programs.stages import StageKind
from ..programs.steps import Place
from ..resources.communicators import DryCommunicators
from ..resources.feedback import Feedback
from ..resources.places import Places
from .fits import Sample, coefficients_of, middle_mean
from .memory import Arena
from .session import Session
from .stopwatch import Stopwatch

_SETS = 32  # units that are bound at most, for all buffers of a case
_BURST = 1 << 21  # elements that follow each other at most: memory takes a few quickly, and writes them back later
_ALIGN = 16

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
        return max(self.elements // self.units // _ALIGN, 1) * _ALIGN

    @property
    def sets(self) -> int:
        """Number of different buffers that follow each other."""
        return max(min(_SETS // self.units, _BURST // self.elements), 1)

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of a unit as a matrix, with powers of two."""
        columns = 1 << max(int(math.log2(self.numel / self.stretch)) // 2, 0)
        return self.numel // columns, columns


def works_of(method: Method) -> tuple[StageKind, ...]:
    """The works of a method that are measured."""
    if not isinstance(method, Compressor):
        return StageKind.PROJECT, StageKind.RECONSTRUCT
    if method.traits.summable:
        return StageKind.ENCODE, StageKind.DECODE
    return StageKind.ENCODE, StageKind.DECODE, StageKind.RECODE


def cases_of(session: Session, work: StageKind) -> list[Case]:
    """The launches of a work that are measured."""
    extent, ranks = session.extent, max(session.topology.world_size, 2)
    sizes = [(1, elements) for elements in extent.elements] + list(extent.many)
    cases = [Case(*size, sources=ranks if work == StageKind.RECODE else 1) for size in sizes]
    match work:
        case StageKind.DECODE:
            cases += [Case(*size, sources=ranks) for size in sizes]
        case StageKind.RECODE:
            cases += [Case(*size) for size in sizes[2::3]]
        case StageKind.PROJECT | StageKind.RECONSTRUCT:
            cases += [Case(*size, stretch=64) for size in sizes[2::3]]
    return cases


def measure_codecs(
    session: Session, arena: Arena, method: Method, works: Sequence[StageKind], place: Place
) -> list[CodecModel]:
    """The models of some works of a method. Collective. The slowest rank counts."""
    method.compile_host(recodes=True)
    if isinstance(method, Compressor):
        return [measure_work(session, arena, method, work, place) for work in works]
    return list(_measure_low_rank(session, arena, method, place))


def measure_work(session: Session, arena: Arena, method: Compressor, work: StageKind, place: Place) -> CodecModel:
    """The model of one work of a compressor. Collective."""
    samples, busy = [], []
    cases = cases_of(session, work)
    for case in cases:
        sets = arena.starts(case.units * case.numel * case.sources, case.sets)
        calls = [bound(arena, method, work, case, start) for start in sets]
        wall_s, cores_s = measure(session, arena, [calls])[0]
        samples.append(Sample(case.units, case.units * case.numel, case.sources, wall_s))
        busy.append(cores_s / wall_s)
    return _model(method, work, place, cases, samples, busy)


def measure(session: Session, arena: Arena, phases: Sequence[Sequence[Work]]) -> list[tuple[float, float]]:
    """Seconds and CPU seconds of a call, for each phase. Collective.

    The calls of a phase follow each other on different buffers. All phases run in turn, after the caches are flushed.
    """
    rounds: list[list[float]] = []
    for _ in range(session.extent.rounds + 1):  # the first one does not count
        times = []
        for calls in phases:
            arena.flush()
            watch = Stopwatch(arena.device)
            watch.mark()
            for call in calls:
                call()
            watch.mark()
            times += [watch.seconds()[-1] / len(calls), watch.cores_s() / len(calls)]
        rounds.append(times)
    slowest = session.ranks.slowest([middle_mean(column) for column in zip(*rounds[1:], strict=True)])
    return list(zip(slowest[::2], slowest[1::2], strict=True))


def _model(
    method: Method,
    work: StageKind,
    place: Place,
    cases: Sequence[Case],
    samples: Sequence[Sample],
    busy: Sequence[float],
) -> CodecModel:
    coefficients, error = coefficients_of(samples)
    return CodecModel(
        method,
        work,
        place,
        coefficients,
        statistics.median(busy),
        max(case.units for case in cases),
        max(case.elements for case in cases),
        max(case.sources for case in cases),
        error,
    )


# -------------------------------------------------------------------- compressors


def bound(arena: Arena, method: Compressor, work: StageKind, case: Case, start: int) -> Work:
    """A launch on buffers whose gradients begin at ``start``. Its payloads have been encoded from gradients."""
    numel, units = case.numel, case.units
    states = method.traits.states * numel
    keeps = method.traits.needs_feedback
    nbytes = method.payload_nbytes(numel)
    payloads = torch.zeros(case.sources, 1, units * nbytes, dtype=torch.uint8, device=arena.device)
    shares = [payloads[..., index * nbytes : (index + 1) * nbytes] for index in range(units)]
    residuals = [torch.zeros(states if keeps else 0, device=arena.device) for _ in range(units)]
    kept = [residual if keeps else None for residual in residuals]

    def piece(of: torch.Tensor, index: int, source: int = 0) -> torch.Tensor:
        first = (start + (source * units + index) * numel) % (of.numel() - numel + 1) // _ALIGN * _ALIGN
        return of[first : first + numel]

    def encodings(source: int) -> Iterator[Encoding]:
        for index, share in enumerate(shares):
            yield Encoding(method, piece(arena.grads, index, source), kept[index], share[source], index)

    if work == StageKind.ENCODE:
        encode = bind_encodes(encodings(0))
        return lambda: encode(0)
    for source in range(case.sources):
        bind_encodes(encodings(source))(0)
    if work == StageKind.DECODE:
        decodings = [Decoding(method, share, piece(arena.outs, index)) for index, share in enumerate(shares)]
        return bind_decodes(decodings, 1.0 / case.sources)
    results = torch.zeros(units, nbytes, dtype=torch.uint8, device=arena.device)
    shard_keeps = method.shard_compressor.traits.needs_feedback
    shard_states = method.shard_compressor.traits.states * numel
    recodings = [
        Recoding(
            method,
            share[:, 0],
            torch.zeros(shard_states, device=arena.device) if keeps and shard_keeps else None,
            results[index],
            numel,
            index,
        )
        for index, share in enumerate(shares)
    ]
    recode = bind_recodes(recodings, 1.0 / case.sources)
    return lambda: recode(0)


# -------------------------------------------------------------------- low-rank methods


def _measure_low_rank(session: Session, arena: Arena, method: Method, place: Place) -> Iterator[CodecModel]:
    works: dict[StageKind, list[Sample]] = {StageKind.PROJECT: [], StageKind.RECONSTRUCT: []}
    busy: dict[StageKind, list[float]] = {work: [] for work in works}
    cases = [case for case in cases_of(session, StageKind.PROJECT) if _compresses(method, case)]
    for case in cases:
        sets = arena.starts(case.units * case.numel, case.sets)
        messages = [_low_rank_message(session, arena, method, case, start) for start in sets]
        specs = [stage.spec.kind for stage in messages[0].stages]
        at = [index for index, kind in enumerate(specs) if kind in works]
        phases = [[_call(message, index) for message in messages] for index in at]
        found = measure(session, arena, phases)
        sides = float(case.units * sum(case.shape))
        for work, samples in works.items():
            times = [time for index, time in zip(at, found, strict=True) if specs[index] == work]
            wall_s, cores_s = (statistics.mean(column) for column in zip(*times, strict=True))
            samples.append(Sample(case.units, case.units * case.numel, 1, wall_s, sides))
            busy[work].append(cores_s / wall_s)
    for work, samples in works.items():
        if samples:
            yield _model(method, work, place, cases, samples, busy[work])


def _compresses(method: Method, case: Case) -> bool:
    return type(method.fit(case.shape)) is type(method)


def _low_rank_message(session: Session, arena: Arena, method: Method, case: Case, start: int) -> LowRankMessage:
    """A message of matrices, which is never sent: it decodes what it has encoded itself."""
    places = Places.of(arena.device)
    communicators: Any = DryCommunicators(0, session.topology, places)
    program = default_program(method, session.topology.world_size)
    fitted = method.fit(case.shape)
    assert isinstance(fitted, PowerSGD)
    units = []
    for index in range(case.units):
        first = (start + index * case.numel) % (arena.numel - case.numel + 1) // _ALIGN * _ALIGN
        plan = UnitPlan(f"p{index}", case.numel, fitted, program, fitted.traits.needs_feedback)
        units.append(Unit(plan, arena.outs[first : first + case.numel]))  # reconstruction overwrites its gradients
    for unit in units:
        unit.grad.copy_(arena.grads[: case.numel])
    return LowRankMessage(program, units, communicators, Feedback(places), 0, keep_unused=False)


def _call(message: LowRankMessage, index: int) -> Work:
    return lambda: message.stages[index].work(0)
