"""The host path of :mod:`~gckernels.ops.chunktopk`: ``host.c``, compiled for one configuration."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...toolkit import reference
from ...toolkit.host.library import COMMON, DTYPES, PART, TILE, declare, library
from ...toolkit.host.structs import c_structs, pointer
from ...toolkit.host.threads import run_parts
from ...toolkit.payload import STATUS_OK

if TYPE_CHECKING:
    from . import ChunkTopK

_TEMPLATE = Path(__file__).with_suffix(".c")
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


def encode(
    compressor: ChunkTopK, grad: torch.Tensor, residual: torch.Tensor | None, payload: torch.Tensor, size: int
) -> None:
    """Encode ``grad`` into ``payload [chunks, nbytes]``."""
    built = build(compressor)
    if built is None:
        encoded = reference.encode_reference(compressor, grad, residual, payload.shape[0], size=size)
        reference.write_encoded(encoded, payload, residual)
        return
    call = _call(compressor, size, payload, payload.stride(0), numel=grad.numel(), dtype=DTYPES[grad.dtype])
    call.gradient = grad.data_ptr()
    call.residual = None if residual is None else residual.data_ptr()
    _run(built.encode, compressor, call, payload.shape[0])


def decode(
    compressor: ChunkTopK, payloads: torch.Tensor, out: torch.Tensor, size: int, scale: float, accumulate: bool
) -> None:
    """Decode and merge ``payloads [sources, chunks, nbytes]`` into ``out``."""
    built = build(compressor)
    if built is None:
        out.copy_(reference.decode_reference(compressor, payloads, out, scale, accumulate, size))
        return
    call = _call(compressor, size, payloads, payloads.stride(1), numel=out.numel(), dtype=DTYPES[out.dtype])
    call.sources, call.source_stride = payloads.shape[0], payloads.stride(0)
    call.out, call.scale, call.accumulate = out.data_ptr(), scale, accumulate
    _run(built.decode, compressor, call, payloads.shape[1])


def _call(compressor: ChunkTopK, size: int, payload: torch.Tensor, payload_stride: int, **values: Any) -> _Call:
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


def _run(function: Any, compressor: ChunkTopK, call: _Call, chunks: int) -> None:
    min_part = -(-PART * TILE // compressor.chunk)
    run_parts(functools.partial(function, ctypes.byref(call)), chunks * call.tiles, min_part)


@functools.cache
def build(compressor: ChunkTopK) -> Any:
    """The compiled functions; ``None`` if they cannot be compiled."""
    built: Any = library(program(compressor))
    if built is not None:
        declare(built, "encode", "decode")
    return built


def program(compressor: ChunkTopK) -> str:
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
    return "\n".join((COMMON, text, c_structs(call_t=_Call), _TEMPLATE.read_text()))
