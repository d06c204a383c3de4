"""The parts of a profile: each is measured if there is time for it, and adds what it has found."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from gckernels.codec import Codec
from gckernels.compressor import Compressor
from gckernels.ops import Identity

from ..communication.communicators import Communicators
from ..planner.machines.curves import CodecModel, CollectiveCurve, CopyCurve
from ..planner.machines.machine import Overheads, Shared
from ..programs.stages import StageKind
from ..programs.steps import AllGather, AllReduce, Collective, Level, Place
from ..resources.stage import Issue
from .measurements.codecs import measure_codecs, works_of
from .measurements.collective_trains import CollectiveTrains
from .measurements.collectives import measure_sharing, sharing_s
from .measurements.contention import Helper, measure_taken
from .measurements.copies import measure_copies
from .measurements.launches import Case, bound
from .measurements.memory import Arena
from .measurements.overheads import measure_overheads
from .measurements.session import MI, Session
from .measurements.trains import calls_of, wire_nbytes

BOTH_ENDS = (StageKind.ENCODE, StageKind.DECODE, StageKind.PROJECT, StageKind.RECONSTRUCT)
BETWEEN: tuple[tuple[StageKind, ...], ...] = ((StageKind.RECODE,), (StageKind.ADD,))  # most programs do without
_CODEC_S, _SHORT_S, _CONTENTION_S = 0.5, 0.3, 0.5  # expected of the first part of each kind
_LEAVES = 5  # something must be left for what follows
_LEAST_CURVE_S = 0.4  # in less time a curve has no large sizes, and its small ones differ by chance
_BESIDE_S = 0.003  # seconds of the collective that runs beside a backward at most
_WAITS = 0.1  # cores that a collective keeps busy at least; the others mostly wait, and take nothing that shows


@dataclass
class Parts:
    """Measures the parts of a profile, and keeps what has been found so far. All methods are collective.

    Attributes:
        session: the measurement.
        communicators: the links.
        cores: cores of a rank, the fewest of any.
        overheads, trains, codecs, copies, sharing, taken: what has been found.
    """

    session: Session
    communicators: Communicators
    cores: float
    overheads: Overheads = field(default_factory=Overheads)
    trains: list[CollectiveTrains] = field(default_factory=list)
    codecs: list[CodecModel] = field(default_factory=list)
    copies: list[CopyCurve] = field(default_factory=list)
    sharing: dict[Level, float] = field(default_factory=dict)
    taken: dict[str, float] = field(default_factory=dict)

    @property
    def collectives(self) -> list[CollectiveCurve]:
        """The curves of collectives."""
        return [curve for each in self.trains if (curve := each.curve) is not None]

    def measure_overheads(self) -> None:
        """Measure the overheads of the engine."""

        def measure() -> None:
            self.overheads = measure_overheads(self.session)

        self.session.part("overheads", "overheads of the engine", measure, _SHORT_S)

    def measure_collectives(self, steps: Sequence[Collective], place: Place = Place.DEVICE) -> None:
        """Measure some collectives for the first time. They share most of the time that is left."""
        for index, step in enumerate(steps):
            left_s = self.session.budget.left_s() / (_LEAVES * (len(steps) - index))
            curve_s = min(self.session.extent.curve_s, max(left_s, _LEAST_CURVE_S))
            trains = CollectiveTrains(self.session, self.communicators, step, place, curve_s)
            self.session.part(str(trains), str(trains), trains.begin, curve_s / 2)
            if trains.curve is not None:
                self.trains.append(trains)

    def measure_again(self) -> None:
        """Measure the collectives at another moment, as far as it is needed and the budget allows."""
        for each in self.trains:
            if each.disputed and self.session.budget.allows(each.again_s):
                name = f"{each} at another moment"
                self.session.part(name, name, each.again)

    def measure_copies(self, arena: Arena) -> None:
        """Measure copies within a device and, if it has memory of its own, to and from the host."""
        apart = self.session.places.apart
        for resource in [Shared.DEVICE, Shared.TO_HOST, Shared.TO_DEVICE] if apart else [Shared.CORES]:

            def measure(resource: Shared = resource) -> None:
                self.copies.append(measure_copies(self.session, arena, resource))

            self.session.part("copy", f"copies, {resource.value}", measure, _SHORT_S)

    def measure_codecs(
        self,
        arena: Arena,
        methods: Sequence[Compressor],
        measured: Collection[StageKind],
        place: Place = Place.DEVICE,
    ) -> None:
        """Measure some works of all methods, each as a part of its own."""
        for method in methods:
            works = [work for work in works_of(method) if work in measured]
            each = [[work] for work in works] if isinstance(method, Codec) else [works]
            for chosen in filter(None, each):
                name = f"{' and '.join(work.value for work in chosen)} of {method}"
                name = name if place == Place.DEVICE else f"{name} ({place.value})"
                self._codec("codec", name, arena, method, chosen, place, _CODEC_S)

    def measure_whole_codec(self, arena: Arena, method: Compressor) -> None:
        """Measure everything but the adding of a method, as one part."""
        recoding, _ = BETWEEN
        works = [work for work in works_of(method) if work in BOTH_ENDS + recoding]
        self._codec("compressor", str(method), arena, method, works, Place.DEVICE, len(works) * _CODEC_S)

    def _codec(
        self,
        kind: str,
        name: str,
        arena: Arena,
        method: Compressor,
        works: Sequence[StageKind],
        place: Place,
        expected_s: float,
    ) -> None:
        def measure() -> None:
            self.codecs.extend(measure_codecs(self.session, arena, method, works, place))

        self.session.part(kind, name, measure, expected_s)

    def measure_sharing(self, levels: Collection[Level]) -> None:
        """Measure the share of some links that one collective can use."""
        for curve in self.collectives:
            if curve.step == AllGather.__name__ and curve.level in levels:

                def measure(curve: CollectiveCurve = curve) -> None:
                    self.sharing[curve.level] = measure_sharing(self.session, self.communicators, curve)

                self.session.part("sharing", f"two collectives at once, {curve.level.value}", measure, sharing_s(curve))

    def measure_beside_collectives(self) -> None:
        """Measure the slow-down of backward by collectives of both kinds: for each the largest one that is short.

        Averages of raw gradients are computed by threads of the backend. Exchanges of payloads only move data.
        """
        for kind, step in (("collective", AllReduce()), ("exchange", AllGather())):
            curve = next((each.curve for each in self.collectives if each.step == type(step).__name__), None)
            if curve is None:
                continue
            size = max(int(np.searchsorted(curve.wall_s, _BESIDE_S)) - 1, 0)
            wall_s, cores_s = curve.wall_s[size], curve.cores_s[size]
            if cores_s < _WAITS * wall_s:
                continue
            nbytes = round(curve.nbytes[size] * MI / wire_nbytes(step, MI, self.session.topology))
            calls = calls_of(step, nbytes, self.communicators, Place.DEVICE, 0)

            def measure(
                kind: str = kind, calls: Sequence[Issue] = calls, wall_s: float = wall_s, cores_s: float = cores_s
            ) -> None:
                self._note_taken(kind, measure_taken(self.session, calls, self.cores, wall_s, cores_s))

            self.session.part("contention", f"backward beside {type(step).__name__}", measure, _CONTENTION_S)

    def measure_beside_codecs(self, arena: Arena) -> None:
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
        method, case, helper = model.compressor, Case(1, min(MI, arena.numel)), Helper()
        encodes = [bound(arena, method, StageKind.ENCODE, case, start) for start in arena.starts(case.numel, 8)]
        (alone_s,) = model.coefficients.seconds(np.ones(1), np.full(1, float(case.numel)), 1).tolist()

        def measure() -> None:
            starts = [partial(helper.start, encode) for encode in encodes]
            self._note_taken("codec", measure_taken(self.session, starts, self.cores, alone_s, model.cores * alone_s))

        self.session.part("contention", f"backward beside {method}", measure, _CONTENTION_S)
        helper.close()

    def _note_taken(self, kind: str, amount: float | None) -> None:
        """Note what a backward loses to work of a kind beside it; ``None`` if that was disturbed."""
        if amount is None:
            text = f"what a backward loses beside work of kind {kind!r}: its measurements disagree"
            self.session.left_out.append(text)
        else:
            self.taken[kind] = amount
