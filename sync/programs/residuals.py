"""The elements of a unit that each rank encodes, and the weights of their residuals in the mean."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from .layouts import Shares
from .rules import START, Flow, Opened, advance
from .steps import Encode, Hop, Level, Program
from .topology import Topology

ENCODINGS = ("worker", "shard", "shard2", "shard3")
"""The kinds of residuals, in the order of a program's encodings. No program encodes more often."""


@dataclass(frozen=True)
class EncodedRegion:
    """The elements of a unit that a rank encodes, and of which it keeps a residual."""

    start: int  # index of the first element in the unit
    stop: int  # index after the last element; equal to start if another rank, a root, has the data
    weight: float  # weight of this rank's residual in the mean. Ranks that encode the same data share one weight.
    copies: int  # number of ranks, including this one, that encode the same data and must keep equal residuals
    size: int
    """Number of elements that are encoded together. A residual with several states holds all states of one stretch of
    this size, then all states of the next."""


def encoded_regions(program: Program, numel: int, topology: Topology, rank: int, root: int) -> list[EncodedRegion]:
    """The regions of all encodings of a program on one rank, in order.

    The sum over all ranks of ``weight * residual``, each added at its elements, is the gradient that has not been sent.

    Args:
        program: a valid program.
        numel: number of elements of the unit.
        topology: topology of the ranks.
        root: the root of the unit.
    """
    flow, found = START, []
    for step, following in zip(program, (*program[1:], None), strict=True):
        if isinstance(step, Encode):
            start, stop = piece_bounds(program, numel, flow, topology, rank)
            size = stop - start
            if isinstance(following, Hop):  # encoded shard by shard, of which the first has full size
                shard = replace(flow, opened=(*flow.opened, Opened(following.level, True)))
                size = piece_bounds(program, numel, shard, topology, 0)[1]
            start = start if has_part(flow, topology, rank, root) else stop
            opened = {each.level for each in flow.opened}
            copies = math.prod(topology.size(level) for level in flow.merged - opened)
            averaged = math.prod(topology.size(level) for level in flow.merged)
            found.append(EncodedRegion(start, stop, averaged / topology.world_size / copies, copies, size))
        flow = advance(flow, step, topology, summable=True)
    return found


def piece_bounds(program: Program, numel: int, flow: Flow, topology: Topology, rank: int) -> tuple[int, int]:
    """``(start, stop)`` of the elements that ``rank`` has at ``flow``, or would have if it were the root.

    Args:
        program: the program of the unit.
        numel: number of elements of the unit.
        flow: the flow between two steps of the program.
        topology: topology of the ranks.
    """
    shares = Shares(program, topology)
    start, size = 0, shares.chunk(START, 1).elements(numel)
    for opened in flow.opened:
        if opened.split:
            size //= topology.size(opened.level)
            start += topology.index(opened.level, rank) * size
    return min(start, numel), min(start + size, numel)


def has_part(flow: Flow, topology: Topology, rank: int, root: int) -> bool:
    """Whether ``rank`` has any data at ``flow``, in a program with the given root."""
    return all(topology.index(level, rank) == topology.index(level, root) for level in rooted_levels(flow))


def rooted_levels(flow: Flow) -> tuple[Level, ...]:
    """The levels on which a root has all data at ``flow``, and the other ranks have none."""
    return tuple(opened.level for opened in flow.opened if not opened.split)


def encoder_of(flow: Flow, topology: Topology, rank: int) -> int:
    """The first of all ranks that have the same data as ``rank`` at ``flow``.

    Data that has been merged on a level, and is neither sharded nor at a root there, is on all ranks of the level.
    These ranks must draw the same random numbers.
    """
    opened = {each.level for each in flow.opened}
    index = {level: topology.index(level, rank) for level in (Level.INTRA, Level.INTER)}
    copied = flow.merged - opened
    if Level.FLAT in copied:
        return 0
    device = 0 if Level.INTRA in copied else index[Level.INTRA]
    machine = 0 if Level.INTER in copied else index[Level.INTER]
    return machine * topology.devices + device
