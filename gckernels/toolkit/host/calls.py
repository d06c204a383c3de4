"""Calls of a host program for one unit or many: the tiles of all units are shared among threads."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import torch

from ...codec import SEED_MASK, Decoding, Encoding, Recoding, Work, number_in
from .library import DTYPES, PART, TILE
from .sources import program_text
from .structs import c_structs, pointer
from .threads import run_parts


class HostCall(ctypes.Structure):
    """Arguments of a host program for one unit, as ``call_t``. Subclasses add those of an algorithm."""

    _fields_ = (
        ("source", pointer(const=True)),  # the gradient; when recoding, the payloads
        ("residual", pointer(ctypes.c_float)),  # or None
        ("payload", pointer(ctypes.c_uint8)),  # the payload to write; when decoding, the payloads to read
        ("out", pointer()),  # when decoding
        *((name, ctypes.c_int64) for name in ("numel", "size")),  # elements of the unit, of a chunk
        *((name, ctypes.c_int64) for name in ("chunks", "tiles")),  # tiles of a chunk
        *((name, ctypes.c_int64) for name in ("payload_stride", "payload_nbytes", "sources", "source_stride")),
        ("seed", ctypes.c_uint64),
        *(("scale", ctypes.c_float), ("dtype", ctypes.c_int32), ("accumulate", ctypes.c_int32)),
    )

    @classmethod
    def encoding(cls, unit: Encoding, scale: float = 1.0, *, tiles: int, **more: Any) -> Self:
        """The call that encodes ``unit``, with ``tiles`` tiles per chunk."""
        grad, payload, residual = unit.grad, unit.payload, unit.residual
        chunks, nbytes = payload.shape
        return cls(
            *(grad.data_ptr(), None if residual is None else residual.data_ptr(), payload.data_ptr(), None),
            *(grad.numel(), unit.size, chunks, tiles, payload.stride(0), nbytes, 0, 0),
            *(unit.seed, scale, DTYPES[grad.dtype], 0),
            **more,
        )

    @classmethod
    def recoding(cls, unit: Recoding, scale: float, *, tiles: int, **more: Any) -> Self:
        """The call that merges and encodes ``unit``."""
        payloads, payload, residual = unit.payloads, unit.payload, unit.residual
        return cls(
            *(payloads.data_ptr(), None if residual is None else residual.data_ptr(), payload.data_ptr(), None),
            *(unit.numel, unit.size, 1, tiles, 0, payload.shape[0], payloads.shape[0], payloads.stride(0)),
            *(unit.seed, scale),
            **more,
        )

    @classmethod
    def decoding(cls, unit: Decoding, scale: float, accumulate: bool, *, tiles: int, **more: Any) -> Self:
        """The call that decodes and merges ``unit``."""
        payloads, out = unit.payloads, unit.out
        sources, chunks, nbytes = payloads.shape
        return cls(
            *(None, None, payloads.data_ptr(), out.data_ptr(), out.numel(), unit.size, chunks, tiles),
            *(payloads.stride(1), nbytes, sources, payloads.stride(0), 0, scale, DTYPES[out.dtype], accumulate),
            **more,
        )


class _Batch(ctypes.Structure):
    """Arguments of the functions that ``DEFINE_BATCH`` defines, as ``batch_t``."""

    _fields_ = (
        ("calls", pointer(const=True)),  # call_t [count]
        ("ends", pointer(ctypes.c_int64, const=True)),  # [count]: number of the first tile behind those of the unit
        ("count", ctypes.c_int64),
        *((name, ctypes.c_uint64) for name in ("added", "seed_mask")),  # the sum of both seeds is masked
    )


def batches(call: type[HostCall]) -> str:
    """The C text of programs with ``DEFINE_BATCH``, whose arguments are ``call``."""
    return c_structs(call_t=call, batch_t=_Batch) + program_text(__package__, "calls.c")


class Seeding(NamedTuple):
    """How the seeds of units are used: the number in ``added``, if there is one, is added, and the sum masked."""

    mask: int = SEED_MASK
    added: torch.Tensor | None = None


_AS_THEY_ARE = Seeding()


class HostCalls:
    """The arguments of a host program for many units, side by side in memory.

    Args:
        calls: the arguments for every unit, at least one.
        seeds: how their seeds are used.
    """

    def __init__(self, calls: Sequence[HostCall], seeds: Seeding = _AS_THEY_ARE) -> None:
        self._calls, self._seeds = (type(calls[0]) * len(calls))(*calls), seeds
        ends = ctypes.c_int64 * len(calls)
        self._tiles, self._chunks = ends(), ends()  # behind those of each unit
        tiles = chunks = numel = 0
        for unit, call in enumerate(calls):
            tiles, chunks, numel = tiles + call.tiles * call.chunks, chunks + call.chunks, numel + call.numel
            self._tiles[unit], self._chunks[unit] = tiles, chunks
        # a thread pays from a number of elements on, not of tiles: those of small units are far from full
        self._min_part = max(1, tiles * PART * TILE // max(1, numel))

    def work(self, function: Any) -> Work:
        """A function that does what :meth:`run` says."""
        return functools.partial(self.run, function)

    def run(self, function: Any) -> None:
        """Call a function that ``DEFINE_BATCH`` defines for all tiles, on several threads."""
        batch = self._batch(self._tiles)
        run_parts(functools.partial(function, ctypes.byref(batch)), self._tiles[-1], self._min_part)

    def run_chunks(self, function: Any) -> None:
        """Call a function that ``DEFINE_BATCH`` defines for all chunks."""
        function(ctypes.byref(self._batch(self._chunks)), 0, self._chunks[-1])

    def _batch(self, ends: Any) -> _Batch:
        mask, added = self._seeds
        number = 0 if added is None else number_in(added) % 2**64
        return _Batch(ctypes.addressof(self._calls), ctypes.addressof(ends), len(ends), number, mask)
