"""The kernel that decodes and merges for :mod:`~gckernels.toolkit.sparse`.

A program searches the entries of its tile in every source, whose indices ascend, and adds them up source by source: one
write of the output, nothing atomic, the same order everywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from .launch import launch
from .map_kernels import chunk_step
from .map_tiles import load_tile, remaining, store_tile
from .numeric import bf16_value
from .payload import STATUS_OK

if TYPE_CHECKING:
    from .sparse import Sparsifier

TILE, NUM_WARPS = 4096, 8
SEARCH = 128  # indices that a search looks at, at once, and entries that are added at once
_SCRATCH_NUMEL = 4 * 1024 * 1024  # 16 MiB, which a large GPU keeps in its L2 cache


@triton.jit
def _first_from(indices_ptr, count, index, SEARCH: tl.constexpr):
    """Where the first of ``count`` ascending indices is that is at least ``index``; never beyond ``count``."""
    places = tl.arange(0, SEARCH) + 1
    found, span = tl.full((), 0, tl.int32), count
    while span > 0:
        step = (span + SEARCH - 1) // SEARCH
        looked_at = places.to(tl.int64) * step
        values = tl.load(indices_ptr + (found + looked_at - 1), mask=looked_at <= span, other=0x7FFFFFFF)
        skipped = tl.sum(((values < index) & (looked_at <= span)).to(tl.int32), 0) * step
        found += skipped
        span = tl.minimum(step - 1, span - skipped)
    return found


@triton.jit(do_not_specialize=["k"])
def _decode_kernel(
    payload_ptr,
    out_ptr,
    scratch_ptr,  # fp32 [programs, TILE]
    numel,
    chunk_numel,
    tiles,  # per chunk
    num_items,  # chunks * tiles
    num_sources,
    source_stride,
    chunk_stride,
    k,
    values_offset,
    scale,
    STATUS: tl.constexpr,
    INDICES_OFFSET: tl.constexpr,
    BF16: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    SEARCH: tl.constexpr,
    TILE: tl.constexpr,
):
    offsets, lanes = tl.arange(0, TILE), tl.arange(0, SEARCH)
    scratch_ptr += tl.program_id(0).to(tl.int64) * TILE
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        chunk = (item // tiles).to(tl.int64)
        tile_first = (item % tiles).to(tl.int64) * TILE
        source_ptr = payload_ptr + chunk * chunk_stride
        tl.store(scratch_ptr + offsets, tl.zeros((TILE,), tl.float32))
        tl.debug_barrier()
        damaged = tl.full((), 0, tl.int32)
        for _ in range(num_sources):
            words_ptr = source_ptr.to(tl.pointer_type(tl.int32))
            damaged = damaged | (tl.load(words_ptr) != STATUS).to(tl.int32)
            count = tl.maximum(tl.minimum(tl.load(words_ptr + 4), k), 0).to(tl.int32)
            indices_ptr = (source_ptr + INDICES_OFFSET).to(tl.pointer_type(tl.int32))
            entry = _first_from(indices_ptr, count, tile_first, SEARCH).to(tl.int64)
            more = entry < count
            while more:
                entries = entry + lanes
                indices = tl.load(indices_ptr + entries, mask=entries < count, other=-1)
                places = indices - tile_first
                inside = (indices >= 0) & (places >= 0) & (places < TILE)
                if BF16:
                    values_ptr = (source_ptr + values_offset).to(tl.pointer_type(tl.int16))
                    bits = tl.load(values_ptr + entries, mask=inside, other=0).to(tl.int32) & 0xFFFF
                    values = bf16_value(bits)
                else:
                    values_ptr = (source_ptr + values_offset).to(tl.pointer_type(tl.float32))
                    values = tl.load(values_ptr + entries, mask=inside, other=0.0)
                slots = scratch_ptr + tl.where(inside, places, 0)
                # no index occurs twice among these, and the barrier keeps those of different sources apart
                tl.store(slots, tl.load(slots, mask=inside, other=0.0) + values, mask=inside)
                entry += SEARCH
                more = (entry < count) & (tl.sum(inside.to(tl.int32), 0) == SEARCH)
            tl.debug_barrier()
            source_ptr += source_stride
        total = tl.load(scratch_ptr + offsets)
        total = tl.where(damaged > 0, float("nan"), total) * scale
        chunk_first = chunk * chunk_numel
        here = remaining(tl.minimum(chunk_numel, numel - chunk_first), tile_first, TILE)
        target_ptr = out_ptr + chunk_first + tile_first
        if ACCUMULATE:
            total += load_tile(target_ptr, offsets, here, TILE)
        store_tile(target_ptr, offsets, total, here, TILE)
        tl.debug_barrier()  # the scratch is read before the next tile clears it


def decode(compressor: Sparsifier, payloads, out, size: int, scale: float, accumulate: bool) -> None:
    """Launch the decoding and merging of ``payloads [sources, chunks, nbytes]`` into ``out``."""
    sources, chunks, _ = payloads.shape
    layout = compressor.layout(size)
    tiles = triton.cdiv(min(size, out.numel()), TILE)
    programs = min(chunks * tiles, _SCRATCH_NUMEL // TILE)
    scratch = torch.empty(programs, TILE, dtype=torch.float32, device=out.device)
    launch(
        _decode_kernel,
        (programs,),
        *(payloads, out, scratch, out.numel(), chunk_step(size, chunks), tiles, chunks * tiles),
        *(sources, payloads.stride(0), payloads.stride(1), compressor.capacity(size)),
        *(layout["values"].offset, scale),
        STATUS=STATUS_OK,
        INDICES_OFFSET=layout["indices"].offset,
        BF16=layout["values"].dtype == torch.bfloat16,
        ACCUMULATE=accumulate,
        SEARCH=SEARCH,
        TILE=TILE,
        num_warps=NUM_WARPS,
    )
