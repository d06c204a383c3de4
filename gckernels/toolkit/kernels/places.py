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
        return place
