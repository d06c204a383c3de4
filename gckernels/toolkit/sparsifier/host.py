"""The host path of the sparsifiers: ``host.c`` and ``entries_host.c``, which serve them all."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .. import reference
from ..host.library import COMMON, DTYPES, PART, declare, library
from ..host.threads import run_parts
from ..payload import STATUS_OK
from .entries import BLOCK, SPAN
from .host_calls import STRUCTS, DecodeCall, EncodeCall, Payloads, Source
from .keys import NAN_KEY
from .selection_host import HostSelection

if TYPE_CHECKING:
    from . import Sparsifier
    from .states import Accumulation

_PROGRAM = "".join(Path(__file__).with_name(name).read_text() for name in ("host.c", "entries_host.c"))
_WRITTEN_PART = 512
_FUNCTIONS = (
    *("add_squares", "count_keys", "take_sample", "count_entries", "count_again", "place_entries", "emit_entries"),
    *("write_entries", "find_starts", "decode"),
)


def encode(compressor: Sparsifier, grad, residual, payload, size: int, seed: int) -> None:
    """Encode ``grad`` into ``payload [chunks, nbytes]``, each chunk laid out for ``size`` elements."""
    built = build()
    if built is None:
        encoded = reference.encode_reference(compressor, grad, residual, payload.shape[0], seed, 1.0, size)
        reference.write_encoded(encoded, payload, residual)
        return
    call = EncodeCall(Payloads.of(compressor, size, grad.numel(), payload), Source.of(compressor, grad, residual))
    if residual is not None:
        _limit_norm(built, call, compressor.accumulation)
    selection = HostSelection(built, call, seed)
    compressor.selection.on_host(selection)
    _write(built, call)


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


def decode(compressor: Sparsifier, payloads, out, size: int, scale: float, accumulate: bool) -> None:
    """Decode and merge ``payloads [sources, chunks, nbytes]`` into ``out``."""
    built = build()
    if built is None:
        out.copy_(reference.decode_reference(compressor, payloads, out, scale, accumulate, size))
        return
    call = DecodeCall(
        payloads=Payloads.of(compressor, size, out.numel(), payloads),
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
