"""Measurement of codecs at several moments, on all ranks at once, and the models of their times."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from gckernels.codec import Codec
from gckernels.compressor import Compressor
from gckernels.sync.programs.stages import StageKind
from gckernels.sync.programs.steps import Place

from ...machines.curves import CodecModel
from ...machines.profile import WARNED_ERROR
from .codecs import Case, Work, bound, cases_of, low_rank_message
from .fits import APART, LaunchSample, coefficients_of
from .memory import Arena
from .session import Session, Stopwatch

_MOMENTS = 2  # at each of which all launches are measured, one behind the other

Timed = tuple[float, float]
"""Seconds of a call, and its CPU seconds."""


class CodecTimes:
    """The times of some works of a method which are measured together; the same on all ranks.

    Other processes can only make a launch longer, so the shortest time of all moments counts.

    Args:
        session: the measurement.
        arena: the memory of the buffers.
        place: where they are computed.
    """

    def __init__(
        self, session: Session, arena: Arena, method: Compressor, works: Sequence[StageKind], place: Place
    ) -> None:
        self._session, self._arena, self.method, self._place = session, arena, method, place
        self.works = tuple(works)
        self._cases = [case for case in cases_of(session, works[0]) if _takes(method, case)]
        self._found: dict[Case, list[list[Timed]]] = {case: [] for case in self._cases}  # works of every moment

    def __str__(self) -> str:
        return f"{' and '.join(work.value for work in self.works)} of {self.method}"

    @staticmethod
    def measured(
        session: Session, arena: Arena, method: Compressor, works: Sequence[StageKind], place: Place
    ) -> list[CodecTimes]:
        """The times of some works of a method, measured at the first moments. Collective."""
        method.compile_host(recodes=True)
        together = [[work] for work in works] if isinstance(method, Codec) else [list(works)]
        found = [CodecTimes(session, arena, method, each, place) for each in together]
        for each in found:
            for _ in range(_MOMENTS):
                each._measure(each._cases)
        return found

    def again(self) -> None:
        """Measure the disputed launches at another moment. Collective."""
        self._measure(self.disputed)

    @property
    def disputed(self) -> list[Case]:
        """The launches of which no two moments agree, if a model has a large error. Where all agree, the error is that
        of the model, and other moments do not help."""
        if self.error <= WARNED_ERROR:
            return []
        return [case for case in self._cases if max(self._apart(case)) > APART]

    @property
    def error(self) -> float:
        """The largest error of a model."""
        return max((model.error or 0.0 for model in self.models), default=0.0)

    @property
    def models(self) -> list[CodecModel]:
        """The models, one for each work; none if there is no launch for the method."""
        if not self._cases:
            return []
        least = [list(map(min, *self._found[case])) for case in self._cases]
        apart = zip(*map(self._apart, self._cases), strict=True)
        columns = zip(self.works, zip(*least, strict=True), apart, strict=True)
        return [_model(self.method, work, self._place, self._cases, times, each) for work, times, each in columns]

    def _apart(self, case: Case) -> list[float]:
        """For each work the relative difference of the two moments at which a launch took least."""
        walls = (sorted(wall_s for wall_s, _ in times) for times in zip(*self._found[case], strict=True))
        return [second_s / least_s - 1.0 for least_s, second_s, *_ in walls]

    def _measure(self, cases: Sequence[Case]) -> None:
        for case in cases:
            self._found[case].append(_times(self._session, self._arena, self.method, self.works, case))


def _takes(method: Compressor, case: Case) -> bool:
    """Whether a method compresses the units of a launch: low-rank methods send small ones exactly."""
    return isinstance(method, Codec) or type(method.fit(case.shape)) is type(method)


def _times(session: Session, arena: Arena, method: Compressor, works: Sequence[StageKind], case: Case) -> list[Timed]:
    """The times of all works of a launch. Collective; the slowest rank counts."""
    starts = arena.starts(case.units * case.numel * case.sources, case.sets * _rounds(session))
    if isinstance(method, Codec):
        calls = [[bound(arena, method, work, case, start) for start in starts] for work in works]
        return timed(session, arena, calls, case.sets)
    messages = [low_rank_message(session, arena, method, case, start) for start in starts]
    kinds = [stage.spec.kind for stage in messages[0].stages]
    at = [index for index, kind in enumerate(kinds) if kind in works]
    stages = [[message.stages[index].work for message in messages] for index in at]
    times = dict(zip(at, timed(session, arena, stages, case.sets), strict=True))
    return [_mean([time for index, time in times.items() if kinds[index] == work]) for work in works]


def _mean(times: Sequence[Timed]) -> Timed:
    wall_s, cores_s = (statistics.mean(column) for column in zip(*times, strict=True))
    return wall_s, cores_s


def _rounds(session: Session) -> int:
    """The rounds of a moment."""
    return -(-session.extent.rounds // _MOMENTS)


def timed(session: Session, arena: Arena, works: Sequence[Sequence[Work]], sets: int) -> list[Timed]:
    """Seconds and CPU seconds of a call, for each kind of work. Collective; the slowest rank counts.

    Calls have buffers of their own, which are in no cache. Each kind has several rounds of ``sets`` calls, of which the
    quickest one counts: a pause of the machine is longer than a call.
    """
    for calls in works:
        for call in calls:
            call()  # buffers get their memory in the first call
    quick: list[float] = []
    for calls in works:
        rounds = []
        arena.flush()
        for first in range(0, sets * _rounds(session), sets):
            arena.flush(whole=False)
            watch = Stopwatch(arena.device, session.clock)
            watch.mark()
            for index in range(first, first + sets):
                calls[index % len(calls)]()
            watch.mark()
            rounds.append((watch.seconds()[-1] / sets, watch.cores_s() / sets))
        quick += min(rounds)
    slowest = session.ranks.slowest(quick)
    return list(zip(slowest[::2], slowest[1::2], strict=True))


def _model(
    method: Compressor,
    work: StageKind,
    place: Place,
    cases: Sequence[Case],
    times: Sequence[Timed],
    apart: Sequence[float],
) -> CodecModel:
    """The model of a work. Its error is that at held-out sizes, or that of its moments if they are further apart."""
    coefficients, error = coefficients_of(
        [_sample(method, case, wall_s) for case, (wall_s, _) in zip(cases, times, strict=True)]
    )
    return CodecModel(
        method,
        work,
        place,
        coefficients,
        statistics.median(cores_s / wall_s for wall_s, cores_s in times),
        max(case.units for case in cases),
        max(case.elements for case in cases),
        max(case.sources for case in cases),
        max(error or 0.0, statistics.median(apart)),
    )


def _sample(method: Compressor, case: Case, seconds: float) -> LaunchSample:
    sides = 0.0 if isinstance(method, Codec) else float(case.units * sum(case.shape))
    return LaunchSample(case.units, case.units * case.numel, case.sources, seconds, sides)
