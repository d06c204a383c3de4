"""The host path of :mod:`~gckernels.ops.randomk`: ``host.c``."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch

from ...compressor import Backend, Decoding, Encoding
from ...toolkit.host.library import COMMON, PART, VECTORS, declare, library
from ...toolkit.host.structs import c_structs, pointer
from ...toolkit.host.summable import SummableCall
from ...toolkit.host.threads import run_parts
from ...toolkit.reference import REFERENCE
from ...toolkit.sparsifier.keys import require_size
from .header import HEADER_NUMEL, MAX_WORLD, PART_BITS

_TEMPLATE = Path(__file__).with_suffix(".c")
_WIDTH = 4  # bytes of a number
_TILE = 2048


class _Call(SummableCall):
    """Arguments of the functions in ``host.c``, as ``call_t``."""

    _fields_ = (
        ("nonfinite", pointer(ctypes.c_int32)),  # [chunks], whether an element is inf or NaN
        ("old", pointer(ctypes.c_float)),  # [chunks, k]: the entries' residuals
        ("k", ctypes.c_int64),  # entries of a payload
        ("seed", ctypes.c_uint64),
    )


class RandomKHost(Backend):
    """The algorithm on the CPU, one unit after the other."""

    def encode(self, unit: Encoding, scale: float = 1.0) -> None:
        require_size(unit.compressor.name, unit.size)
        built = build()
        if built is None:
            REFERENCE.encode(unit, scale)
            return
        chunks, tiles, k = unit.payload.shape[0], -(-unit.size // _TILE), unit.compressor.capacity(unit.size)
        nonfinite = (ctypes.c_int32 * chunks)()
        old = torch.empty(0 if unit.residual is None else chunks * k)
        more = {"nonfinite": ctypes.addressof(nonfinite), "old": old.data_ptr(), "k": k, "seed": unit.seed}
        # a unit without elements has a header
        call = _Call.encoding(unit, _WIDTH, max(1, tiles), scale, **more)
        where, count = ctypes.byref(call), call.tiles * chunks
        run_parts(functools.partial(built.encode, where), count, PART)
        if any(nonfinite):
            run_parts(functools.partial(built.take_back, where), count, PART)

    def decode(self, unit: Decoding, scale: float = 1.0, accumulate: bool = False) -> None:
        built = build()
        if built is None:
            REFERENCE.decode(unit, scale, accumulate)
            return
        tiles, k = -(-unit.size // _TILE), unit.compressor.capacity(unit.size)
        call = _Call.decoding(unit, _WIDTH, tiles, scale, accumulate, k=k)
        run_parts(functools.partial(built.decode, ctypes.byref(call)), tiles * unit.payloads.shape[1], PART)


@functools.cache
def build() -> Any:
    """The compiled functions; ``None`` if they cannot be compiled."""
    built: Any = library(program())
    if built is not None:
        declare(built, "encode", "take_back", "decode")
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
    return "\n".join((text, COMMON, VECTORS, c_structs(call_t=_Call), _TEMPLATE.read_text()))
