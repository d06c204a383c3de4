"""The host path of the casts: ``casts_host.c``, compiled for one payload type."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from . import reference
from .native import COMMON, DTYPES, PART, TILE, declare, library
from .summable_host import SummableCall
from .threads import run_parts

if TYPE_CHECKING:
    from .casts import CastCompressor

_TEMPLATE = Path(__file__).with_suffix(".c")


def encode(compressor: CastCompressor, grad, residual, payload, size: int, scale: float) -> None:
    """Encode ``grad`` into ``payload [chunks, nbytes]``."""
    built = _build(compressor.payload_dtype)
    if built is None:
        encoded = reference.encode_reference(compressor, grad, residual, payload.shape[0], 0, scale, size)
        reference.write_encoded(encoded, payload, residual)
        return
    width, tiles = compressor.payload_dtype.itemsize, max(1, -(-size // TILE))
    call = SummableCall.encoding(grad, residual, payload, width, size, tiles, scale)
    run_parts(functools.partial(built.encode, ctypes.byref(call)), tiles * payload.shape[0], PART)


def decode(compressor: CastCompressor, payloads, out, size: int, scale: float, accumulate: bool) -> None:
    """Decode and merge ``payloads [sources, chunks, nbytes]`` into ``out``."""
    built = _build(compressor.payload_dtype)
    if built is None:
        out.copy_(reference.decode_reference(compressor, payloads, out, scale, accumulate, size))
        return
    width, tiles = compressor.payload_dtype.itemsize, -(-size // TILE)
    call = SummableCall.decoding(payloads, width, out, size, tiles, scale, accumulate)
    run_parts(functools.partial(built.decode, ctypes.byref(call)), tiles * payloads.shape[1], PART)


@functools.cache
def _build(payload_dtype: torch.dtype) -> Any:
    built: Any = library(
        f"#define DTYPE {DTYPES[payload_dtype]}\n#define TILE {TILE}\n{COMMON}\n{_TEMPLATE.read_text()}"
    )
    if built is not None:
        declare(built, "encode", "decode")
    return built
