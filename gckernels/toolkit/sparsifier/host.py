"""The host path of the sparsifiers, one program for all of them: the C files of this folder."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch

from ...codec import SEED_MASK, Backend, Decoding, Encoding, Work
from ..host.library import COMMON, VECTORS, declare, library
from ..host.sources import program_text
from ..payload import STATUS_OK
from ..reference import REFERENCE
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


class SparsifierHost(Backend):
    """Sparsifiers on the CPU. Threads share large units, and small ones are encoded by one thread each."""

    def compile(self, compressor: Any, recodes: bool) -> None:
        build()

    def encode(self, unit: Encoding, scale: float = 1.0) -> None:
        _encoder((unit,), scale, 2**64 - 1)()

    def decode(self, unit: Decoding, scale: float = 1.0, accumulate: bool = False) -> None:
        _decoder((unit,), scale, accumulate)()

    def bind_encodes(self, units: Sequence[Encoding], scale: float = 1.0, added: torch.Tensor | None = None) -> Work:
        return _encoder(units, scale, SEED_MASK, added)

    def bind_decodes(self, units: Sequence[Decoding], scale: float = 1.0, accumulate: bool = False) -> Work:
        return _decoder(units, scale, accumulate)


def _encoder(units: Sequence[Encoding], scale: float, seed_mask: int, added: torch.Tensor | None = None) -> Work:
    for unit in units:
        require_size(unit.compressor.name, unit.size)
    built = build()
    if built is None:
        return REFERENCE.bind_encodes(units, scale, added)
    return EncodeUnits(built, units, seed_mask, added)


def _decoder(units: Sequence[Decoding], scale: float, accumulate: bool) -> Work:
    built = build()
    if built is None:
        return REFERENCE.bind_decodes(units, scale, accumulate)
    return DecodeUnits(built, units, scale, accumulate)


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
    constants = {
        "TILE": SPAN,
        "BLOCK": BLOCK,
        "STATUS": STATUS_OK,
        "SAMPLED": _SAMPLED,
        "ROOM": _ROOM,
        "NAN_KEY": NAN_KEY,
    }
    constants |= {"MAX_FINITE_KEY": MAX_FINITE_KEY, "LEADING_SHIFT": LEADING_SHIFT}
    constants |= {"MIN_SAMPLE": MIN_SAMPLE, "MAX_SAMPLE_STRIDE": MAX_SAMPLE_STRIDE}
    constants |= {each.name: each.value for each in Narrowing}
    defined = "".join(f"#define {name} {value}\n" for name, value in constants.items())
    return "\n".join((COMMON, VECTORS, defined, STRUCTS, _PROGRAM))
