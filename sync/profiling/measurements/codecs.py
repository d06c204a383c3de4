"""Measurement of codecs: bound as the engine binds them, on cold buffers, on all ranks at once."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from gckernels.codec import Codec
from gckernels.compressor import Compressor
from gckernels.ops import PowerSGD

from ...communication.communicators import DryCommunicators
from ...messages.lowrank import LowRankMessage
from ...messages.message import Unit
from ...messages.seeds import Seeds
from ...planner.machines.curves import CodecModel
from ...planner.machines.profile import WARNED_ERROR
from ...plans.plan import UnitPlan
from ...programs.named import default_program
from ...programs.stages import StageKind
from ...programs.steps import Place
from ...resources.feedback import Feedback
from ...resources.memory_spaces import Places
from .fits import LaunchSample, coefficients_of, excess
from .launches import ALIGN, Case, Work, bound
from .memory import Arena
from .session import Session
from .stopwatch import Stopwatch

_TIMES_AGAIN = 2  # a launch that takes longer than others suggest is measured again at most


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


def measure_codecs(
    session: Session, arena: Arena, method: Compressor, works: Sequence[StageKind], place: Place
) -> list[CodecModel]:
    """The models of some works of a method. Collective. The slowest rank counts."""
    method.compile_host(recodes=True)
    if isinstance(method, Codec):
        return [measure_work(session, arena, method, work, place) for work in works]
    return _measure_low_rank(session, arena, method, place)


def measure_work(session: Session, arena: Arena, method: Codec, work: StageKind, place: Place) -> CodecModel:
    """The model of one work of a compressor. Collective."""
    cases = cases_of(session, work)

    def measure(case: Case) -> list[Timed]:
        starts = arena.starts(case.units * case.numel * case.sources, case.sets * session.extent.rounds)
        calls = [bound(arena, method, work, case, start) for start in starts]
        return timed(session, arena, [calls], case.sets)

    (model,) = _models(session, cases, measure, method, (work,), place)
    return model


Timed = tuple[float, float]
"""Seconds of a call, and its CPU seconds."""


def _models(
    session: Session,
    cases: Sequence[Case],
    measure: Callable[[Case], list[Timed]],
    method: Compressor,
    works: Sequence[StageKind],
    place: Place,
) -> list[CodecModel]:
    """The models of works that are measured together. Collective.

    Launches that take longer than the model says are measured again, and the shorter time counts: other processes can
    only make it longer.

    Args:
        session: the measurement.
        cases: the launches.
        measure: measures a launch; returns the times of every work.
        method: the method.
        works: its works.
        place: where they are computed.
    """
    found = []
    for case in cases:
        begun_s = session.budget.spent_s
        found.append((measure(case), session.budget.spent_s - begun_s))
    for turn in itertools.count():
        times = [each for each, _ in found]
        columns = list(zip(*times, strict=True))
        models = [_model(method, work, place, cases, each) for work, each in zip(works, columns, strict=True)]
        if turn == _TIMES_AGAIN:
            break
        doubtful = session.ranks.first(float(_doubtful(models, cases, columns)))  # floats differ between processors
        again = [index for index in range(len(cases)) if int(doubtful) >> index & 1]
        if not again or not session.budget.allows(sum(found[index][1] for index in again)):
            break
        for index in again:
            measured, took_s = found[index]
            found[index] = (list(map(min, measured, measure(cases[index]))), took_s)
    return models


def _doubtful(models: Sequence[CodecModel], cases: Sequence[Case], columns: Sequence[Sequence[Timed]]) -> int:
    """The cases whose time is longer than a model says, as bits; none if all models fit well."""
    bits = 0
    for model, column in zip(models, columns, strict=True):
        if model.error is not None and model.error <= WARNED_ERROR / 2:
            continue
        samples = _samples(model.compressor, cases, column)
        for index, each in enumerate(excess(model.coefficients, samples)):
            bits |= (each > WARNED_ERROR) << index
    return bits


def timed(session: Session, arena: Arena, phases: Sequence[Sequence[Work]], sets: int) -> list[Timed]:
    """Seconds and CPU seconds of a call, for each phase. Collective; the slowest rank counts.

    Calls have buffers of their own, which are in no cache. A phase has several rounds of ``sets`` calls, of which the
    quicker ones count: a pause of the machine is longer than a call.
    """
    for calls in phases:
        for call in calls:
            call()  # buffers get their memory in the first call
    quick: list[float] = []
    for calls in phases:
        rounds = []
        arena.flush()
        for first in range(0, sets * session.extent.rounds, sets):
            arena.flush(whole=False)
            watch = Stopwatch(arena.device, session.clock)
            watch.mark()
            for index in range(first, first + sets):
                calls[index % len(calls)]()
            watch.mark()
            rounds.append((watch.seconds()[-1] / sets, watch.cores_s() / sets))
        quick += sorted(rounds)[len(rounds) // 4]
    slowest = session.ranks.slowest(quick)
    return list(zip(slowest[::2], slowest[1::2], strict=True))


def _model(
    method: Compressor,
    work: StageKind,
    place: Place,
    cases: Sequence[Case],
    found: Sequence[Timed],
) -> CodecModel:
    coefficients, error = coefficients_of(_samples(method, cases, found))
    return CodecModel(
        method,
        work,
        place,
        coefficients,
        statistics.median(cores_s / wall_s for wall_s, cores_s in found),
        max(case.units for case in cases),
        max(case.elements for case in cases),
        max(case.sources for case in cases),
        error,
    )


def _samples(method: Compressor, cases: Sequence[Case], found: Sequence[Timed]) -> list[LaunchSample]:
    return [_sample(method, case, seconds) for case, (seconds, _) in zip(cases, found, strict=True)]


def _sample(method: Compressor, case: Case, seconds: float) -> LaunchSample:
    elements = case.units * case.numel
    sides = 0.0 if isinstance(method, Codec) else float(case.units * sum(case.shape))
    return LaunchSample(case.units, elements, case.sources, seconds, sides)


# -------------------------------------------------------------------- low-rank methods


def _measure_low_rank(session: Session, arena: Arena, method: Compressor, place: Place) -> list[CodecModel]:
    works = (StageKind.PROJECT, StageKind.RECONSTRUCT)
    cases = [case for case in cases_of(session, StageKind.PROJECT) if _compresses(method, case)]

    def measure(case: Case) -> list[Timed]:
        starts = arena.starts(case.units * case.numel, case.sets * session.extent.rounds)
        messages = [_low_rank_message(session, arena, method, case, start) for start in starts]
        kinds = [stage.spec.kind for stage in messages[0].stages]
        at = [index for index, kind in enumerate(kinds) if kind in works]
        phases = [[_call(message, index) for message in messages] for index in at]
        times = timed(session, arena, phases, case.sets)
        of_work: dict[StageKind, list[Timed]] = {work: [] for work in works}
        for index, time in zip(at, times, strict=True):
            of_work[kinds[index]].append(time)
        return [_mean(of_work[work]) for work in works]

    return _models(session, cases, measure, method, works, place) if cases else []


def _mean(times: Sequence[Timed]) -> Timed:
    wall_s, cores_s = (statistics.mean(column) for column in zip(*times, strict=True))
    return wall_s, cores_s


def _compresses(method: Compressor, case: Case) -> bool:
    return type(method.fit(case.shape)) is type(method)


def _low_rank_message(session: Session, arena: Arena, method: Compressor, case: Case, start: int) -> LowRankMessage:
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


def _call(message: LowRankMessage, index: int) -> Work:
    return message.stages[index].work
