"""Residuals: which elements of a unit each rank encodes, and what the residual of an encoding is worth in the mean."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from .layouts import Shares
from .rules import Flow, Opened, advance
from .steps import Encode, Hop, Level, Program
from .topology import Topology

ENCODINGS = ("worker", "shard", "shard2", "shard3")
"""The kinds of residuals, in the order of a program's encodings. No program encodes more often."""


@dataclass(frozen=True)
class EncodedRegion:
    """The elements of a unit that a rank encodes, and keeps a residual of.

    Attributes:
        start, stop: the elements; none where another rank, a root, has them.
        weight: what the residual is worth in the mean. Where several ranks encode the same, and keep the same, it is
            counted once for all of them together.
        copies: the number of ranks, with this one, that have the same data here, and must keep the same.
        size: elements that are encoded together. A residual of several states holds those of one such stretch, then
            those of the next.
    """

    start: int
    stop: int
    weight: float
    copies: int
    size: int


def encoded_regions(program: Program, numel: int, topology: Topology, rank: int, root: int) -> list[EncodedRegion]:
    """The region of every encoding of a program on rank ``rank``, for a unit of ``numel`` elements with root ``root``.

    The sum over all ranks of ``weight * residual``, each at its elements, is what the mean has not been given yet.
    """
    flow, found = Flow(), []
    for step, following in zip(program, (*program[1:], None), strict=True):
        if isinstance(step, Encode):
            start, stop = piece_bounds(program, numel, flow, topology, rank)
            size = stop - start
            if isinstance(following, Hop):  # shard by shard; the first one is a full one, or all that there is
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
    """``(start, stop)``: the elements that rank ``rank`` has of a unit of ``numel``, where its program is at ``flow``;
    also those that it would have if it were in the place of the root."""
    shares = Shares(program, topology)
    start, size = 0, shares.chunk(Flow(), 1).elements(numel)
    for opened in flow.opened:
        if opened.split:
            size //= topology.size(opened.level)
            start += topology.index(opened.level, rank) * size
    return min(start, numel), min(start + size, numel)


def has_part(flow: Flow, topology: Topology, rank: int, root: int) -> bool:
    """Whether rank ``rank`` has any data, where a program is at ``flow`` and its root is ``root``."""
    rooted = [opened.level for opened in flow.opened if not opened.split]
    return all(topology.index(level, rank) == topology.index(level, root) for level in rooted)


def encoder_of(flow: Flow, topology: Topology, rank: int) -> int:
    """The first of the ranks that have the same data as ``rank``, where a program is at ``flow``. What has been merged
    on a level and is not parted there is on all of its ranks. These ranks must draw the same random numbers."""
    opened = {each.level for each in flow.opened}
    index = {level: topology.index(level, rank) for level in (Level.INTRA, Level.INTER)}
    copied = flow.merged - opened
    if Level.FLAT in copied:
        return 0
    device = 0 if Level.INTRA in copied else index[Level.INTRA]
    machine = 0 if Level.INTER in copied else index[Level.INTER]
    return machine * topology.devices + device
