"""The host path of the sparsifiers: ``host.c`` and ``entries_host.c``, which serve them all."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...compressor import chunk_bounds
from .. import reference
from ..host.library import COMMON, DTYPES, PART, declare, library
from ..host.structs import c_structs, pointer
from ..host.threads import run_parts
from ..payload import STATUS_OK
from .entries import BLOCK, SPAN
from .keys import LARGEST_FINITE, NAN_KEY, sample_rank, sample_stride

if TYPE_CHECKING:
    from . import Sparsifier
    from .states import Memory

_PROGRAM = "".join(Path(__file__).with_name(name).read_text() for name in ("host.c", "entries_host.c"))
_SAMPLE_PART = 4096
_WRITTEN_PART = 512
_OFFSETS = ("highs_offset", "lows_offset", "scales_offset", "values_offset")
_FUNCTIONS = (
    *("add_squares", "count_keys", "take_sample", "count_entries", "count_again", "place_entries", "emit_entries"),
    *("write_entries", "find_starts", "decode"),
)


class _Call(ctypes.Structure):
    """Arguments of the functions in ``host.c`` and ``entries_host.c``, as ``call_t``."""

    _fields_ = (
        ("source", pointer(const=True)),  # the gradient
        ("residual", pointer(ctypes.c_float)),  # what was not sent, or None
        ("velocity", pointer(ctypes.c_float)),  # of a momentum, or None
        ("payload", pointer(ctypes.c_uint8)),  # the payload to write; when decoding, the payloads to read
        ("out", pointer()),  # when decoding
        ("squares", pointer(ctypes.c_double)),  # [chunks * tiles]
        ("indices", pointer(ctypes.c_int32)),  # [chunks, k]: the entries, before they are written
        ("values", pointer(ctypes.c_float)),  # [chunks, k]
        ("velocities", pointer(ctypes.c_float)),  # [chunks, k] of the entries, where write_entries needs them; or None
        ("starts", pointer(ctypes.c_int64)),  # [sources, chunks, tiles + 1]: bits before the tile, when decoding
        ("counts", pointer(ctypes.c_int64)),  # [chunks, BINS]
        ("bounds", pointer(ctypes.c_int64)),  # [chunks, 4]: lower, upper, room between them, entries
        # [chunks * tiles, 3]: above the bounds, between them (then, before the tile); where in keys
        ("entries", pointer(ctypes.c_int64)),
        ("cursors", pointer(ctypes.c_int64)),  # [chunks], into keys; or None
        ("keys", pointer(ctypes.c_int32)),  # between the bounds, or of one chunk's sample
        *((name, ctypes.c_int64) for name in ("numel", "size", "tiles")),  # of the unit; of a chunk; tiles per chunk
        *((name, ctypes.c_int64) for name in ("k", "highs_words")),
        *((name, ctypes.c_int64) for name in _OFFSETS),
        *((name, ctypes.c_int64) for name in ("nbytes", "chunks", "payload_stride", "sources", "source_stride")),
        *((name, ctypes.c_int64) for name in ("sample_stride", "first")),
        ("seed", ctypes.c_uint64),
        *((name, ctypes.c_float) for name in ("scale", "momentum", "factor")),
        *((name, ctypes.c_int32) for name in ("dtype", "accumulate", "low", "value_bits", "nesterov")),
    )


def encode(compressor: Sparsifier, grad, residual, payload, size: int, seed: int) -> None:
    """Encode ``grad`` into ``payload [chunks, nbytes]``, each chunk laid out for ``size`` elements."""
    built, chunks = build(), payload.shape[0]
    if built is None:
        encoded = reference.encode_reference(compressor, grad, residual, chunks, seed, 1.0, size)
        reference.write_encoded(encoded, payload, residual)
        return
    call = _call(compressor, size, grad.numel(), payload, dtype=DTYPES[grad.dtype], seed=seed)
    call.source = grad.data_ptr()
    tiles, where = chunks * call.tiles, ctypes.byref(call)
    if residual is not None:
        _remember(built, call, compressor.memory, residual, tiles)
    bounds, entries = torch.zeros(chunks, 4, dtype=torch.int64), torch.empty(tiles, 3, dtype=torch.int64)
    call.bounds, call.entries = bounds.data_ptr(), entries.data_ptr()
    bounds[:, 1] = LARGEST_FINITE
    if not compressor.digits:
        bounds[:, 0] = compressor.lowest
    elif compressor.sampled:
        for chunk in range(chunks):
            bounds[chunk, 0] = _sampled_key(built, call, chunk)
    else:
        kept = _bound_by_bins(built, call, bounds)
    bounds[:, 0].clamp_(min=1)  # zeros are not sent
    if compressor.trimmed:  # whatever passes may be the k-th largest; memory that is not touched is not taken
        bounds[:, 1] = NAN_KEY
        kept = torch.full((chunks,), size)
    narrowing = compressor.trimmed or (compressor.digits > 1 and not compressor.sampled)
    if narrowing:
        ends = kept.cumsum(0)
        cursors, keys = ends - kept, torch.empty(int(ends[-1]), dtype=torch.int32)
        call.cursors, call.keys = cursors.data_ptr(), keys.data_ptr()
    run_parts(functools.partial(built.count_entries, where), tiles, PART)
    if narrowing:
        for chunk in range(chunks):
            above = int(entries.view(chunks, -1, 3)[chunk, :, 0].sum())
            key = _kth_largest(built, keys[ends[chunk] - kept[chunk] : cursors[chunk]], call.k - above)
            bounds[chunk, :2] = max(int(bounds[chunk, 0]), key)
        run_parts(functools.partial(built.count_again, where), tiles, PART)
    built.place_entries(where, 0, chunks)
    indices, values = torch.empty(chunks, call.k, dtype=torch.int32), torch.empty(chunks, call.k)
    call.indices, call.values = indices.data_ptr(), values.data_ptr()
    if call.velocity and call.value_bits < 32:
        velocities = torch.empty_like(values)
        call.velocities = velocities.data_ptr()
    run_parts(functools.partial(built.emit_entries, where), tiles, PART)
    run_parts(functools.partial(built.write_entries, where), chunks * -(-call.k // BLOCK), _WRITTEN_PART)


def _remember(built: Any, call: _Call, memory: Memory, residual: torch.Tensor, tiles: int) -> None:
    """Say what is remembered, where, and by how much the gradient is scaled."""
    call.residual = residual.data_ptr() + (memory.states - 1) * call.numel * residual.itemsize
    call.velocity = residual.data_ptr() if memory.states > 1 else None
    call.momentum, call.nesterov, call.factor = memory.momentum, memory.nesterov, 1.0
    if memory.largest_norm is not None:
        squares = torch.empty(tiles, dtype=torch.float64)
        call.squares = squares.data_ptr()
        run_parts(functools.partial(built.add_squares, ctypes.byref(call)), tiles, PART)
        # one after the other: torch's own sum is in an order that depends on the number of threads
        call.factor = memory.factor(squares.cumsum(0)[-1]).item()


def _bound_by_bins(built: Any, call: _Call, bounds: torch.Tensor) -> torch.Tensor:
    """Bound the k-th largest key of every chunk by its leading 11 bits; how many keys are between, ``[chunks]``."""
    counts = torch.zeros(len(bounds), 2048, dtype=torch.int64)
    call.counts = counts.data_ptr()
    run_parts(functools.partial(built.count_keys, ctypes.byref(call)), len(bounds) * call.tiles, PART)
    reaching = counts.flip(1).cumsum(1).flip(1)
    bins = ((reaching >= call.k).sum(1) - 1).clamp_(min=0)
    bounds[:, 0], bounds[:, 1] = bins << 20, ((bins + 1) << 20) - 1
    return counts.gather(1, bins[:, None])[:, 0]


def _sampled_key(built: Any, call: _Call, chunk: int) -> int:
    """The lower key of a chunk, from its sample."""
    first, last = chunk_bounds(call.numel, call.size, chunk)
    call.first, call.sample_stride = first, sample_stride(last - first)
    keys = torch.empty((last - first) // call.sample_stride, dtype=torch.int32)
    call.keys = keys.data_ptr()
    run_parts(functools.partial(built.take_sample, ctypes.byref(call)), keys.numel(), _SAMPLE_PART)
    return _kth_largest(built, keys, sample_rank(call.k, last - first))


def _kth_largest(built: Any, keys: torch.Tensor, k: int) -> int:
    """``kth_largest`` of ``keys.py``, without sorting."""
    return int(built.kth_largest(keys.data_ptr(), keys.numel(), k))


def decode(compressor: Sparsifier, payloads, out, size: int, scale: float, accumulate: bool) -> None:
    """Decode and merge ``payloads [sources, chunks, nbytes]`` into ``out``."""
    built = build()
    if built is None:
        out.copy_(reference.decode_reference(compressor, payloads, out, scale, accumulate, size))
        return
    call = _call(compressor, size, out.numel(), payloads, dtype=DTYPES[out.dtype], scale=scale)
    call.sources, call.source_stride = payloads.shape[0], payloads.stride(0)
    call.out, call.accumulate = out.data_ptr(), accumulate
    starts = torch.empty(call.sources * call.chunks, call.tiles + 1, dtype=torch.int64)
    call.starts, where = starts.data_ptr(), ctypes.byref(call)
    run_parts(functools.partial(built.find_starts, where), len(starts), -(-PART // call.tiles))
    run_parts(functools.partial(built.decode, where), call.chunks * call.tiles, PART)


def _call(compressor: Sparsifier, size: int, numel: int, payload: torch.Tensor, **values: Any) -> _Call:
    """For a payload ``[..., chunks, nbytes]``."""
    layout = compressor.layout(size)
    offsets = {f"{field.name}_offset": field.offset for field in layout.fields}
    return _Call(
        payload=payload.data_ptr(),
        payload_stride=payload.stride(-2),
        chunks=payload.shape[-2],
        numel=numel,
        size=size,
        tiles=max(1, -(-size // SPAN)),
        k=compressor.capacity(size),
        highs_words=layout["highs"].count,
        nbytes=layout.nbytes,
        low=compressor.entries.low,
        value_bits=compressor.value_bits,
        **offsets,
        **values,
    )


@functools.cache
def build() -> Any:
    """The compiled functions; ``None``: there is no way here."""
    built: Any = library(program())
    if built is not None:
        declare(built, *_FUNCTIONS)
        built.kth_largest.argtypes = (ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32)
    return built


def program() -> str:
    """The C program."""
    constants = {"TILE": SPAN, "BLOCK": BLOCK, "STATUS": STATUS_OK, "NAN_KEY": NAN_KEY}
    defined = "".join(f"#define {name} {value}\n" for name, value in constants.items())
    return "\n".join((defined, COMMON, c_structs(call_t=_Call), _PROGRAM))
