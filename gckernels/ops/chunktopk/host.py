"""The host path of :mod:`~gckernels.ops.chunktopk`: ``host.c``, compiled for one configuration."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

from ...codec import Decoding, Encoding, Work
from ...toolkit.host.backend import HostBackend
from ...toolkit.host.calls import HostCall, HostCalls, Seeding, batches
from ...toolkit.host.library import COMMON, VECTORS, declare, defined, library
from ...toolkit.host.sources import program_text
from ...toolkit.payload import STATUS_OK

_TEMPLATE = "host.c"
_CLASSES_PER_ENTRY = 4
"""More classes make the bound on the selected magnitudes tighter, and take longer to search."""


class _Call(HostCall):
    """Arguments of the functions in ``host.c``, as ``call_t``; a tile is a group, but there is at least one."""

    _fields_ = tuple((name, ctypes.c_int64) for name in ("groups", "indices_offset", "values_offset"))


class ChunkTopKHost(HostBackend):
    """The algorithm on the CPU."""

    def compile(self, compressor: Any, recodes: bool) -> None:
        build(compressor)

    def encoder(self, units: Sequence[Encoding], scale: float, seeds: Seeding) -> Work | None:
        built = build(units[0].compressor)
        calls = [_Call.encoding(unit, **_places(unit.compressor, unit.size)) for unit in units]
        return built and HostCalls(calls).work(built.encode_batch)

    def decoder(self, units: Sequence[Decoding], scale: float, accumulate: bool) -> Work | None:
        built = build(units[0].compressor)
        calls = [_Call.decoding(unit, scale, accumulate, **_places(unit.compressor, unit.size)) for unit in units]
        return built and HostCalls(calls).work(built.decode_batch)


@functools.lru_cache(maxsize=65536)  # every call needs them
def _places(compressor: Any, size: int) -> dict[str, int]:
    """Facts about payloads of ``size`` elements."""
    layout, groups = compressor.layout(size), -(-size // compressor.chunk)
    offsets = {f"{name}_offset": layout[name].offset for name in ("indices", "values")}
    return {"tiles": max(1, groups), "groups": groups} | offsets


@functools.cache
def build(compressor) -> Any:
    """The compiled functions; ``None`` if they cannot be compiled."""
    return declare(library(program(compressor)), "encode_batch", "decode_batch")


def program(compressor) -> str:
    """The source of the C program of one configuration."""
    classes = 1 << (_CLASSES_PER_ENTRY * compressor.k - 1).bit_length()  # a power of two, as the groups are
    defines = defined(
        GROUP=compressor.chunk,
        K=compressor.k,
        CLASSES=min(compressor.chunk, classes),
        BITS=compressor.value_bits,
        STATUS=STATUS_OK,
    )
    return "\n".join((COMMON, VECTORS, defines, batches(_Call), program_text(__package__, _TEMPLATE)))
