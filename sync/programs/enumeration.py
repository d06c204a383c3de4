"""Enumeration of every program that the rules of :mod:`~gckernels.sync.programs.rules` allow."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Iterator
from typing import Any, get_args

from .rules import Flow, advance
from .spans import MEAN, Span
from .steps import Coding, Collective, Decode, Encode, Hop, Level, Place, Program, ProgramError, Step
from .topology import Topology

COLLECTIVES: tuple[type[Any], ...] = tuple(kind for kind in get_args(Collective) if kind is not Hop)


def enumerate_programs(
    topology: Topology,
    places: Collection[Place] = (Place.DEVICE,),
    *,
    max_encodes: int | None = None,
    collectives: Collection[type[Any]] = COLLECTIVES,
    summable: bool = False,
    span: Span = MEAN,
) -> tuple[Program, ...]:
    """All valid programs for the ranks of ``topology``, without rings, each once.

    They are the paths through the decision tree of Espresso (Wang et al., EuroSys 2023, figure 8). With one place there
    are 174 of them, with both 4341, the numbers of the paper. On one machine, or with one device per machine, only flat
    programs remain. Results are cached for the lifetime of the process.

    Args:
        topology: topology of the ranks.
        places: the places where steps may compute.
        max_encodes: maximum number of encodings in a program; by default unlimited.
        collectives: the kinds of collectives that programs may use.
        summable: whether payloads can be added, and so be reduced like raw data.
        span: the states between which the programs go. One of levels needs a topology of several machines with several
            devices, otherwise there are no programs.

    Raises:
        ValueError: an argument is not valid.
    """
    unknown = [kind for kind in collectives if kind not in COLLECTIVES]
    if unknown:
        known = ", ".join(kind.__name__ for kind in COLLECTIVES)
        raise ValueError(f"enumerate_programs: collectives must be among {known}, got {unknown[0]!r}")
    if not places or any(not isinstance(place, Place) for place in places):
        allowed = ", ".join(map(str, Place))
        raise ValueError(f"enumerate_programs: places must be one or both of {allowed}, got {places!r}")
    if max_encodes is not None and (type(max_encodes) is not int or max_encodes < 0):
        raise ValueError(f"enumerate_programs: max_encodes must be None or an int from 0 up, got {max_encodes!r}")
    has_levels = min(topology.machines, topology.devices) > 1
    chosen = tuple(place for place in Place if place in set(places))
    return _programs(has_levels, summable, chosen, frozenset(collectives), max_encodes, span)


@functools.lru_cache(maxsize=64)
def _programs(
    has_levels: bool,
    summable: bool,
    places: tuple[Place, ...],
    collectives: frozenset[type[Any]],
    max_encodes: int | None,
    span: Span,
) -> tuple[Program, ...]:
    """The programs that fit. A program is valid with its codings at any combination of places."""
    return tuple(
        program
        for skeleton in _skeletons(has_levels, summable, span)
        if all(isinstance(step, Coding) or type(step) in collectives for step in skeleton)
        and (max_encodes is None or sum(isinstance(step, Encode) for step in skeleton) <= max_encodes)
        for program in _placed(skeleton, places)
    )


def _placed(skeleton: Program, places: tuple[Place, ...]) -> Iterator[Program]:
    choices = ([type(step)(place) for place in places] if isinstance(step, Coding) else [step] for step in skeleton)
    return itertools.product(*choices)


@functools.lru_cache(maxsize=16)
def _skeletons(has_levels: bool, summable: bool, span: Span) -> tuple[Program, ...]:
    """The programs that compute on the device. They do not depend on the number of ranks, because they have no ring."""
    topology, levels = (Topology(2, 2), tuple(Level)) if has_levels else (Topology(2), (Level.FLAT,))
    steps: list[Step] = [Encode(), Decode(), *(kind(level) for kind in COLLECTIVES for level in levels)]

    def paths(flow: Flow, program: Program) -> Iterator[Program]:
        if program and span.ends_at(flow):
            yield program
            return
        for step in steps:
            try:
                after = advance(flow, step, topology, summable)
            except ProgramError:
                continue
            yield from paths(after, (*program, step))

    return tuple(paths(span.begin, ()))
