"""The host path of the sparsifiers: ``host.c`` and ``entries_host.c``, which serve them all."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch

from ...compressor import Backend, Decoding, Encoding
from ..host.library import COMMON, DTYPES, PART, declare, library
from ..host.threads import run_parts
from ..payload import STATUS_OK
from ..reference import REFERENCE
from .entries import BLOCK, SPAN
from .host_calls import STRUCTS, DecodeCall, EncodeCall, Payloads, Source
from .keys import NAN_KEY, require_size
from .selection_host import HostSelection
from .states import Accumulation

_PROGRAM = "".join(Path(__file__).with_name(name).read_text() for name in ("host.c", "entries_host.c"))
_WRITTEN_PART = 512
_FUNCTIONS = (
    *("add_squares", "count_keys", "take_sample", "count_entries", "count_again", "place_entries", "emit_entries"),
    *("write_entries", "find_starts", "decode"),
)


class SparsifierHost(Backend):
    """Sparsifiers on the CPU, one unit after the other."""

    def encode(self, unit: Encoding, scale: float = 1.0) -> None:
        compressor, grad = unit.compressor, unit.grad
        require_size(compressor.name, unit.size)
        built = build()
        if built is None:
            REFERENCE.encode(unit, scale)
            return
        payloads = Payloads.of(compressor, unit.size, grad.numel(), unit.payload)
        call = EncodeCall(payloads, Source.of(compressor, grad, unit.residual))
        if unit.residual is not None:
            _limit_norm(built, call, compressor.accumulation)
        selection = HostSelection(built, call, unit.seed)  # its tensors are in the call
        compressor.selection.on_host(selection)
        _write(built, call)

    def decode(self, unit: Decoding, scale: float = 1.0, accumulate: bool = False) -> None:
        built, payloads, out = build(), unit.payloads, unit.out
        if built is None:
            REFERENCE.decode(unit, scale, accumulate)
            return
        call = DecodeCall(
            payloads=Payloads.of(unit.compressor, unit.size, out.numel(), payloads),
            sources=payloads.shape[0],
            source_stride=payloads.stride(0),
            out=out.data_ptr(),
            scale=scale,
            dtype=DTYPES[out.dtype],
            accumulate=accumulate,
        )
        chunks, tiles, where = call.payloads.chunks, call.payloads.tiles, ctypes.byref(call)
        starts = torch.empty(call.sources * chunks, tiles + 1, dtype=torch.int64)
        call.starts = starts.data_ptr()
        run_parts(functools.partial(built.find_starts, where), len(starts), -(-PART // tiles))
        run_parts(functools.partial(built.decode, where), chunks * tiles, PART)


def _limit_norm(built: Any, call: EncodeCall, accumulation: Accumulation) -> None:
    """Find the factor of the gradient if its norm is limited."""
    if accumulation.max_norm is None:
        return
    tiles = call.payloads.chunks * call.payloads.tiles
    squares = torch.empty(tiles, dtype=torch.float64)
    call.source.squares = squares.data_ptr()
    run_parts(functools.partial(built.add_squares, ctypes.byref(call)), tiles, PART)
    # one after the other: torch's own sum is in an order that depends on the number of threads
    call.source.factor = accumulation.factor(squares.cumsum(0)[-1]).item()


def _write(built: Any, call: EncodeCall) -> None:
    """Write the selected entries, and leave the other elements in the states."""
    where, chunks, k = ctypes.byref(call), call.payloads.chunks, call.payloads.k
    built.place_entries(where, 0, chunks)
    indices, values = torch.empty(chunks, k, dtype=torch.int32), torch.empty(chunks, k)
    call.write.indices, call.write.values = indices.data_ptr(), values.data_ptr()
    if call.source.velocity and call.payloads.value_bits < 32:
        velocities = torch.empty_like(values)
        call.write.velocities = velocities.data_ptr()
    run_parts(functools.partial(built.emit_entries, where), chunks * call.payloads.tiles, PART)
    run_parts(functools.partial(built.write_entries, where), chunks * -(-k // BLOCK), _WRITTEN_PART)


@functools.cache
def build() -> Any:
    """The compiled functions; ``None`` if they cannot be compiled."""
    built: Any = library(program())
    if built is not None:
        declare(built, *_FUNCTIONS)
        built.kth_largest.argtypes = (ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32)
    return built


def program() -> str:
    """The source of the C program."""
    constants = {"TILE": SPAN, "BLOCK": BLOCK, "STATUS": STATUS_OK, "NAN_KEY": NAN_KEY}
    defined = "".join(f"#define {name} {value}\n" for name, value in constants.items())
    return "\n".join((defined, COMMON, STRUCTS, _PROGRAM))
