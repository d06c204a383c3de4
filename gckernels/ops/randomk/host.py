"""The host path of :mod:`~gckernels.ops.randomk`: ``host.c``."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch

from ...codec import Decoding, Encoding, Work
from ...toolkit.host.backend import HostBackend
from ...toolkit.host.calls import HostCall, HostCalls, Seeding, batches
from ...toolkit.host.library import COMMON, VECTORS, declare, defined, library
from ...toolkit.host.sources import program_text
from ...toolkit.host.structs import pointer
from ...toolkit.sparsifier.keys import require_size
from .header import HEADER_NUMEL, MAX_WORLD, PART_BITS

_TEMPLATE = "host.c"
_TILE = 2048


class _Call(HostCall):
    """Arguments of the functions in ``host.c``, as ``call_t``."""

    _fields_ = (
        ("nonfinite", pointer(ctypes.c_int32)),  # [chunks], whether an element is inf or NaN
        ("old", pointer(ctypes.c_float)),  # [chunks, k]: the entries' residuals
        ("k", ctypes.c_int64),  # entries of a payload
    )


class RandomKHost(HostBackend):
    """The algorithm on the CPU."""

    def compile(self, compressor: Any, recodes: bool) -> None:
        build()

    def encoder(self, units: Sequence[Encoding], scale: float, seeds: Seeding) -> Work | None:
        for unit in units:
            require_size(unit.compressor.name, unit.size)
        built = build()
        return built and _Encoder(built, units, scale, seeds)

    def decoder(self, units: Sequence[Decoding], scale: float, accumulate: bool) -> Work | None:
        built = build()
        calls = [_Call.decoding(unit, scale, accumulate, **_counts(unit)) for unit in units]
        return built and HostCalls(calls).work(built.decode_batch)


class _Encoder:
    """Encodes all of its units when it is called."""

    def __init__(self, built: Any, units: Sequence[Encoding], scale: float, seeds: Seeding) -> None:
        calls = [_Call.encoding(unit, scale, **_counts(unit)) for unit in units]
        self._built = built
        self._nonfinite = (ctypes.c_int32 * sum([call.chunks for call in calls]))()
        held = [call.chunks * call.k if call.residual else 0 for call in calls]
        self._old = torch.empty(sum(held), dtype=torch.float32, device="cpu")
        nonfinite, old = ctypes.addressof(self._nonfinite), self._old.data_ptr()
        for call, numbers in zip(calls, held, strict=True):
            call.nonfinite, call.old = nonfinite, old
            nonfinite += 4 * call.chunks
            old += 4 * numbers
        self._calls = HostCalls(calls, seeds)

    def __call__(self) -> None:
        ctypes.memset(self._nonfinite, 0, ctypes.sizeof(self._nonfinite))
        self._calls.run(self._built.encode_batch)
        if any(self._nonfinite):
            self._calls.run(self._built.take_back_batch)


def _counts(unit: Encoding | Decoding) -> dict[str, int]:
    # a unit without elements has a header
    return {"tiles": max(1, -(-unit.size // _TILE)), "k": unit.compressor.capacity(unit.size)}


@functools.cache
def build() -> Any:
    """The compiled functions; ``None`` if they cannot be compiled."""
    return declare(library(program()), "encode_batch", "take_back_batch", "decode_batch")


def program() -> str:
    """The source of the C program."""
    defines = defined(TILE=_TILE, HEADER_NUMEL=HEADER_NUMEL, PART_BITS=PART_BITS, MAX_WORLD=MAX_WORLD)
    return "\n".join((defines, COMMON, VECTORS, batches(_Call), program_text(__package__, _TEMPLATE)))
