"""The host path of :mod:`~gckernels.ops.chunktopk`: ``host.c``, compiled for one configuration."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch

from ...codec import Backend, Decoding, Encoding, Work
from ...toolkit.host.calls import BATCHES, HostCalls
from ...toolkit.host.library import COMMON, DTYPES, PART, TILE, VECTORS, declare, library
from ...toolkit.host.sources import program_text
from ...toolkit.host.structs import c_structs, pointer
from ...toolkit.host.threads import run_parts
from ...toolkit.payload import STATUS_OK
from ...toolkit.reference import REFERENCE

_TEMPLATE = "host.c"
_CLASSES_PER_ENTRY = 4
"""More classes make the bound on the selected magnitudes tighter, and take longer to search."""


class _Call(ctypes.Structure):
    """Arguments of the functions in ``host.c``, as ``call_t``."""

    _fields_ = (
        ("gradient", pointer(const=True)),
        ("residual", pointer(ctypes.c_float)),  # or None
        ("payload", pointer(ctypes.c_uint8)),  # the payload to write; when decoding, the payloads to read
        ("out", pointer()),  # when decoding
        *((name, ctypes.c_int64) for name in ("numel", "size")),  # elements of the unit, of a chunk
        *((name, ctypes.c_int64) for name in ("groups", "tiles")),  # per chunk; the same, but at least 1
        *((name, ctypes.c_int64) for name in ("payload_stride", "sources", "source_stride")),
        *((name, ctypes.c_int64) for name in ("indices_offset", "values_offset", "payload_nbytes")),
        *(("scale", ctypes.c_float), ("dtype", ctypes.c_int32), ("accumulate", ctypes.c_int32)),
    )


class ChunkTopKHost(Backend):
    """The algorithm on the CPU, many units in one call."""

    def compile(self, compressor: Any, recodes: bool) -> None:
        build(compressor)

    def encode(self, unit: Encoding, scale: float = 1.0) -> None:
        built = build(unit.compressor)
        if built is None:
            REFERENCE.encode(unit, scale)
            return
        _run(built.encode, unit.compressor, _encoding(unit), unit.payload.shape[0])

    def decode(self, unit: Decoding, scale: float = 1.0, accumulate: bool = False) -> None:
        built = build(unit.compressor)
        if built is None:
            REFERENCE.decode(unit, scale, accumulate)
            return
        _run(built.decode, unit.compressor, _decoding(unit, scale, accumulate), unit.payloads.shape[1])

    def bind_encodes(self, units: Sequence[Encoding], scale: float = 1.0, added: torch.Tensor | None = None) -> Work:
        built = build(units[0].compressor)
        if built is None:
            return super().bind_encodes(units, scale, added)
        calls = [_encoding(unit) for unit in units]
        tiles = [call.tiles * unit.payload.shape[0] for call, unit in zip(calls, units, strict=True)]
        return functools.partial(HostCalls(calls, tiles).run, built.encode_batch)

    def bind_decodes(self, units: Sequence[Decoding], scale: float = 1.0, accumulate: bool = False) -> Work:
        built = build(units[0].compressor)
        if built is None:
            return super().bind_decodes(units, scale, accumulate)
        calls = [_decoding(unit, scale, accumulate) for unit in units]
        tiles = [call.tiles * unit.payloads.shape[1] for call, unit in zip(calls, units, strict=True)]
        return functools.partial(HostCalls(calls, tiles).run, built.decode_batch)


def _encoding(unit: Encoding) -> _Call:
    grad, payload = unit.grad, unit.payload
    call = _call(unit, payload, payload.stride(0), numel=grad.numel(), dtype=DTYPES[grad.dtype])
    call.gradient = grad.data_ptr()
    call.residual = None if unit.residual is None else unit.residual.data_ptr()
    return call


def _decoding(unit: Decoding, scale: float, accumulate: bool) -> _Call:
    payloads, out = unit.payloads, unit.out
    call = _call(unit, payloads, payloads.stride(1), numel=out.numel(), dtype=DTYPES[out.dtype])
    call.sources, call.source_stride = payloads.shape[0], payloads.stride(0)
    call.out, call.scale, call.accumulate = out.data_ptr(), scale, accumulate
    return call


def _call(unit: Any, payload: torch.Tensor, payload_stride: int, **values: Any) -> _Call:
    compressor, size = unit.compressor, unit.size
    layout = compressor.layout(size)
    groups = -(-size // compressor.chunk)
    return _Call(
        payload=payload.data_ptr(),
        payload_stride=payload_stride,
        size=size,
        groups=groups,
        tiles=max(1, groups),
        indices_offset=layout["indices"].offset,
        values_offset=layout["values"].offset,
        payload_nbytes=layout.nbytes,
        **values,
    )


def _run(function: Any, compressor, call: _Call, chunks: int) -> None:
    min_part = -(-PART * TILE // compressor.chunk)
    run_parts(functools.partial(function, ctypes.byref(call)), chunks * call.tiles, min_part)


@functools.cache
def build(compressor) -> Any:
    """The compiled functions; ``None`` if they cannot be compiled."""
    built: Any = library(program(compressor))
    if built is not None:
        declare(built, "encode", "decode", "encode_batch", "decode_batch")
    return built


def program(compressor) -> str:
    """The source of the C program of one configuration."""
    classes = 1 << (_CLASSES_PER_ENTRY * compressor.k - 1).bit_length()  # a power of two, as the groups are
    defines = {
        "GROUP": compressor.chunk,
        "K": compressor.k,
        "CLASSES": min(compressor.chunk, classes),
        "BITS": compressor.value_bits,
        "STATUS": STATUS_OK,
    }
    text = "".join(f"#define {name} {value}\n" for name, value in defines.items())
    return "\n".join((COMMON, VECTORS, text, c_structs(call_t=_Call), BATCHES, program_text(__package__, _TEMPLATE)))
