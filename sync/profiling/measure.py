"""The measurement of a profile: its parts, the most informative ones first."""

from __future__ import annotations

import datetime
import json
import platform
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
import torch.distributed as dist

import gckernels
from gckernels.compressor import Compressor
from gckernels.method import Method
from gckernels.ops import Identity

from ..messages.exchanges import Exchange
from ..planner.machine import Overheads, Shared
from ..planner.machines.curves import CodecModel, CollectiveCurve, CopyCurve
from ..planner.machines.profile import Profile, Stamp
from ..programs.stages import StageKind
from ..programs.steps import AllGather, AllReduce, AllToAll, Collective, Level, Place
from ..programs.topology import Topology
from ..resources.collectives import exchange_text
from ..resources.communicators import Communicators
from ..resources.cores import Cores, running_s
from ..resources.places import Places
from .codecs import measure_codecs, works_of
from .collective_trains import CollectiveTrains, doubt_slow
from .collectives import BY_USE, connect, levels_of, measure_sharing, sharing_s
from .contention import Helper, measure_taken
from .copies import measure_copies
from .launches import Case, bound
from .memory import Arena, far_nbytes
from .overheads import measure_overheads
from .ranks import Budget, Clock, Ranks, TimedRanks
from .session import MI, Extent, Session
from .trains import calls_of, wire_nbytes

_FIRST, _SECOND = (AllReduce, AllGather), (AllToAll,)
_CODEC_S, _SHORT_S, _CONTENTION_S = 0.5, 0.3, 0.5  # expected of the first part of each kind
_LEAVES = 5  # something must be left for what follows
_LEAST_CURVE_S = 0.4  # in less time a curve has no large sizes, and its small ones differ by chance
_BESIDE_S = 0.003  # seconds of the collective that runs beside a backward at most
_WAITS = 0.1  # cores that a collective keeps busy at least; the others mostly wait, and take nothing that shows
_USUAL = 8
"""Compressors that are measured between collectives. More of them come when nothing else is left but adding."""
_BOTH_ENDS = (StageKind.ENCODE, StageKind.DECODE, StageKind.PROJECT, StageKind.RECONSTRUCT)
_BETWEEN: tuple[tuple[StageKind, ...], ...] = ((StageKind.RECODE,), (StageKind.ADD,))  # most programs do without


@dataclass
class _Found:
    """Everything that has been measured so far."""

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

    def note_taken(self, session: Session, kind: str, amount: float | None) -> None:
        """Note what a backward loses to work of a kind beside it; ``None`` if that was disturbed."""
        if amount is None:
            session.left_out.append(f"what a backward loses beside work of kind {kind!r}: its measurements disagree")
        else:
            self.taken[kind] = amount


def measure_profile(
    group: dist.ProcessGroup,
    device: torch.device,
    topology: Topology,
    compressors: Sequence[Method],
    seconds: float,
    extent: Extent | None = None,
    progress: Callable[[float, str], object] = lambda share, name: None,
    clock: Clock = time.monotonic,
) -> Profile:
    """A new profile, the same on all ranks. Collective.

    Args:
        group: all ranks.
        device: the device of the gradients.
        topology: topology of the ranks.
        compressors: the compressors to measure, before they are fitted to a shape.
        seconds: the budget.
        extent: how much is measured; by default as much as the budget suggests.
        progress: called with the share of the budget that is spent, and the name of the part that begins.
        clock: returns seconds.
    """
    budget = Budget(seconds, Ranks(group, device), clock)
    ranks = TimedRanks(group, device, lambda: budget.is_over)
    cores = Cores.of(group, device)
    session = Session(
        ranks,
        budget,
        Places.of(device),
        topology,
        extent or Extent.of(seconds),
        progress,
        lambda: running_s() * cores.slowdown,
    )
    hosts = tuple(exchange_text(group, device, platform.node()))
    found = _Found()
    communicators = connect(session)
    try:
        _measure(session, communicators, compressors, cores.least, found)
    finally:
        communicators.close()
    stamp = Stamp(
        hosts=hosts,
        device=device_name(device),
        backend=dist.get_backend(group),
        torch=torch.__version__,
        gckernels=gckernels.__version__,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        seconds=round(budget.spent_s, 1),
    )
    profile = Profile(
        name=f"{topology.machines} x {topology.devices} ranks on {hosts[0]}, {stamp.backend}",
        topology=topology,
        computes_on=Shared.DEVICE if session.places.apart else Shared.CORES,
        cores=cores.least,
        overheads=found.overheads,
        collectives=tuple(found.collectives),
        codecs=tuple(found.codecs),
        copies=tuple(found.copies),
        sharing=found.sharing,
        taken=found.taken,
        left_out=tuple(session.left_out),
        stamp=stamp,
    )
    return _of_first(ranks, profile)


