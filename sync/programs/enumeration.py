"""Every way to synchronise a unit: the programs that the rules of :mod:`~gckernels.sync.programs.rules` allow."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, get_args

from .rules import Flow, advance
from .steps import Collective, Decode, Encode, Hop, Level, Place, Program, ProgramError, Step
from .topology import Topology

COLLECTIVES: tuple[type[Any], ...] = tuple(kind for kind in get_args(Collective) if kind is not Hop)


def options(
    topology: Topology,
    places: Collection[Place] = (Place.DEVICE,),
    *,
    most_encodes: int | None = None,
    collectives: Collection[type[Any]] = COLLECTIVES,
    summable: bool = False,
) -> Iterator[Program]:
    """All programs with which the ranks of ``topology`` get the mean of a unit, each once.

    They are the paths through the decision tree of Espresso (Wang et al., EuroSys 2023, figure 8): with both places
    4341 of them, 174 with one, as many as the paper counts. On one machine, and with one device per machine, only the
    flat ones are left, for which level means nothing.

    Args:
        topology: of the ranks.
        places: where steps may compute.
        most_encodes: how often a program may encode; by default as often as there is a use for.
        collectives: the kinds of collectives that it may take.
        summable: payloads add up, and may be reduced where raw data may.

    Raises:
        ValueError: an argument is not valid.
    """
    unknown = [kind for kind in collectives if kind not in COLLECTIVES]
    if unknown:
        known = ", ".join(kind.__name__ for kind in COLLECTIVES)
        raise ValueError(f"options: collectives must be among {known}, got {unknown[0]!r}")
    if not places or any(not isinstance(place, Place) for place in places):
        raise ValueError(f"options: places must be one or both of {', '.join(map(str, Place))}, got {places!r}")
    if most_encodes is not None and (type(most_encodes) is not int or most_encodes < 0):
        raise ValueError(f"options: most_encodes must be None or an int from 0 up, got {most_encodes!r}")
    levels = Level if min(topology.machines, topology.devices) > 1 else (Level.FLAT,)
    wanted = set(collectives)
    steps: list[Step] = [kind(level) for kind in COLLECTIVES if kind in wanted for level in levels]
    coding: list[Step] = [kind(place) for kind in (Encode, Decode) for place in Place if place in set(places)]

    def paths(flow: Flow, program: Program, encodes: int) -> Iterator[Program]:
        if flow.done:
            yield program
            return
        for step in (*coding, *steps):
            if isinstance(step, Encode) and encodes == most_encodes:
                continue
            try:
                after = advance(flow, step, topology, summable)
            except ProgramError:
                continue
            yield from paths(after, (*program, step), encodes + isinstance(step, Encode))

    return paths(Flow(), (), 0)
