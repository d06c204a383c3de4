"""The host path of the casts: ``host.c``, compiled for one dtype of payloads."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch

from ...codec import Backend, Decoding, Encoding, Recoding, Work
from ..host.calls import BATCHES, HostCalls
from ..host.library import COMMON, DTYPES, PART, TILE, declare, library
from ..host.sources import program_text
from ..host.structs import c_structs
from ..host.summable import SummableCall
from ..host.threads import run_parts
from ..reference import REFERENCE

_TEMPLATE = "host.c"


class CastHost(Backend):
    """Casts on the CPU. Units that are bound together are one call of the C program."""

    def compile(self, compressor: Any, recodes: bool) -> None:
        build(compressor.traits.payload_dtype)

    def encode(self, unit: Encoding, scale: float = 1.0) -> None:
        built = build(unit.compressor.traits.payload_dtype)
        if built is None:
            REFERENCE.encode(unit, scale)
            return
        call = _encoding(unit, scale)
        run_parts(functools.partial(built.encode, ctypes.byref(call)), call.tiles * unit.payload.shape[0], PART)

    def decode(self, unit: Decoding, scale: float = 1.0, accumulate: bool = False) -> None:
        built = build(unit.compressor.traits.payload_dtype)
        if built is None:
            REFERENCE.decode(unit, scale, accumulate)
            return
        call = _decoding(unit, scale, accumulate)
        run_parts(functools.partial(built.decode, ctypes.byref(call)), call.tiles * unit.payloads.shape[1], PART)

    def recode(self, unit: Recoding, scale: float = 1.0) -> None:
        built = build(unit.compressor.traits.payload_dtype)
        if built is None:
            REFERENCE.recode(unit, scale)
            return
        call = _recoding(unit, scale)
        run_parts(functools.partial(built.recode, ctypes.byref(call)), call.tiles, PART)

    def bind_encodes(self, units: Sequence[Encoding], scale: float = 1.0, added: torch.Tensor | None = None) -> Work:
        built = build(units[0].compressor.traits.payload_dtype)
        if built is None:
            return super().bind_encodes(units, scale, added)
        bound = _of_all([_encoding(unit, scale) for unit in units], [unit.payload.shape[0] for unit in units])
        return functools.partial(bound.run, built.encode_batch)

    def bind_decodes(self, units: Sequence[Decoding], scale: float = 1.0, accumulate: bool = False) -> Work:
        built = build(units[0].compressor.traits.payload_dtype)
        if built is None:
            return super().bind_decodes(units, scale, accumulate)
        calls = [_decoding(unit, scale, accumulate) for unit in units]
        return functools.partial(_of_all(calls, [unit.payloads.shape[1] for unit in units]).run, built.decode_batch)

    def bind_recodes(self, units: Sequence[Recoding], scale: float = 1.0, added: torch.Tensor | None = None) -> Work:
        built = build(units[0].compressor.traits.payload_dtype)
        if built is None:
            return super().bind_recodes(units, scale, added)
        bound = _of_all([_recoding(unit, scale) for unit in units], [1] * len(units))
        return functools.partial(bound.run, built.recode_batch)


def _encoding(unit: Encoding, scale: float) -> SummableCall:
    width, tiles = unit.compressor.traits.payload_dtype.itemsize, max(1, -(-unit.size // TILE))
    return SummableCall.encoding(unit, width, tiles, scale)


def _recoding(unit: Recoding, scale: float) -> SummableCall:
    width = unit.compressor.traits.payload_dtype.itemsize
    return SummableCall(
        source=unit.payloads.data_ptr(),
        residual=None if unit.residual is None else unit.residual.data_ptr(),
        target=unit.payload.data_ptr(),
        numel=unit.numel,
        size=unit.size,
        tiles=max(1, -(-unit.size // TILE)),
        sources=unit.payloads.shape[0],
        source_stride=unit.payloads.stride(0) // width,
        payload_count=unit.payload.shape[0] // width,
        scale=scale,
    )


def _decoding(unit: Decoding, scale: float, accumulate: bool) -> SummableCall:
    width, tiles = unit.compressor.traits.payload_dtype.itemsize, -(-unit.size // TILE)
    return SummableCall.decoding(unit, width, tiles, scale, accumulate)


def _of_all(calls: Sequence[SummableCall], chunks: Sequence[int]) -> HostCalls:
    return HostCalls(calls, [call.tiles * number for call, number in zip(calls, chunks, strict=True)])


@functools.cache
def build(payload_dtype: torch.dtype) -> Any:
    """The library with the compiled functions; ``None`` if they cannot be compiled."""
    built: Any = library(program(payload_dtype))
    if built is not None:
        names = ("encode", "decode", "recode")
        declare(built, *names, *(f"{name}_batch" for name in names))
    return built


def program(payload_dtype: torch.dtype) -> str:
    """The C source for one dtype of payloads."""
    defines = f"#define DTYPE {DTYPES[payload_dtype]}\n#define TILE {TILE}\n"
    return "\n".join((defines, COMMON, c_structs(call_t=SummableCall), BATCHES, program_text(__package__, _TEMPLATE)))