def device_name(device: torch.device) -> str:
    """The name of a device, for people and for finding profiles."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"


def _of_first(ranks: Ranks, profile: Profile) -> Profile:
    """The profile of rank 0, whose clock has decided what to leave out."""
    return Profile.from_json(json.loads(ranks.first_text(json.dumps(profile.to_json()))))


# -------------------------------------------------------------------- parts


def _measure(
    session: Session, communicators: Communicators, compressors: Sequence[Method], cores: float, found: _Found
) -> None:
    """Measure everything in the order of its use, as long as the budget allows.

    Prices that most plans need are measured twice, with other measurements in between. The slow-down of backward comes
    after all prices that every plan needs: without it, plans are predicted to be too fast by a part of what they hide,
    but without the price of a compressor its plans are compared by chance. Adding comes last: few plans add, and
    without its price those of decoding and encoding say much the same.
    """

    def overheads() -> None:
        found.overheads = measure_overheads(session)

    session.part("overheads", "overheads of the engine", overheads, _SHORT_S)
    levels = levels_of(session.topology)
    _collectives(session, communicators, [kind(levels[0]) for kind in _FIRST], Place.DEVICE, found)  # most plans
    extent = session.extent
    most = max(extent.elements + tuple(elements for _, elements in extent.many))
    arena = Arena(session.places.device, most, far_nbytes(session.places.device, extent.far_caches))
    _copies(session, arena, found)  # short, and every plan needs their price
    usual, more = compressors[:_USUAL], compressors[_USUAL:]
    half = -(-len(usual) // 2)
    _codecs(session, arena, usual[:half], _BOTH_ENDS, Place.DEVICE, found)
    _collectives(session, communicators, [kind(levels[0]) for kind in _SECOND], Place.DEVICE, found)
    _codecs(session, arena, usual[half:], _BOTH_ENDS, Place.DEVICE, found)
    _again(session, found.trains)
    _contention_of_collectives(session, communicators, cores, found)
    _contention_of_codecs(session, arena, compressors, cores, found)
    _sharing(session, communicators, found, levels[:1])
    others = [kind(level) for level in levels[1:] for kind in _FIRST + _SECOND]
    _collectives(session, communicators, others, Place.DEVICE, found)
    _sharing(session, communicators, found, levels[1:])
    _again(session, found.trains)
    rest = [kind(level) for kind in BY_USE if kind not in _FIRST + _SECOND for level in levels]
    _collectives(session, communicators, rest, Place.DEVICE, found)
    recoding, adding = _BETWEEN
    _codecs(session, arena, usual, recoding, Place.DEVICE, found)
    if session.places.apart:
        on_host = [kind(level) for kind in BY_USE for level in levels]
        _collectives(session, communicators, on_host, Place.HOST, found)
        on_host_arena = Arena(session.places.host, most, far_nbytes(session.places.host, extent.far_caches))
        for works in (_BOTH_ENDS, *_BETWEEN):
            _codecs(session, on_host_arena, usual, works, Place.HOST, found)
    doubt_slow(found.trains)
    _again(session, found.trains)
    session.left_out += [f"{each} at another moment: no time" for each in found.trains if each.moments == 1]
    for method in more:
        _whole_codec(session, arena, method, found)
    _codecs(session, arena, usual, adding, Place.DEVICE, found)


def _collectives(
    session: Session, communicators: Communicators, steps: Sequence[Collective], place: Place, found: _Found
) -> None:
    """Some collectives for the first time, among which most of the time that is left is divided."""
    for index, step in enumerate(steps):
        left_s = session.budget.left_s() / (_LEAVES * (len(steps) - index))
        curve_s = min(session.extent.curve_s, max(left_s, _LEAST_CURVE_S))
        trains = CollectiveTrains(session, communicators, step, place, curve_s)
        session.part(str(trains), str(trains), trains.begin, curve_s / 2)
        if trains.curve is not None:
            found.trains.append(trains)


def _again(session: Session, trains: Sequence[CollectiveTrains]) -> None:
    """Some collectives at another moment, as far as it is needed and the budget allows."""
    for each in trains:
        if each.disputed and session.budget.allows(each.again_s):
            name = f"{each} at another moment"
            session.part(name, name, each.again)


def _codecs(
    session: Session,
    arena: Arena,
    compressors: Sequence[Method],
    measured: Collection[StageKind],
    place: Place,
    found: _Found,
) -> None:
    """Some works of all compressors."""
    for method in compressors:
        works = [work for work in works_of(method) if work in measured]
        each = [[work] for work in works] if isinstance(method, Compressor) else [works]
        for chosen in filter(None, each):

            def measure(method: Method = method, chosen: Sequence[StageKind] = chosen) -> None:
                found.codecs.extend(measure_codecs(session, arena, method, chosen, place))

            name = f"{' and '.join(work.value for work in chosen)} of {method}"
            session.part("codec", name if place == Place.DEVICE else f"{name} ({place.value})", measure, _CODEC_S)


def _whole_codec(session: Session, arena: Arena, method: Method, found: _Found) -> None:
    """Everything but the adding of a compressor."""
    recoding, _ = _BETWEEN
    works = [work for work in works_of(method) if work in _BOTH_ENDS + recoding]

    def measure() -> None:
        found.codecs.extend(measure_codecs(session, arena, method, works, Place.DEVICE))

    session.part("compressor", str(method), measure, len(works) * _CODEC_S)


def _sharing(session: Session, communicators: Communicators, found: _Found, levels: Collection[Level]) -> None:
    for curve in list(found.collectives):
        if curve.step == AllGather.__name__ and curve.level in levels:

            def measure(curve: CollectiveCurve = curve) -> None:
                found.sharing[curve.level] = measure_sharing(session, communicators, curve)

            session.part("sharing", f"two collectives at once, {curve.level.value}", measure, sharing_s(curve))


def _contention_of_collectives(session: Session, communicators: Communicators, cores: float, found: _Found) -> None:
    """The slow-down of backward by collectives of both kinds: for each the largest one that is short.

    Averages of raw gradients are computed by threads of the backend. Exchanges of payloads only move data.
    """
    for kind, step in (("collective", AllReduce()), ("exchange", AllGather())):
        curve = next((each.curve for each in found.collectives if each.step == type(step).__name__), None)
        if curve is None:
            continue
        size = max(int(np.searchsorted(curve.wall_s, _BESIDE_S)) - 1, 0)
        wall_s, cores_s = curve.wall_s[size], curve.cores_s[size]
        if cores_s < _WAITS * wall_s:
            continue
        nbytes = round(curve.nbytes[size] * MI / wire_nbytes(step, MI, session.topology))
        calls = calls_of(step, nbytes, communicators, Place.DEVICE, 0)

        def measure(
            kind: str = kind, calls: Sequence[Exchange] = calls, wall_s: float = wall_s, cores_s: float = cores_s
        ) -> None:
            found.note_taken(session, kind, measure_taken(session, calls, cores, wall_s, cores_s))

        session.part("contention", f"backward beside {type(step).__name__}", measure, _CONTENTION_S)


def _contention_of_codecs(
    session: Session, arena: Arena, compressors: Sequence[Method], cores: float, found: _Found
) -> None:
    """The slow-down of a device's backward by the first compressor that computes.

    On the CPU a codec takes its processor time from backward and nothing else. Measurements around that value said more
    about the caches of this backward, which is smaller than a model's.
    """
    if not session.places.apart:
        return
    encoders = [each for each in found.codecs if each.work == StageKind.ENCODE]
    model = next((each for each in encoders if not isinstance(each.compressor, Identity)), None)
    if model is None or not isinstance(model.compressor, Compressor):
        return
    method, case, helper = model.compressor, Case(1, min(MI, arena.numel)), Helper()
    encodes = [bound(arena, method, StageKind.ENCODE, case, start) for start in arena.starts(case.numel, 8)]
    (alone_s,) = model.coefficients.seconds(np.ones(1), np.full(1, float(case.numel)), 1).tolist()

    def measure() -> None:
        starts = [partial(helper.start, encode) for encode in encodes]
        taken = measure_taken(session, starts, cores, alone_s, model.cores * alone_s)
        found.note_taken(session, "codec", taken)

    session.part("contention", f"backward beside {method}", measure, _CONTENTION_S)
    helper.close()


def _copies(session: Session, arena: Arena, found: _Found) -> None:
    resources = [Shared.DEVICE, Shared.TO_HOST, Shared.TO_DEVICE] if session.places.apart else [Shared.CORES]
    for resource in resources:

        def measure(resource: Shared = resource) -> None:
            found.copies.append(measure_copies(session, arena, resource))

        session.part("copy", f"copies, {resource.value}", measure, _SHORT_S)
