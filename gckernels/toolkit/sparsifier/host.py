"""The host path of the sparsifiers: ``host.c`` and ``entries_host.c``, which serve them all."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch

from ...compressor import Backend, Decoding, Encoding
from ..host.library import COMMON, DTYPES, PART, VECTORS, declare, library
from ..host.threads import get_num_threads, run_parts
from ..payload import STATUS_OK, round_up
from ..reference import REFERENCE
from .entries import BLOCK, SPAN
from .host_calls import STRUCTS, ChunkState, DecodeCall, EncodeCall, Payloads, Source, TileEntries
from .keys import LEADING_SHIFT, MAX_FINITE_KEY, MAX_SAMPLE_STRIDE, MIN_SAMPLE, NAN_KEY, require_size
from .selection_host import SAMPLED, HostRule, Narrowing
from .states import Accumulation

_SOURCES = ("host.c", "selection_host.c", "emit_host.c", "entries_host.c")
_PROGRAM = "".join(Path(__file__).with_name(name).read_text() for name in _SOURCES)
_SAMPLED_PART, _WRITTEN_PART = 16, 512
_ALIGN = 64  # bytes
_ROOM = 4  # candidates that there is room for, per entry
_FUNCTIONS = (
    *("add_squares", "take_samples", "bound_keys", "collect", "narrow", "load_all", "count_entries", "place_entries"),
    *("emit_entries", "write_entries", "find_starts", "decode"),
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
        _select(built, call, compressor.selection.rule, unit)

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


def _select(built: Any, call: EncodeCall, rule: HostRule, unit: Encoding) -> None:
    """Select the entries of a unit and write them, and leave the other elements in the states."""
    select, chunks, tiles = call.select, call.payloads.chunks, call.payloads.tiles
    buffers = _fill_in_buffers(call, rule)  # noqa: F841  they live as long as this name
    select.seed, select.key, select.by_sample, select.narrowing = unit.seed, rule.key, rule.by_sample, rule.narrowing
    where = ctypes.byref(call)
    alone = chunks * tiles < 2 * PART or get_num_threads() == 1
    if alone:
        built.select_alone(where)
    else:
        run_parts(functools.partial(built.take_samples, where), chunks * select.sample_blocks, _SAMPLED_PART)
        built.bound_keys(where, 0, chunks)
        run_parts(functools.partial(built.collect, where), chunks * tiles, PART)
        built.narrow(where, 0, chunks)
    chunk = -1
    while (chunk := built.missing_from(where, chunk + 1)) >= 0:
        everything = torch.empty(unit.size)
        select.all, select.searched = everything.data_ptr(), chunk
        run_parts(functools.partial(built.load_all, where), tiles, PART)
        built.narrow_all(where)
    if alone:
        built.emit_alone(where)
        return
    run_parts(functools.partial(built.count_entries, where), chunks * tiles, PART)
    built.place_entries(where, 0, chunks)
    run_parts(functools.partial(built.emit_entries, where), chunks * tiles, PART)
    run_parts(functools.partial(built.write_entries, where), chunks * -(-call.payloads.k // BLOCK), _WRITTEN_PART)


def _fill_in_buffers(call: EncodeCall, rule: HostRule) -> torch.Tensor:
    """Make the buffers of a call in one piece of memory; pages of it that are not touched are not taken."""
    payloads, select = call.payloads, call.select
    chunks, k, width = payloads.chunks, payloads.k, 4
    select.sample_blocks = -(-rule.max_samples(payloads.size) // SAMPLED)
    select.room = min(payloads.size, _ROOM * k + SPAN)
    candidates, entries = width * chunks * select.room, width * chunks * k
    velocity = bool(call.source.velocity)
    parts: tuple[tuple[ctypes.Structure, str, int], ...] = (
        (select, "bounds", 32 * chunks),
        (select, "states", ctypes.sizeof(ChunkState) * chunks),
        (select, "entries", ctypes.sizeof(TileEntries) * chunks * payloads.tiles),
        (select, "samples", width * chunks * select.sample_blocks * SAMPLED),
        (select, "indices", candidates),
        (select, "values", candidates),
        (select, "velocities", velocity * candidates),
        (call.write, "indices", entries),
        (call.write, "values", entries),
        (call.write, "velocities", velocity * (payloads.value_bits < 32) * entries),
    )
    buffers = torch.empty(sum(round_up(nbytes, _ALIGN) for *_, nbytes in parts), dtype=torch.uint8)
    at = buffers.data_ptr()
    for structure, field, nbytes in parts:
        setattr(structure, field, at if nbytes else None)
        at += round_up(nbytes, _ALIGN)
    return buffers


@functools.cache
def build() -> Any:
    """The compiled functions; ``None`` if they cannot be compiled."""
    built: Any = library(program())
    if built is not None:
        declare(built, *_FUNCTIONS)
        built.missing_from.argtypes, built.missing_from.restype = (ctypes.c_void_p, ctypes.c_int64), ctypes.c_int64
        for function in (built.narrow_all, built.select_alone, built.emit_alone):
            function.argtypes, function.restype = (ctypes.c_void_p,), None
    return built


def program() -> str:
    """The source of the C program."""
    constants = {"TILE": SPAN, "BLOCK": BLOCK, "STATUS": STATUS_OK, "SAMPLED": SAMPLED, "NAN_KEY": NAN_KEY}
    constants |= {"MAX_FINITE_KEY": MAX_FINITE_KEY, "LEADING_SHIFT": LEADING_SHIFT}
    constants |= {"MIN_SAMPLE": MIN_SAMPLE, "MAX_SAMPLE_STRIDE": MAX_SAMPLE_STRIDE}
    constants |= {each.name: each.value for each in Narrowing}
    defined = "".join(f"#define {name} {value}\n" for name, value in constants.items())
    return "\n".join((COMMON, VECTORS, defined, STRUCTS, _PROGRAM))
