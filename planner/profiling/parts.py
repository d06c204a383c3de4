"""The parts of a profile, the most informative ones first: each is measured if there is time for it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from gckernels.codec import Codec
from gckernels.compressor import Compressor
from gckernels.ops import Identity
from gckernels.sync.communication.communicators import Communicators
from gckernels.sync.programs.stages import StageKind
from gckernels.sync.programs.steps import AllGather, AllReduce, AllToAll, Collective, Level, Place
from gckernels.sync.resources.stage import Issue

from ..machines.curves import CodecModel, CollectiveCurve, CopyCurve, place_suffix
from ..machines.machine import BAD_ERROR, Overheads, Shared
from .measurements.codec_times import CodecTimes
from .measurements.codecs import Case, bound, works_of
from .measurements.collective_trains import CollectiveTrains
from .measurements.collectives import BY_USE, calls_of, levels_of, measure_sharing, wire_nbytes
from .measurements.contention import measure_taken
from .measurements.memory import Arena, CopyTimes, far_nbytes
from .measurements.overheads import measure_overheads
from .measurements.session import MI, Session

_FIRST, _SECOND = (AllReduce, AllGather), (AllToAll,)
_USUAL = 8
"""Compressors that are measured between collectives. More of them come when nothing else is left but adding."""
_NEEDED = 2
"""The first ones of them, without which no plan would compress anything."""
_BOTH_ENDS = (StageKind.ENCODE, StageKind.DECODE, StageKind.PROJECT, StageKind.RECONSTRUCT)
_LEAVES = 5  # something must be left for what follows
_LEAST_CURVE_S = 0.4  # in less time a curve has no large sizes, and its small ones differ by chance
_BESIDE_S = 0.003  # seconds of the collective that runs beside a backward at most
_LAST_MOMENTS = 10  # at which something disturbed is measured at the end
_WAITS = 0.1  # cores that a collective keeps busy at least; the others mostly wait, and take nothing that shows


@dataclass
class Parts:
    """Measures the parts of a profile, and keeps what has been found so far. All methods are collective."""

    session: Session  # the measurement
    communicators: Communicators  # the links
    cores: float  # cores of a rank, the fewest of any
    # from here on, measurements
    overheads: Overheads = field(default_factory=Overheads)
    trains: list[CollectiveTrains] = field(default_factory=list)
    codec_times: list[CodecTimes] = field(default_factory=list)
    copy_times: list[CopyTimes] = field(default_factory=list)
    sharing: dict[Level, float] = field(default_factory=dict)
    taken: dict[str, float] = field(default_factory=dict)

    @property
    def collectives(self) -> list[CollectiveCurve]:
        """The curves of collectives."""
        return [curve for each in self.trains if (curve := each.curve) is not None]

    @property
    def codecs(self) -> list[CodecModel]:
        """The models of codecs."""
        return [model for each in self.codec_times for model in each.models]

    @property
    def copies(self) -> list[CopyCurve]:
        """The curves of copies."""
        return [each.curve for each in self.copy_times]

    def measure(self, compressors: Sequence[Compressor]) -> None:
        """Measure everything in the order of its use, as long as there is time.

        The needs of every plan come first, and the first compressors. They are measured however little time there is.
        Then come the other compressors, with other measurements in between, and everything that was disturbed is
        measured again, at first what has a bad error and every plan needs. The slow-down of backward
        comes after all prices that every plan needs: without it, plans are predicted to be too fast by a part of what
        they hide, but without the price of a compressor its plans are compared by chance. Adding comes last: few plans
        add, and without its price those of decoding and encoding say much the same. The rest of the time is spent on
        what is still disturbed.
        """
        session = self.session
        levels, places = levels_of(session.topology), session.places
        found = session.part("overheads of the engine", partial(measure_overheads, session), is_needed=True)
        self.overheads = found or self.overheads
        self._measure_collectives([kind(levels[0]) for kind in _FIRST], is_needed=True)
        arena = self._arena(Place.DEVICE)
        self._measure_copies(arena)
        self._measure_again(BAD_ERROR, is_needed=True)
        others = [each for each in compressors if each != Identity()]
        usual, more = others[: _USUAL - 1], others[_USUAL - 1 :]
        half = -(-len(usual) // 2)
        self._measure_codecs(arena, [Identity(), *usual[:_NEEDED]], _BOTH_ENDS, is_needed=True)
        self._measure_again(BAD_ERROR)
        self._measure_codecs(arena, usual[_NEEDED:half], _BOTH_ENDS)
        self._measure_collectives([kind(levels[0]) for kind in _SECOND])
        self._measure_codecs(arena, usual[max(half, _NEEDED) :], _BOTH_ENDS)
        self._measure_again()
        self._measure_beside_collectives()
        self._measure_beside_codecs(arena)
        self._measure_sharing(levels[:1])
        self._measure_collectives([kind(level) for level in levels[1:] for kind in _FIRST + _SECOND])
        self._measure_sharing(levels[1:])
        self._measure_again()
        rest = [kind for kind in BY_USE if kind not in _FIRST + _SECOND]
        self._measure_collectives([kind(level) for kind in rest for level in levels])
        self._measure_codecs(arena, usual, (StageKind.RECODE,))
        if places.apart:
            self._measure_collectives([kind(level) for kind in BY_USE for level in levels], Place.HOST)
            on_host = self._arena(Place.HOST)
            for works in (_BOTH_ENDS, (StageKind.RECODE,), (StageKind.ADD,)):
                self._measure_codecs(on_host, [Identity(), *usual], works, Place.HOST)
        self._measure_again()
        self._measure_codecs(arena, more, (*_BOTH_ENDS, StageKind.RECODE))
        self._measure_codecs(arena, [Identity(), *usual], (StageKind.ADD,))
        for _ in range(_LAST_MOMENTS):
            self._measure_again()

    def _arena(self, place: Place) -> Arena:
        extent, device = self.session.extent, self.session.places.memory(place)
        most = max(extent.elements + tuple(elements for _, elements in extent.many))
        return Arena(device, most, far_nbytes(device, extent.far_caches))

    def _measure_collectives(
        self, steps: Sequence[Collective], place: Place = Place.DEVICE, *, is_needed: bool = False
    ) -> None:
        """Measure some collectives for the first time. They share most of the time that is left."""
        for index, step in enumerate(steps):
            left_s = self.session.left_s() / (_LEAVES * (len(steps) - index))
            curve_s = min(self.session.extent.curve_s, max(left_s, _LEAST_CURVE_S))
            trains = CollectiveTrains(self.session, self.communicators, step, place, curve_s)
            self.session.part(str(trains), partial(trains.begin, is_needed), is_needed=is_needed)
            if trains.curve is not None:
                self.trains.append(trains)

    @property
    def _disputed(self) -> list[CollectiveTrains | CopyTimes | CodecTimes]:
        """The measurements of which something was disturbed, or was measured at one moment only."""
        found: list[CollectiveTrains | CopyTimes | CodecTimes] = [*self.trains, *self.copy_times, *self.codec_times]
        return [each for each in found if each.disputed]

    def _measure_again(self, least_error: float = 0.0, *, is_needed: bool = False) -> None:
        """Measure what is disputed, and has at least some error, at another moment."""
        for each in self._disputed:
            if each.error is None or each.error >= least_error:
                self.session.part(f"{each} at another moment", each.again, is_needed=is_needed)

    def _measure_copies(self, arena: Arena) -> None:
        """Measure copies within a device and, if it has memory of its own, to and from the host."""
        apart = self.session.places.apart
        for resource in [Shared.DEVICE, Shared.TO_HOST, Shared.TO_DEVICE] if apart else [Shared.CORES]:
            measure = partial(CopyTimes.measured, self.session, arena, resource)
            if (found := self.session.part(f"copies, {resource.value}", measure, is_needed=True)) is not None:
                self.copy_times.append(found)

    def _measure_codecs(
        self,
        arena: Arena,
        methods: Sequence[Compressor],
        measured: Collection[StageKind],
        place: Place = Place.DEVICE,
        *,
        is_needed: bool = False,
    ) -> None:
        """Measure some works of all methods, each method as a part of its own."""
        for method in methods:
            works = [work for work in works_of(method) if work in measured]
            name = f"{' and '.join(work.value for work in works)} of {method}{place_suffix(place)}"
            if works:
                measure = partial(CodecTimes.measured, self.session, arena, method, works, place)
                self.codec_times += self.session.part(name, measure, is_needed=is_needed) or []

    def _measure_sharing(self, levels: Collection[Level]) -> None:
        """Measure the share of some links that one collective can use."""
        for curve in self.collectives:
            if curve.step == AllGather.__name__ and curve.level in levels:
                measure = partial(measure_sharing, self.session, self.communicators, curve)
                share = self.session.part(f"two collectives at once, {curve.level.value}", measure)
                if share is not None:
                    self.sharing[curve.level] = share

    def _measure_beside_collectives(self) -> None:
        """Measure the slow-down of backward by collectives of both kinds: for each the largest one that is short.

        Averages of raw gradients are computed by threads of the backend. Exchanges of payloads only move data.
        """
        for kind, step in (("collective", AllReduce()), ("exchange", AllGather())):
            name = type(step).__name__
            curve = next((each.curve for each in self.collectives if each.step == name), None)
            if curve is None:
                continue
            size = max(int(np.searchsorted(curve.wall_s, _BESIDE_S)) - 1, 0)
            wall_s, cores_s = curve.wall_s[size], curve.cores_s[size]
            if cores_s >= _WAITS * wall_s:
                nbytes = round(curve.nbytes[size] * MI / wire_nbytes(step, MI, self.session.topology))
                calls = calls_of(step, nbytes, self.communicators, Place.DEVICE, 0)
                self._measure_beside(kind, name, calls, wall_s, cores_s)

    def _measure_beside_codecs(self, arena: Arena) -> None:
        """Measure the slow-down of a device's backward by the first compressor that computes.

        On the CPU a codec takes its processor time from backward and nothing else. Measurements around that value said
        more about the caches of this backward, which is smaller than a model's.
        """
        if not self.session.places.apart:
            return
        encoders = [each for each in self.codecs if each.work == StageKind.ENCODE]
        model = next((each for each in encoders if not isinstance(each.compressor, Identity)), None)
        if model is None or not isinstance(model.compressor, Codec):
            return
        method, case = model.compressor, Case(1, min(MI, arena.numel))
        encodes = [bound(arena, method, StageKind.ENCODE, case, start) for start in arena.starts(case.numel, 8)]
        (alone_s,) = model.coefficients.seconds(np.ones(1), np.full(1, float(case.numel)), 1).tolist()
        with ThreadPoolExecutor(1) as lane:
            starts: list[Issue] = [lambda encode=encode: lane.submit(encode).result for encode in encodes]  # type: ignore[misc]
            self._measure_beside("codec", str(method), starts, alone_s, model.cores * alone_s)

    def _measure_beside(self, kind: str, name: str, starts: Sequence[Issue], alone_s: float, cores_s: float) -> None:
        """Measure what a backward loses to work of a kind beside it."""

        def measure() -> None:
            amount = measure_taken(self.session, starts, self.cores, alone_s, cores_s)
            if amount is None:
                text = f"what a backward loses beside work of kind {kind!r}: its measurements disagree"
                self.session.left_out.append(text)
            else:
                self.taken[kind] = amount

        self.session.part(f"backward beside {name}", measure)
