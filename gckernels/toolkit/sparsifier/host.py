"""The host path of the sparsifiers, one program for all of them: the C files of this folder."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

from ...codec import Decoding, Encoding, Work
from ..host.backend import HostBackend
from ..host.calls import Seeding
from ..host.library import COMMON, VECTORS, declare, defined, library
from ..host.sources import program_text
from ..payload import STATUS_OK
from .entries import BLOCK, SPAN
from .host_calls import STRUCTS
from .host_units import DecodeUnits, EncodeUnits
from .keys import LEADING_SHIFT, MAX_FINITE_KEY, MAX_SAMPLE_STRIDE, MIN_SAMPLE, NAN_KEY, require_size
from .rules import Narrowing

_SOURCES = ("host.c", "selection_host.c", "emit_host.c", "entries_host.c")
_PROGRAM = program_text(__package__, *_SOURCES)
_ROOM = 4  # candidates that there is room for, per entry
_SAMPLED = 256  # samples that are read at a time
_FUNCTIONS = (
    *("add_squares", "take_samples", "bound_keys", "collect", "narrow", "load_all", "count_entries", "place_entries"),
    *("emit_entries", "write_entries", "find_starts", "decode"),
)


class SparsifierHost(HostBackend):
    """Sparsifiers on the CPU. Threads share large units, and small ones are encoded by one thread each."""

    def compile(self, compressor: Any, recodes: bool) -> None:
        build()

    def encoder(self, units: Sequence[Encoding], scale: float, seeds: Seeding) -> Work | None:
        for unit in units:
            require_size(unit.compressor.name, unit.size)
        built = build()
        return built and EncodeUnits(built, units, seeds)

    def decoder(self, units: Sequence[Decoding], scale: float, accumulate: bool) -> Work | None:
        built = build()
        return built and DecodeUnits(built, units, scale, accumulate)


@functools.cache
def build() -> Any:
    """The compiled functions; ``None`` if they cannot be compiled."""
    built: Any = library(program())
    if built is not None:
        declare(built, *_FUNCTIONS)
        address, number = ctypes.c_void_p, ctypes.c_int64
        for function in (built.limit_norm, built.narrow_all, built.emit_alone):
            function.argtypes, function.restype = (address,), None
        built.missing_from.argtypes, built.missing_from.restype = (address, number), number
        built.lay_out.argtypes, built.lay_out.restype = (address, address), number
        built.encode_units.argtypes = (address, number, number, ctypes.c_uint64, address)
        built.encode_units.restype = number
        built.decode_units.argtypes, built.decode_units.restype = (address, number, number, address), None
    return built


def program() -> str:
    """The source of the C program."""
    constants = defined(
        TILE=SPAN,
        BLOCK=BLOCK,
        STATUS=STATUS_OK,
        SAMPLED=_SAMPLED,
        ROOM=_ROOM,
        NAN_KEY=NAN_KEY,
        MAX_FINITE_KEY=MAX_FINITE_KEY,
        LEADING_SHIFT=LEADING_SHIFT,
        MIN_SAMPLE=MIN_SAMPLE,
        MAX_SAMPLE_STRIDE=MAX_SAMPLE_STRIDE,
        **{each.name: each.value for each in Narrowing},
    )
    return "\n".join((COMMON, VECTORS, constants, STRUCTS, _PROGRAM))
