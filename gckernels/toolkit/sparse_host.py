"""The host path of the sparsifiers: ``sparse_host.c``, which serves them all."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..compressor import chunk_bounds
from . import reference
from .native import COMMON, DTYPES, PART, declare, library
from .payload import STATUS_OK
from .sparse_keys import LARGEST_FINITE, sample_rank, sample_stride
from .threads import run_parts

if TYPE_CHECKING:
    from .sparse import Sparsifier

_TEMPLATE = Path(__file__).with_suffix(".c")
_TILE = 2048
_SAMPLE_PART = 4096
_FUNCTIONS = (
    *("count_keys", "take_sample", "count_entries", "count_again", "place_entries", "emit_entries"),
    "decode",
)


class _Call(ctypes.Structure):
    """``call_t`` in ``sparse_host.c``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("source", "residual", "payload", "out")),
        *((name, ctypes.c_void_p) for name in ("counts", "bounds", "entries", "cursors", "keys")),
        *((name, ctypes.c_int64) for name in ("numel", "size", "tiles")),
        *((name, ctypes.c_int64) for name in ("k", "indices_offset", "values_offset", "nbytes")),
        *((name, ctypes.c_int64) for name in ("payload_stride", "sources", "source_stride")),
        *((name, ctypes.c_int64) for name in ("sample_stride", "first")),
        *(("seed", ctypes.c_uint64), ("scale", ctypes.c_float)),
        *((name, ctypes.c_int32) for name in ("dtype", "accumulate", "bf16")),
    )


def encode(compressor: Sparsifier, grad, residual, payload, size: int, seed: int) -> None:
    """Encode ``grad`` into ``payload [chunks, nbytes]``, each chunk laid out for ``size`` elements."""
    built, chunks = _build(), payload.shape[0]
    if built is None:
        encoded = reference.encode_reference(compressor, grad, residual, chunks, seed, 1.0, size)
        reference.write_encoded(encoded, payload, residual)
        return
    call = _call(compressor, size, grad.numel(), payload, payload.stride(0), dtype=DTYPES[grad.dtype], seed=seed)
    call.source = grad.data_ptr()
    call.residual = None if residual is None else residual.data_ptr()
    tiles, where = chunks * call.tiles, ctypes.byref(call)
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
    narrowing = compressor.digits > 1 and not compressor.sampled
    if narrowing:
        ends = kept.cumsum(0)
        cursors, keys = ends - kept, torch.empty(int(ends[-1]), dtype=torch.int32)
        call.cursors, call.keys = cursors.data_ptr(), keys.data_ptr()
    run_parts(functools.partial(built.count_entries, where), tiles, PART)
    if narrowing:
        for chunk in range(chunks):
            above = int(entries.view(chunks, -1, 3)[chunk, :, 0].sum())
            key = max(1, _kth_largest(keys[ends[chunk] - kept[chunk] : cursors[chunk]], call.k - above))
            bounds[chunk, :2] = key
        run_parts(functools.partial(built.count_again, where), tiles, PART)
    built.place_entries(where, 0, chunks)
    run_parts(functools.partial(built.emit_entries, where), tiles, PART)


def _bound_by_bins(built: Any, call: _Call, bounds: torch.Tensor) -> torch.Tensor:
    """Bound the k-th largest key of every chunk by its leading 11 bits; how many keys are between, ``[chunks]``."""
    counts = torch.zeros(len(bounds), 2048, dtype=torch.int64)
    call.counts = counts.data_ptr()
    run_parts(functools.partial(built.count_keys, ctypes.byref(call)), len(bounds) * call.tiles, PART)
    reaching = counts.flip(1).cumsum(1).flip(1)
    bins = ((reaching >= call.k).sum(1) - 1).clamp_(min=0)
    bounds[:, 0], bounds[:, 1] = bins << 20, ((bins + 1) << 20) - 1
    return counts.gather(1, bins[:, None])[:, 0]


def _kth_largest(keys: torch.Tensor, k: int) -> int:
    """``kth_largest`` of ``sparse_keys.py``, without sorting."""
    return int(keys.kthvalue(keys.numel() - k + 1).values) if 0 < k <= keys.numel() else 0


def _sampled_key(built: Any, call: _Call, chunk: int) -> int:
    """The lower key of a chunk, from its sample."""
    first, last = chunk_bounds(call.numel, call.size, chunk)
    call.first, call.sample_stride = first, sample_stride(last - first)
    keys = torch.empty((last - first) // call.sample_stride, dtype=torch.int32)
    call.keys = keys.data_ptr()
    run_parts(functools.partial(built.take_sample, ctypes.byref(call)), keys.numel(), _SAMPLE_PART)
    return _kth_largest(keys, sample_rank(call.k, last - first))


def decode(compressor: Sparsifier, payloads, out, size: int, scale: float, accumulate: bool) -> None:
    """Decode and merge ``payloads [sources, chunks, nbytes]`` into ``out``."""
    built = _build()
    if built is None:
        out.copy_(reference.decode_reference(compressor, payloads, out, scale, accumulate, size))
        return
    sources, chunks, _ = payloads.shape
    call = _call(compressor, size, out.numel(), payloads, payloads.stride(1), dtype=DTYPES[out.dtype], scale=scale)
    call.sources, call.source_stride = sources, payloads.stride(0)
    call.out, call.accumulate = out.data_ptr(), accumulate
    run_parts(functools.partial(built.decode, ctypes.byref(call)), chunks * call.tiles, PART)


def _call(compressor: Sparsifier, size: int, numel: int, payload, payload_stride: int, **values: Any) -> _Call:
    layout = compressor.layout(size)
    return _Call(
        payload=payload.data_ptr(),
        payload_stride=payload_stride,
        numel=numel,
        size=size,
        tiles=max(1, -(-size // _TILE)),
        k=compressor.capacity(size),
        indices_offset=layout["indices"].offset,
        values_offset=layout["values"].offset,
        nbytes=layout.nbytes,
        bf16=layout["values"].dtype == torch.bfloat16,
        **values,
    )


@functools.cache
def _build() -> Any:
    built: Any = library(f"#define TILE {_TILE}\n#define STATUS {STATUS_OK}\n{COMMON}\n{_TEMPLATE.read_text()}")
    if built is not None:
        declare(built, *_FUNCTIONS)
    return built
