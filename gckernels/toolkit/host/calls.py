"""Calls of a host program for many units: the tiles of all units are shared among threads."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from .library import PART, TILE
from .sources import program_text
from .structs import c_structs, pointer
from .threads import run_parts


class _Batch(ctypes.Structure):
    """Arguments of the functions that ``DEFINE_BATCH`` defines, as ``batch_t``."""

    _fields_ = (
        ("calls", pointer(const=True)),  # call_t [count]
        ("ends", pointer(ctypes.c_int64, const=True)),  # [count]: number of the first tile behind those of the unit
        ("count", ctypes.c_int64),
        ("added", ctypes.c_uint64),  # to the seeds
    )


BATCHES = c_structs(batch_t=_Batch) + program_text(__package__, "calls.c")
"""The C text that programs with ``DEFINE_BATCH`` have behind their ``call_t``."""


class HostCalls:
    """The arguments of a host program for many units, side by side in memory.

    Args:
        calls: the ``call_t`` of every unit, at least one, with the field ``numel``.
        tiles: number of tiles (or other parts that the program counts) of every unit.
    """

    def __init__(self, calls: Sequence[Any], tiles: Sequence[int]) -> None:
        self._calls = (type(calls[0]) * len(calls))(*calls)
        self._ends = (ctypes.c_int64 * len(calls))(*accumulate(tiles))
        self._tiles = sum(tiles)
        # the tiles of small units are far from full: a thread pays from a number of elements on, not of tiles
        numel = max(1, sum(call.numel for call in calls))
        self._min_part = max(PART, self._tiles * PART * TILE // numel)

    def run(self, function: Any, added: int = 0) -> None:
        """Call a function that ``DEFINE_BATCH`` defines for all tiles, on several threads; ``added`` is added to the
        seeds."""
        batch = _Batch(ctypes.addressof(self._calls), ctypes.addressof(self._ends), len(self._ends), added % 2**64)
        run_parts(functools.partial(function, ctypes.byref(batch)), self._tiles, self._min_part)
