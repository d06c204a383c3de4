"""The host path of :mod:`~gckernels.ops.randomk`: ``randomk_host.c``."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..toolkit import reference
from ..toolkit.native import COMMON, DTYPES, PART, declare, library
from ..toolkit.threads import run_parts
from .randomk_header import HEADER_NUMEL, LARGEST_WORLD, PART_BITS

if TYPE_CHECKING:
    from .randomk import RandomK

_TEMPLATE = Path(__file__).with_suffix(".c")
_TILE = 2048
_EMITTED_PART = 4096


class _Call(ctypes.Structure):
    """``call_t`` in ``randomk_host.c``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("source", "residual", "target", "spoilt")),
        *((name, ctypes.c_int64) for name in ("numel", "size", "tiles", "k")),
        *((name, ctypes.c_int64) for name in ("chunk_stride", "sources", "source_stride", "payload_count")),
        *(("seed", ctypes.c_uint64), ("scale", ctypes.c_float)),
        *((name, ctypes.c_int32) for name in ("dtype", "accumulate")),
    )


def encode(compressor: RandomK, grad, residual, payload, size: int, seed: int, scale: float) -> None:
    """Encode ``grad`` into ``payload [chunks, nbytes]``, each chunk laid out for ``size`` elements."""
    built = _build()
    if built is None:
        encoded = reference.encode_reference(compressor, grad, residual, payload.shape[0], seed, scale, size)
        reference.write_encoded(encoded, payload, residual)
        return
    chunks, count = payload.shape[0], payload.shape[1] // 4
    tiles, spoilt = -(-size // _TILE), torch.zeros(chunks, dtype=torch.int32)
    call = _Call(
        source=grad.data_ptr(),
        residual=None if residual is None else residual.data_ptr(),
        target=payload.data_ptr(),
        spoilt=spoilt.data_ptr(),
        numel=grad.numel(),
        size=size,
        tiles=tiles,
        k=compressor.capacity(size),
        chunk_stride=payload.stride(0) // 4,
        payload_count=count,
        seed=seed,
        scale=scale,
        dtype=DTYPES[grad.dtype],
    )
    where = ctypes.byref(call)
    run_parts(functools.partial(built.accumulate, where), tiles * chunks, PART)
    run_parts(functools.partial(built.emit, where), count * chunks, _EMITTED_PART)


def decode(compressor: RandomK, payloads, out, size: int, scale: float, accumulate: bool) -> None:
    """Decode and merge ``payloads [sources, chunks, nbytes]`` into ``out``."""
    built = _build()
    if built is None:
        out.copy_(reference.decode_reference(compressor, payloads, out, scale, accumulate, size))
        return
    sources, chunks, _ = payloads.shape
    tiles = -(-size // _TILE)
    call = _Call(
        source=payloads.data_ptr(),
        target=out.data_ptr(),
        numel=out.numel(),
        size=size,
        tiles=tiles,
        k=compressor.capacity(size),
        chunk_stride=payloads.stride(1) // 4,
        sources=sources,
        source_stride=payloads.stride(0) // 4,
        scale=scale,
        dtype=DTYPES[out.dtype],
        accumulate=accumulate,
    )
    run_parts(functools.partial(built.decode, ctypes.byref(call)), tiles * chunks, PART)


@functools.cache
def _build() -> Any:
    defines = {
        "TILE": _TILE,
        "HEADER_NUMEL": HEADER_NUMEL,
        "PART_BITS": PART_BITS,
        "LARGEST_WORLD": LARGEST_WORLD,
    }
    text = "".join(f"#define {name} {value}\n" for name, value in defines.items())
    built: Any = library(f"{text}{COMMON}\n{_TEMPLATE.read_text()}")
    if built is not None:
        declare(built, "accumulate", "emit", "decode")
    return built
