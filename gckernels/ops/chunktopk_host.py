"""The host path of :mod:`~gckernels.ops.chunktopk`, in NumPy, some groups at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import triton

from ..compressor import chunk_bounds
from ..toolkit import host
from ..toolkit.linear import dequantize_array, quantize_array
from ..toolkit.pack12 import LARGEST_GROUP, pack12, unpack12
from ..toolkit.payload import status_ok, write_header

if TYPE_CHECKING:
    from .chunktopk import ChunkTopK

Array = Any  # torch.Tensor or numpy.ndarray
MAGNITUDE = 0x7FFFFFFF
NAN_BITS = 0x7FC0  # of a bf16
_ENCODE_TILE_NUMEL, _DECODE_TILE_NUMEL = 64 * 1024, 32 * 1024


def encode(
    compressor: ChunkTopK,
    grad: torch.Tensor,
    residual: torch.Tensor | None,
    payload: torch.Tensor,
    size: int,
) -> None:
    """Encode ``grad`` into ``payload [chunks, nbytes]``."""
    layout, num_groups = compressor.layout(size), -(-size // compressor.chunk)
    tile = np.empty((_ENCODE_TILE_NUMEL // compressor.chunk, compressor.chunk), np.float32)
    write_header(payload)
    for field in layout.fields:
        layout.zero_tail(payload, field.name, field.count)
    with np.errstate(all="ignore"):  # inf and NaN are data here
        for chunk in range(payload.shape[0]):
            first, last = chunk_bounds(grad.numel(), size, chunk)
            rows = {name: _array(field) for name, field in compressor.rows(payload[chunk], layout).items()}
            for start, stop in host.spans(num_groups, tile.shape[0]):
                here = slice(min(first + start * compressor.chunk, last), min(first + stop * compressor.chunk, last))
                kept = None if residual is None else residual[here]
                part = {name: field[start:stop] for name, field in rows.items()}
                _encode_tile(compressor, grad[here], kept, part, tile[: stop - start])


def _encode_tile(
    compressor: ChunkTopK, grad: torch.Tensor, residual: torch.Tensor | None, rows: dict[str, Array], tile: Array
) -> None:
    """Encode some groups into their rows of the payload; ``tile`` is scratch, ``[groups, chunk]``."""
    flat, numel = tile.reshape(-1), grad.numel()
    for start, stop in host.spans(numel, host.TILE_NUMEL):
        kept = None if residual is None else residual[start:stop]
        host.add_feedback(grad[start:stop], kept, flat[start:stop])
    flat[numel:] = 0.0
    indices = _select(tile.view(np.int32) & MAGNITUDE, compressor.k)
    places = indices + np.arange(0, flat.size, compressor.chunk)[:, None]
    entries = flat[places]
    scale = compressor.scale(entries)
    damaged = np.isnan(scale)
    if damaged.any():
        indices[damaged] = np.arange(compressor.k)
    pack12(indices, rows["indices"])
    if compressor.value_bits == 16:
        bits = torch.from_numpy(entries).to(torch.bfloat16).view(torch.int16).numpy()
        bits[damaged] = NAN_BITS
        rows["values"][:] = bits
        decoded = (bits.astype(np.int32) << 16).view(np.float32)
    else:
        codes = quantize_array(entries, scale[:, None], compressor.value_bits)
        codes[damaged] = 0
        host.pack_host(host.as_bytes(codes.reshape(-1)), compressor.value_bits, rows["values"].reshape(-1))
        rows["scales"][:] = scale[:, None]
        decoded = dequantize_array(codes, scale[:, None], compressor.value_bits)
    if residual is not None:
        left = entries - decoded
        flat[places] = left
        if np.isfinite(left).all():
            np.copyto(residual.numpy(), flat[:numel])
        else:
            tile[damaged] = np.nan
            np.copyto(residual.numpy(), flat[:numel], where=np.isfinite(flat[:numel]))


def _select(keys: Array, k: int) -> Array:
    """Per row of ``int32 [rows, columns]`` the columns of the ``k`` largest keys, ties by lower column, ascending.

    ``columns`` is a power of two. The maxima of ``8 k`` interleaved classes bound the ``k``-th largest key from below:
    ``k`` of them reach the ``k``-th largest maximum. Few keys pass that bound, and only those are sorted.
    """
    rows, columns = keys.shape
    classes = min(columns, triton.next_power_of_2(8 * k))
    maxima = keys.reshape(rows, columns // classes, classes).max(1)
    maxima.partition(classes - k, 1)
    bounds = maxima[:, classes - k]
    found = np.flatnonzero(keys >= bounds[:, None])
    if found.size > 4 * k * rows:  # many keys equal a bound; of these a row needs the first k
        above = keys > bounds[:, None]
        equal = (np.flatnonzero(row == bound)[:k] for row, bound in zip(keys, bounds, strict=True))
        found = np.concatenate([np.flatnonzero(above), *(row * columns + at for row, at in enumerate(equal))])
        found.sort()
    # one integer to sort by: row, then descending key, then column
    row = found // columns
    order = (row << 43) | ((MAGNITUDE - keys.ravel()[found].astype(np.int64)) << 12) | (found & (columns - 1))
    order.sort()
    starts = np.searchsorted(row, np.arange(rows))
    chosen = order[starts[:, None] + np.arange(k)] & (columns - 1)
    chosen.sort(1)
    return chosen


def decode(
    compressor: ChunkTopK, payloads: torch.Tensor, out: torch.Tensor, size: int, scale: float, accumulate: bool
) -> None:
    """Decode and merge ``payloads [sources, chunks, nbytes]`` into ``out``."""
    sources, chunks, _ = payloads.shape
    rows = {name: _array(field) for name, field in compressor.rows(payloads, compressor.layout(size)).items()}
    intact = status_ok(payloads).all(0).tolist()
    tile = np.empty((_DECODE_TILE_NUMEL // compressor.chunk, compressor.chunk), np.float32)
    with np.errstate(all="ignore"):
        for chunk in range(chunks):
            first, last = chunk_bounds(out.numel(), size, chunk)
            for start, stop in host.spans(-(-(last - first) // compressor.chunk), tile.shape[0]):
                total = tile[: stop - start]
                total.fill(0.0)
                damaged = np.full(stop - start, not intact[chunk])
                for source in range(sources):
                    part = {name: field[source, chunk, start:stop] for name, field in rows.items()}
                    damaged |= _add_entries(compressor, part, total)
                if damaged.any():
                    total[damaged] = np.nan
                here = slice(first + start * compressor.chunk, min(first + stop * compressor.chunk, last))
                host.store_merged(total.reshape(-1)[: here.stop - here.start], out[here], scale, accumulate)


def _add_entries(compressor: ChunkTopK, rows: dict[str, Array], total: Array) -> Array:
    """Add groups of a payload to ``total``, ``[groups, chunk]``; which of them are to be NaN."""
    indices = np.empty((total.shape[0], compressor.k), np.int64)
    unpack12(rows["indices"], indices)
    if compressor.value_bits == 16:
        values = (rows["values"].astype(np.int32) << 16).view(np.float32)
    else:
        codes = np.empty(indices.size, np.uint8)
        host.unpack_host(rows["values"].reshape(-1), compressor.value_bits, codes)
        levels = codes.reshape(indices.shape).astype(np.float32)
        values = dequantize_array(levels, rows["scales"], compressor.value_bits)
    places, flat = indices + np.arange(0, total.size, compressor.chunk)[:, None], total.reshape(-1)
    if compressor.chunk < LARGEST_GROUP and indices.max() >= compressor.chunk:  # a damaged payload
        flat[places[indices < compressor.chunk]] += values[indices < compressor.chunk]
    else:
        flat[places] += values
    return np.isnan(values).any(1)


def _array(field: torch.Tensor) -> Array:
    """A field of a payload as a NumPy array, bf16 as bits."""
    return (field.view(torch.int16) if field.dtype == torch.bfloat16 else field).numpy()
