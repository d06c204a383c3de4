"""The place of a program: the work of a kernel's programs is numbered, whether units share the launch or not."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def place_of(place):
    """``(program, number of programs, chunk)``, int32, int32 and int64: ``place``, or that in the grid if it is None.

    A kernel of one unit has the programs of a chunk along the first axis of its grid and the chunks along the second.
    It has an argument ``place=None``, so that a kernel of many units can call it for another place (``sharing.py``).
    """
    if place is None:
        return tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    else:
        return place[0], place[1], place[2].to(tl.int64)


@triton.jit
def tile_of(place, REVERSED: tl.constexpr = False):
    """``(tile, chunk)`` of a program that works on a tile; from the last tile to the first if ``REVERSED``.

    Both may be multiplied by numbers of elements: they are int64 in a launch of one unit, and int32 in a shared one,
    whose units have fewer elements than ``sharing.OWN_LAUNCH``.
    """
    if place is None:
        tile = tl.program_id(0)
        if REVERSED:
            tile = tl.num_programs(0) - 1 - tile
        return tile.to(tl.int64), tl.program_id(1).to(tl.int64)
    else:
        tile = place[0]
        if REVERSED:
            tile = place[1] - 1 - tile
        return tile, place[2]
