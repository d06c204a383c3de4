"""Which step may follow which: the one set of rules behind every program.

A *flow* is where the data of a unit is between two steps, whatever its size: raw or encoded, which levels' ranks have
their contributions in it, and which levels have a part of it only. :func:`advance` takes it through a step or says why
it cannot. Programs are checked by it (:func:`~.layouts.propagate`) and enumerated by it
(:func:`~.enumeration.enumerate_programs`).

The rules, in short. Contributions of a level are merged once: of all ranks at once (flat), or inside the machines first
and between them afterwards. Inside a machine they are merged in parts, or at a root, and what has been parted or rooted
is gathered or broadcast again after everything has been merged, the last one first. Raw data is merged by adding up;
payloads travel side by side until they are decoded, unless they are such that add up. What is encoded is sent before it
is decoded.

And what is encoded lies where that was done, until it is decoded at the other place; raw data that is sent lies on the
device, and so does the mean in the end. Where a step finds its data at the other place it is copied there first.

The tree of options is that of Espresso (Wang et al., EuroSys 2023, section 4.1), the ring that of CaSync (Bai et al.,
SOSP 2021, section 3).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .steps import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Decode,
    Encode,
    Gather,
    Hop,
    Level,
    Place,
    Program,
    ProgramError,
    Reduce,
    ReduceScatter,
    Step,
)
from .topology import Topology

COMPLETE = (frozenset({Level.FLAT}), frozenset({Level.INTRA, Level.INTER}))
_BEFORE = {Level.FLAT: frozenset(), Level.INTRA: frozenset(), Level.INTER: frozenset({Level.INTRA})}


@dataclass(frozen=True)
class Opened:
    """A level of which each rank has a shard (``split``), or of which one rank has everything, the others nothing."""

    level: Level
    split: bool


@dataclass(frozen=True)
class Flow:
    """Where the data of a unit is.

    Attributes:
        encoded: payloads, not numbers.
        fresh: encoded, and nothing of it has been sent.
        merged: the levels whose ranks' contributions are in it, added up or side by side.
        opened: the levels that have to be gathered or broadcast again, the last one first.
        hops: how many of a ring's have been made, if it is not closed yet.
        place: where it lies.
    """

    encoded: bool = False
    fresh: bool = False
    merged: frozenset[Level] = frozenset()
    opened: tuple[Opened, ...] = ()
    hops: int = 0
    place: Place = Place.DEVICE

    @property
    def complete(self) -> bool:
        """The contributions of all ranks are in it."""
        return self.merged in COMPLETE

    @property
    def done(self) -> bool:
        """Every rank has the mean."""
        return self.complete and not self.opened and not self.encoded


def advance(flow: Flow, step: Step, topology: Topology, summable: bool) -> Flow:
    """Where the data is after ``step``.

    Args:
        flow: where it is before.
        step: the next one.
        topology: how many hops a ring takes.
        summable: payloads can be added up.

    Raises:
        ProgramError: the step cannot follow; the message says why and does not name the step.
    """
    if flow.hops and step != Hop(flow.opened[-1].level):
        raise ProgramError("the ring is not closed")
    return replace(_advance(flow, step, topology, summable), place=needed_at(flow, step))


def needed_at(flow: Flow, step: Step | None) -> Place:
    """Where ``step``, or what comes after the last one, needs the data that is at ``flow``."""
    if isinstance(step, Encode | Decode):
        return step.place
    return flow.place if flow.encoded else Place.DEVICE


Site = tuple[int, Level, Place]
"""Where a collective takes place: how many others precede it in its program, its level, and where the data lies."""


def sites(program: Program) -> list[Site]:
    """Those of a program that has been checked."""
    flow = Flow()
    found: list[Site] = []
    for step in program:
        place = needed_at(flow, step)
        if isinstance(step, Encode | Decode):
            flow = replace(flow, encoded=isinstance(step, Encode), place=place)
        else:
            found.append((len(found), step.level, place))
    return found


def _advance(flow: Flow, step: Step, topology: Topology, summable: bool) -> Flow:
    match step:
        case Encode():
            if flow.encoded:
                raise ProgramError("the data is encoded already")
            if flow.complete and not flow.opened:
                raise ProgramError("every rank has the mean, nothing is left to send")
            return replace(flow, encoded=True, fresh=True)
        case Decode():
            if not flow.encoded:
                raise ProgramError("the data is not encoded")
            if flow.fresh:
                raise ProgramError("nothing has been sent since it was encoded")
            return replace(flow, encoded=False)
        case AllReduce(level):
            _refuse_inside(level, "reduced")
            if flow.encoded and not (summable and flow.fresh):
                raise ProgramError("these payloads cannot be added" if summable else "payloads cannot be added")
            return _merge(flow, level)
        case ReduceScatter(level) | Reduce(level):
            if flow.encoded:
                raise ProgramError("payloads are exchanged or gathered, not reduced")
            return _open(_merge(flow, level), level, isinstance(step, ReduceScatter))
        case AllToAll(level) | Gather(level):
            if not flow.encoded:
                raise ProgramError("raw data is reduced, not exchanged or gathered")
            return _open(_merge(flow, level), level, isinstance(step, AllToAll))
        case AllGather(level) if flow.opened[-1:] == (Opened(level, True),):
            return _close(flow)
        case AllGather(level):
            if not flow.encoded:
                raise ProgramError("raw data is reduced, not gathered")
            _refuse_inside(level, "gathered")
            return _merge(flow, level)
        case Broadcast(level):
            if flow.opened[-1:] != (Opened(level, False),):
                raise ProgramError("no root has what the others have not")
            return _close(flow)
        case Hop(level):
            return _hop(flow, level, topology.size(level))
    raise ProgramError("not a step")


def _refuse_inside(level: Level, done: str) -> None:
    if level == Level.INTRA:
        raise ProgramError(f"inside a machine the data is merged in shards or at a root, not {done} as a whole")


def _merge(flow: Flow, level: Level) -> Flow:
    if flow.merged != _BEFORE[level]:
        merged = " and ".join(sorted(each.value for each in flow.merged)) or "nothing"
        wanted = " and ".join(sorted(each.value for each in _BEFORE[level])) or "nothing"
        raise ProgramError(f"{level.value} comes when {wanted} has been merged, here it is {merged}")
    return replace(flow, fresh=False, merged=flow.merged | {level})


def _open(flow: Flow, level: Level, split: bool) -> Flow:
    return replace(flow, opened=(*flow.opened, Opened(level, split)))


def _close(flow: Flow) -> Flow:
    if not flow.complete:
        raise ProgramError("not all ranks' contributions have been merged")
    return replace(flow, fresh=False, opened=flow.opened[:-1])


def _hop(flow: Flow, level: Level, size: int) -> Flow:
    if not flow.fresh:
        raise ProgramError("a ring begins with what has just been encoded")
    if size < 2:
        raise ProgramError("a ring takes two ranks or more")
    merged = replace(_merge(flow, level), fresh=True)
    opened = flow if flow.hops else _open(flow, level, True)
    if flow.hops + 1 < size - 1:
        return replace(opened, hops=flow.hops + 1)
    return replace(merged, opened=opened.opened, hops=0)
