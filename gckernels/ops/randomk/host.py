"""The host path of :mod:`~gckernels.ops.randomk`: ``host.c``."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...toolkit import reference
from ...toolkit.host.library import COMMON, PART, declare, library
from ...toolkit.host.structs import c_structs, pointer
from ...toolkit.host.summable import SummableCall
from ...toolkit.host.threads import run_parts
from .header import HEADER_NUMEL, MAX_WORLD, PART_BITS

if TYPE_CHECKING:
    from . import RandomK

_TEMPLATE = Path(__file__).with_suffix(".c")
_WIDTH = 4  # bytes of a number
_TILE = 2048
_EMITTED_PART = 4096


class _Call(SummableCall):
    """Arguments of the functions in ``host.c``, as ``call_t``."""

    _fields_ = (
        ("nonfinite", pointer(ctypes.c_int32)),  # [chunks], whether an element is inf or NaN
        ("k", ctypes.c_int64),  # entries of a payload
        ("seed", ctypes.c_uint64),
    )


def encode(compressor: RandomK, grad, residual, payload, size: int, seed: int, scale: float) -> None:
    """Encode ``grad`` into ``payload [chunks, nbytes]``, each chunk laid out for ``size`` elements."""
    built = build()
    if built is None:
        encoded = reference.encode_reference(compressor, grad, residual, payload.shape[0], seed, scale, size)
        reference.write_encoded(encoded, payload, residual)
        return
    chunks, tiles, k = payload.shape[0], -(-size // _TILE), compressor.capacity(size)
    nonfinite = torch.zeros(chunks, dtype=torch.int32)
    more = {"nonfinite": nonfinite.data_ptr(), "k": k, "seed": seed}
    call = _Call.encoding(grad, residual, payload, _WIDTH, size, tiles, scale, **more)
    where = ctypes.byref(call)
    run_parts(functools.partial(built.accumulate, where), tiles * chunks, PART)
    run_parts(functools.partial(built.emit, where), call.payload_count * chunks, _EMITTED_PART)


def decode(compressor: RandomK, payloads, out, size: int, scale: float, accumulate: bool) -> None:
    """Decode and merge ``payloads [sources, chunks, nbytes]`` into ``out``."""
    built = build()
    if built is None:
        out.copy_(reference.decode_reference(compressor, payloads, out, scale, accumulate, size))
        return
    tiles, k = -(-size // _TILE), compressor.capacity(size)
    call = _Call.decoding(payloads, _WIDTH, out, size, tiles, scale, accumulate, k=k)
    run_parts(functools.partial(built.decode, ctypes.byref(call)), tiles * payloads.shape[1], PART)


@functools.cache
def build() -> Any:
    """The compiled functions; ``None`` if they cannot be compiled."""
    built: Any = library(program())
    if built is not None:
        declare(built, "accumulate", "emit", "decode")
    return built


def program() -> str:
    """The source of the C program."""
    defines = {
        "TILE": _TILE,
        "HEADER_NUMEL": HEADER_NUMEL,
        "PART_BITS": PART_BITS,
        "MAX_WORLD": MAX_WORLD,
    }
    text = "".join(f"#define {name} {value}\n" for name, value in defines.items())
    return "\n".join((text, COMMON, c_structs(call_t=_Call), _TEMPLATE.read_text()))
