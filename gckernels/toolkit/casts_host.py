"""The host path of the casts: ``casts_host.c``, compiled for one payload type."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from . import reference
from .native import COMMON, DTYPES, PART, TILE, declare, library
from .threads import run_parts

if TYPE_CHECKING:
    from .casts import CastCompressor

_TEMPLATE = Path(__file__).with_suffix(".c")


class _Call(ctypes.Structure):
    """``call_t`` in ``casts_host.c``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("source", "residual", "target")),
        *((name, ctypes.c_int64) for name in ("numel", "size", "tiles")),
        *((name, ctypes.c_int64) for name in ("chunk_stride", "sources", "source_stride", "payload_count")),
        *(("scale", ctypes.c_float), ("dtype", ctypes.c_int32), ("accumulate", ctypes.c_int32)),
    )


def encode(compressor: CastCompressor, grad, residual, payload, size: int, scale: float) -> None:
    """Encode ``grad`` into ``payload [chunks, nbytes]``."""
    built = _build(compressor.payload_dtype)
    if built is None:
        encoded = reference.encode_reference(compressor, grad, residual, payload.shape[0], 0, scale, size)
        reference.write_encoded(encoded, payload, residual)
        return
    typed = payload.view(compressor.payload_dtype)
    tiles = max(1, -(-size // TILE))
    call = _Call(
        source=grad.data_ptr(),
        residual=None if residual is None else residual.data_ptr(),
        target=payload.data_ptr(),
        numel=grad.numel(),
        size=size,
        tiles=tiles,
        chunk_stride=typed.stride(0),
        payload_count=typed.shape[1],
        scale=scale,
        dtype=DTYPES[grad.dtype],
    )
    run_parts(functools.partial(built.encode, ctypes.byref(call)), tiles * payload.shape[0], PART)


def decode(compressor: CastCompressor, payloads, out, size: int, scale: float, accumulate: bool) -> None:
    """Decode and merge ``payloads [sources, chunks, nbytes]`` into ``out``."""
    built = _build(compressor.payload_dtype)
    if built is None:
        out.copy_(reference.decode_reference(compressor, payloads, out, scale, accumulate, size))
        return
    sources, chunks, _ = payloads.shape
    typed = payloads.view(compressor.payload_dtype)
    tiles = -(-size // TILE)
    call = _Call(
        source=payloads.data_ptr(),
        target=out.data_ptr(),
        numel=out.numel(),
        size=size,
        tiles=tiles,
        chunk_stride=typed.stride(1),
        sources=sources,
        source_stride=typed.stride(0),
        scale=scale,
        dtype=DTYPES[out.dtype],
        accumulate=accumulate,
    )
    run_parts(functools.partial(built.decode, ctypes.byref(call)), tiles * chunks, PART)


@functools.cache
def _build(payload_dtype: torch.dtype) -> Any:
    built: Any = library(
        f"#define DTYPE {DTYPES[payload_dtype]}\n#define TILE {TILE}\n{COMMON}\n{_TEMPLATE.read_text()}"
    )
    if built is not None:
        declare(built, "encode", "decode")
    return built
