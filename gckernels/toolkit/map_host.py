"""The generic host path of element-wise quantisers: what ``map_kernels.py`` does, in NumPy, tile by tile.

NumPy works on the tensors' own memory, costs half a microsecond a call where torch costs two, and never hands a tile to
a second thread. A tile's arrays fit the cache together, so main memory is read and written once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from ..compressor import chunk_bounds
from . import bitpack, host, random
from .payload import status_ok, store_floats, write_header

if TYPE_CHECKING:
    from .quantizer import MapQuantizer

_SAFE_STAT = np.float32(1e30)  # below it, a value minus its decoding cannot overflow and needs no check


def encode_map(
    quantizer: MapQuantizer,
    grad: torch.Tensor,
    residual: torch.Tensor | None,
    payload: torch.Tensor,
    size: int,
    seed: int,
) -> None:
    """Encode ``grad`` into ``payload [chunks, nbytes]``, each chunk laid out for ``size`` elements."""
    write_header(payload)
    scratch = np.empty(_tile_numel(quantizer.block), np.float32)
    with np.errstate(all="ignore"):  # inf and NaN are data here
        for chunk in range(payload.shape[0]):
            start, stop = chunk_bounds(grad.numel(), size, chunk)
            kept = None if residual is None else residual[start:stop]
            _encode_chunk(quantizer, grad[start:stop], kept, payload[chunk], size, seed, start, scratch)


def _encode_chunk(
    quantizer: MapQuantizer,
    grad: torch.Tensor,
    residual: torch.Tensor | None,
    payload: torch.Tensor,
    size: int,
    seed: int,
    first: int,
    scratch: np.ndarray,
) -> None:
    maps, bits, block, numel = quantizer.maps, quantizer.bits, quantizer.block, grad.numel()
    layout = quantizer.layout(size)
    stats, codes = layout.view(payload, "stats"), layout.view(payload, "codes").numpy()
    layout.zero_tail(payload, "stats", 1 if block is None else -(-numel // block))
    layout.zero_tail(payload, "codes", bitpack.packed_nbytes(numel, bits))
    kept = None if residual is None else residual.numpy()
    stat = np.zeros(1, np.float32)
    if block is None:
        stat = _whole_statistic(quantizer, grad, residual, scratch)
        store_floats(stats, torch.from_numpy(stat))
    for start, stop in host.spans(numel, scratch.size):
        values = scratch[: stop - start]
        host.add_feedback(grad[start:stop], None if residual is None else residual[start:stop], values)
        rows = values[None, :]
        if block is not None:
            num_rows = -(-values.size // block)
            scratch[values.size : num_rows * block] = 0.0
            rows = scratch[: num_rows * block].reshape(num_rows, block)
            counts = np.full(num_rows, block, np.float32)
            counts[-1] = values.size - (num_rows - 1) * block
            stat = quantizer.round_stat(maps.finish.array(maps.reduce.array(rows, 1), counts, bits))
            store_floats(stats[start // block : start // block + num_rows], torch.from_numpy(stat))
        u = None
        if quantizer.stochastic:
            u = random.uniform(seed, first + start, rows.size).numpy().reshape(rows.shape)
        code = maps.quantize.array(rows, stat[:, None], u, bits)
        largest = np.max(np.abs(stat))
        if np.isnan(largest):
            code = np.where(np.isnan(stat)[:, None], 0, code)
        packed = codes[start * bits // 8 : bitpack.packed_nbytes(stop, bits)]
        bitpack.pack_host(bitpack.as_bytes(code).reshape(-1)[: values.size], bits, packed)
        if kept is not None:
            decoded = maps.dequantize.array(code, stat[:, None], bits).reshape(-1)[: values.size]
            if largest < _SAFE_STAT:
                np.subtract(values, decoded, out=kept[start:stop])
            else:
                left = values - decoded
                np.copyto(kept[start:stop], left, where=np.isfinite(left))


def _whole_statistic(
    quantizer: MapQuantizer, grad: torch.Tensor, residual: torch.Tensor | None, scratch: np.ndarray
) -> np.ndarray:
    maps, total = quantizer.maps, np.zeros(1, np.float32)
    for start, stop in host.spans(grad.numel(), scratch.size):
        values = scratch[: stop - start]
        host.add_feedback(grad[start:stop], None if residual is None else residual[start:stop], values)
        total = maps.combine.array(total, maps.reduce.array(values[None, :], 1))
    count = np.full(1, max(grad.numel(), 1), np.float32)
    return quantizer.round_stat(maps.finish.array(total, count, quantizer.bits))


def decode_map(
    quantizer: MapQuantizer, payloads: torch.Tensor, out: torch.Tensor, size: int, scale: float, accumulate: bool
) -> None:
    """Decode and merge ``payloads [sources, chunks, nbytes]`` into ``out``."""
    maps, bits, block = quantizer.maps, quantizer.bits, quantizer.block
    layout = quantizer.layout(size)
    sources, chunks, _ = payloads.shape
    tile = _tile_numel(block)
    code, levels, total = np.zeros(tile, np.uint8), np.zeros(tile, np.float32), np.empty(tile, np.float32)
    stats = torch.where(status_ok(payloads)[..., None], layout.view(payloads, "stats").float(), torch.nan).numpy()
    codes = layout.view(payloads, "codes").numpy()
    with np.errstate(all="ignore"):
        for chunk in range(chunks):
            first, last = chunk_bounds(out.numel(), size, chunk)
            for start, stop in host.spans(last - first, tile):
                num_rows = 1 if block is None else -(-(stop - start) // block)
                span = num_rows * (block or stop - start)
                rows, merged = levels[:span].reshape(num_rows, -1), total[:span].reshape(num_rows, -1)
                if sources == 0:
                    merged.fill(0.0)
                for source in range(sources):
                    stat = stats[source, chunk]
                    if block is not None:
                        stat = stat[start // block : start // block + num_rows]
                    packed = codes[source, chunk, start * bits // 8 : bitpack.packed_nbytes(stop, bits)]
                    bitpack.unpack_host(packed, bits, code[: stop - start])
                    np.copyto(levels[: stop - start], code[: stop - start])
                    values = maps.dequantize.array(rows, stat[:, None], bits)
                    np.add(values, merged if source else np.float32(0.0), out=merged)
                host.store_merged(total[: stop - start], out[first + start : first + stop], scale, accumulate)


def _tile_numel(block: int | None) -> int:
    """Elements per tile: whole blocks, whole bytes of codes."""
    return host.TILE_NUMEL if block is None else max(1, host.TILE_NUMEL // block) * block
