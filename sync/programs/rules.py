"""The rules for the order of steps, which define all valid programs.

A *flow* describes the data of a unit between two steps, whatever its size: raw or encoded, the levels whose ranks have
contributed to it, and the levels whose ranks have only a part of it. :func:`advance` takes a flow through a step, or
says why the step cannot follow. It checks programs (:func:`~.layouts.propagate`) and enumerates them
(:func:`~.enumeration.enumerate_programs`).

The rules, in short:

- The contributions of a level are merged once: either those of all ranks together (flat), or first inside the machines
  and then between them.
- Inside a machine, contributions are merged in shards or at a root. After all contributions have been merged, shards
  are gathered and roots broadcast, in the reverse order.
- Raw data is merged by addition. Payloads travel side by side until they are decoded, unless they can be added.
- Encoded data is sent before it is decoded.
- A payload stays where it was encoded (device or host) until it is decoded at the other place. Raw data is sent from
  the device, and the final mean is on the device. Data at the wrong place for a step is copied first.

The tree of options is that of Espresso (Wang et al., EuroSys 2023, section 4.1), the ring that of CaSync (Bai et al.,
SOSP 2021, section 3).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, Never, NoReturn

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
    """A level that is merged but not yet gathered or broadcast."""

    level: Level
    split: bool  # whether each of its ranks has a shard; if not, the root has everything and the others nothing


@dataclass(frozen=True)
class Flow:
    """The state of a unit's data between two steps."""

    encoded: bool = False  # whether the data is payloads, not numbers
    fresh: bool = False  # whether it is encoded and nothing of it has been sent
    merged: frozenset[Level] = frozenset()
    """The levels whose ranks have contributed, with contributions added or side by side."""
    opened: tuple[Opened, ...] = ()  # the levels that are still to be gathered or broadcast; the last one comes first
    hops: int = 0  # number of hops made in a ring that is not closed yet
    place: Place = Place.DEVICE  # where the data lies

    @property
    def complete(self) -> bool:
        """Whether all ranks have contributed."""
        return self.merged in COMPLETE


START = Flow()
"""The state in which programs for gradients begin: every rank has its own data of the whole unit."""


def advance(flow: Flow, step: Step, topology: Topology, summable: bool) -> Flow:
    """The flow after ``step``.

    Args:
        flow: the flow before it.
        step: the next step.
        topology: topology of the ranks, on which the number of hops in a ring depends.
        summable: whether payloads can be added.

    Raises:
        ProgramError: the step cannot follow. The message gives the reason without naming the step.
    """
    if flow.hops and step != Hop(flow.opened[-1].level):
        raise ProgramError("the ring is not closed")
    after, place = _advance(flow, step, topology, summable), needed_at(flow, step)
    return after if after.place == place else replace(after, place=place)


def needed_at(flow: Flow, step: Step | None) -> Place:
    """The place where ``step`` needs the data; for ``None``, the place where it must be after the last step."""
    if isinstance(step, Encode | Decode):
        return step.place
    return flow.place if flow.encoded else Place.DEVICE


class Site(NamedTuple):
    """The site of a collective."""

    phase: int  # number of collectives before it in its program
    level: Level  # the ranks that take part
    place: Place  # the place of its data
    exchanges: bool  # whether every rank sends and receives different data, which needs connections for both directions


def sites(program: Program) -> list[Site]:
    """The sites of all collectives of a valid program."""
    flow = START
    found: list[Site] = []
    for step in program:
        place = needed_at(flow, step)
        if isinstance(step, Encode | Decode):
            flow = replace(flow, encoded=isinstance(step, Encode), place=place)
        else:
            found.append(Site(len(found), step.level, place, isinstance(step, AllGather | AllToAll | Hop)))
    return found


def _advance(flow: Flow, step: Step, topology: Topology, summable: bool) -> Flow:
    match step:
        case Encode():
            if flow.encoded:
                raise ProgramError("the data is encoded already")
            if flow.complete and not flow.opened:
                raise ProgramError("every rank has the mean already, nothing is left to send")
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
                raise ProgramError("there is no root with data that the other ranks lack")
            return _close(flow)
        case Hop(level):
            return _hop(flow, level, topology.size(level))
        case _:
            _refuse_unknown(step)


def _refuse_unknown(step: Never) -> NoReturn:
    """Raise for a step of unknown type. Type checkers prove that this is unreachable in typed code."""
    raise ProgramError("not a step")


def _refuse_inside(level: Level, verb: str) -> None:
    if level == Level.INTRA:
        raise ProgramError(f"inside a machine the data is merged in shards or at a root, not {verb} as a whole")


def _merge(flow: Flow, level: Level) -> Flow:
    if flow.merged != _BEFORE[level]:
        merged = " and ".join(sorted(each.value for each in flow.merged)) or "nothing"
        wanted = " and ".join(sorted(each.value for each in _BEFORE[level])) or "nothing"
        raise ProgramError(f"before {level.value} is merged, {wanted} must have been, but {merged} has been merged")
    return replace(flow, fresh=False, merged=flow.merged | {level})


def _open(flow: Flow, level: Level, split: bool) -> Flow:
    return replace(flow, opened=(*flow.opened, Opened(level, split)))


def _close(flow: Flow) -> Flow:
    if not flow.complete:
        raise ProgramError("not all ranks' contributions have been merged")
    return replace(flow, fresh=False, opened=flow.opened[:-1])


def _hop(flow: Flow, level: Level, size: int) -> Flow:
    if not flow.fresh:
        raise ProgramError("a ring must begin directly after an encoding")
    if size < 2:
        raise ProgramError("a ring needs at least two ranks")
    merged = replace(_merge(flow, level), fresh=True)
    opened = flow if flow.hops else _open(flow, level, True)
    if flow.hops + 1 < size - 1:
        return replace(opened, hops=flow.hops + 1)
    return replace(merged, opened=opened.opened, hops=0)
