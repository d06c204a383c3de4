"""The generic kernels of element-wise quantisers: statistic, map, pack; unpack, map, merge; and all of it at once.

A quantiser is a statistic and two maps, ``quantize(values, stats, u, C) -> code`` and ``dequantize(code, stats, C) ->
value``, given to these kernels as constexpr functions. The kernels add what all quantisers share: error feedback,
random numbers, chunks, tails, bit packing, the status word and the merging of any number of payloads. What is encoded
is a gradient or, for the owner of a shard, the merged decodings of payloads (``MERGING``), which never reach memory.

A program works on a tile of ``ROWS`` blocks of ``BLOCK`` elements; a block is what one statistic is taken of. For a
statistic of the whole unit (``WHOLE``) a block is just a tile's row, and a first kernel leaves at most
``MAX_PARTIALS`` partial results per chunk, which every program of the second one reduces by itself. Their number
follows from the size alone, so the result does not depend on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from ..compressor import CHUNK_ALIGN
from .bitpack import pack_bits, packed_slots
from .launch import launch
from .map_tiles import (
    as_columns,
    combine,
    finish,
    load_tile,
    merged_tile,
    reduce,
    reduce_all,
    remaining,
    store_stats,
    store_tile,
)
from .numeric import is_finite
from .payload import STATUS_OK, round_up
from .random import uniform_tile

TILE = 2048
MAX_PARTIALS = 256
WHOLE_BLOCK = 128


@triton.jit
def _partials_kernel(
    source_ptr,  # the gradient, or payloads
    residual_ptr,
    partials_ptr,  # fp32 [chunks, terms, PARTIALS]
    numel,
    chunk_numel,
    num_sources,
    source_stride,
    blocks,
    codes_offset,
    codes_nbytes,
    scale,
    TERMS: tl.constexpr,
    KINDS: tl.constexpr,
    PARTIALS: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    MERGING: tl.constexpr,
    STATUS: tl.constexpr,
    DEQUANTIZE: tl.constexpr,
    MERGE: tl.constexpr,
    C: tl.constexpr,
    NUM_STATS: tl.constexpr,
    STAT_BF16: tl.constexpr,
    STATS_OFFSET: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    chunk_first = tl.program_id(1).to(tl.int64) * chunk_numel
    limit = tl.minimum(chunk_numel, numel - chunk_first)
    rows = tl.arange(0, ROWS)
    offsets = rows[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    totals = reduce_all(TERMS(tl.zeros((ROWS, BLOCK), tl.float32), C), KINDS, offsets < 0, 1)
    tile = tl.program_id(0).to(tl.int64)
    while tile * (ROWS * BLOCK) < limit:
        first = chunk_first + tile * (ROWS * BLOCK)
        here = remaining(limit, tile * (ROWS * BLOCK), ROWS * BLOCK)
        if MERGING:
            values = merged_tile(
                source_ptr, tile, here, num_sources, source_stride, blocks, codes_offset, codes_nbytes, scale,
                STATUS, DEQUANTIZE, MERGE, C, NUM_STATS, STAT_BF16, STATS_OFFSET, WHOLE, ROWS, BLOCK
            )  # fmt: skip
        else:
            values = load_tile(source_ptr + first, offsets, here, ROWS * BLOCK)
        if HAS_RESIDUAL:
            values = ACCUMULATE(values, load_tile(residual_ptr + first, offsets, here, ROWS * BLOCK), C)
        partials = reduce_all(TERMS(values, C), KINDS, offsets < here, 1)
        totals = combine(totals, partials, KINDS)
        tile += PARTIALS
    for index in tl.static_range(len(KINDS)):
        place = (tl.program_id(1) * len(KINDS) + index) * PARTIALS + tl.program_id(0)
        tl.store(
            partials_ptr + place + tl.arange(0, 1),
            reduce(totals[index][None, :], KINDS, index, rows[None, :] >= 0, 1),
        )


@triton.jit(do_not_specialize=["seed"])  # it changes in every step, and 1 or a multiple of 16 is nothing special
def _encode_kernel(
    source_ptr,  # the gradient, or payloads
    residual_ptr,
    payload_ptr,  # uint8 [chunks, payload_stride]
    partials_ptr,
    numel,
    chunk_numel,
    payload_stride,
    num_sources,
    source_stride,
    blocks,
    stats_slots,  # padding included
    codes_offset,
    codes_nbytes,  # padding included
    scale,
    seed: tl.int64,
    KINDS: tl.constexpr,
    TERMS: tl.constexpr,
    FINISH: tl.constexpr,
    PARTIALS: tl.constexpr,
    QUANTIZE: tl.constexpr,
    RANDOM_BITS: tl.constexpr,  # 0 for none
    ACCUMULATE: tl.constexpr,
    KEEP: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    MERGING: tl.constexpr,
    STATUS: tl.constexpr,
    DEQUANTIZE: tl.constexpr,
    MERGE: tl.constexpr,
    C: tl.constexpr,
    NUM_STATS: tl.constexpr,
    STAT_BF16: tl.constexpr,
    STATS_OFFSET: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tile = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1).to(tl.int64)
    chunk_first = chunk * chunk_numel
    tile_first = tile * (ROWS * BLOCK)
    first = chunk_first + tile_first
    rows, columns = tl.arange(0, ROWS), tl.arange(0, BLOCK)
    offsets = rows[:, None] * BLOCK + columns[None, :]
    limit = tl.minimum(chunk_numel, numel - chunk_first)
    here = remaining(limit, tile_first, ROWS * BLOCK)
    if MERGING:
        values = merged_tile(
            source_ptr, tile, here, num_sources, source_stride, blocks, codes_offset, codes_nbytes, scale,
            STATUS, DEQUANTIZE, MERGE, C, NUM_STATS, STAT_BF16, STATS_OFFSET, WHOLE, ROWS, BLOCK
        )  # fmt: skip
    else:
        values = load_tile(source_ptr + first, offsets, here, ROWS * BLOCK)
    if HAS_RESIDUAL:
        residual = load_tile(residual_ptr + first, offsets, here, ROWS * BLOCK)
        values = ACCUMULATE(values, residual, C)

    payload_ptr += chunk * payload_stride
    columns_of_stats = ()
    usable = offsets < here
    if NUM_STATS > 0:
        if WHOLE:
            partials = ()
            slots = tl.arange(0, PARTIALS)[None, :]
            for index in tl.static_range(len(KINDS)):
                found = tl.load(partials_ptr + (chunk * len(KINDS) + index) * PARTIALS + slots)
                partials = partials + (reduce(found, KINDS, index, slots >= 0, 1),)
            count = tl.maximum(limit, 1).to(tl.float32) + tl.zeros((1,), tl.float32)
        else:
            partials = reduce_all(TERMS(values, C), KINDS, usable, 1)
            count = tl.minimum(tl.maximum(here - rows * BLOCK, 1), BLOCK).to(tl.float32)
        stats, finite = finish(partials, count, FINISH, C, STAT_BF16)
        columns_of_stats = as_columns(stats)
        usable = usable & finite[:, None]
    u = uniform_tile(seed, first, ROWS, BLOCK, RANDOM_BITS) if RANDOM_BITS > 0 else 0.0
    codes = tl.where(usable, QUANTIZE(values, columns_of_stats, u, C), 0)
    slots, used = packed_slots(rows, ROWS, BLOCK, C.bits)
    slots += tile * (ROWS * BLOCK * C.bits // 8)
    tl.store(
        payload_ptr + codes_offset + slots, pack_bits(codes, ROWS, BLOCK, C.bits), mask=used & (slots < codes_nbytes)
    )
    if HAS_RESIDUAL:
        # the old value is stored again where the new one is not finite: a mask that varies from element to element
        # would break the 16-byte stores up
        left = KEEP(values, DEQUANTIZE(codes, columns_of_stats, C), C)
        store_tile(residual_ptr + first, offsets, tl.where(is_finite(left), left, residual), here, ROWS * BLOCK)
    # the small stores last, when few registers are in use
    if tile == 0:
        words = tl.arange(0, 4)
        tl.store(payload_ptr.to(tl.pointer_type(tl.int32)) + words, tl.where(words == 0, STATUS, 0))
    if NUM_STATS > 0:
        store_stats(payload_ptr, stats, tile, here, blocks, stats_slots, STAT_BF16, STATS_OFFSET, WHOLE, ROWS, BLOCK)


@triton.jit
def _decode_kernel(
    payload_ptr,
    out_ptr,
    numel,
    chunk_numel,
    num_sources,
    source_stride,
    chunk_stride,
    blocks,
    codes_offset,
    codes_nbytes,
    scale,
    STATUS: tl.constexpr,
    DEQUANTIZE: tl.constexpr,
    MERGE: tl.constexpr,
    C: tl.constexpr,
    NUM_STATS: tl.constexpr,
    STAT_BF16: tl.constexpr,
    STATS_OFFSET: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):
    tile = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1).to(tl.int64)
    tile_first = tile * (ROWS * BLOCK)
    chunk_first = chunk * chunk_numel
    offsets = tl.arange(0, ROWS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    here = remaining(tl.minimum(chunk_numel, numel - chunk_first), tile_first, ROWS * BLOCK)
    payload_ptr += chunk * chunk_stride
    out_ptr += chunk_first + tile_first
    total = merged_tile(
        payload_ptr, tile, here, num_sources, source_stride, blocks, codes_offset, codes_nbytes, scale,
        STATUS, DEQUANTIZE, MERGE, C, NUM_STATS, STAT_BF16, STATS_OFFSET, WHOLE, ROWS, BLOCK
    )  # fmt: skip
    if ACCUMULATE:
        total += load_tile(out_ptr, offsets, here, ROWS * BLOCK)
    store_tile(out_ptr, offsets, total, here, ROWS * BLOCK)


def _tile(block: int | None) -> dict[str, int]:
    columns = block or WHOLE_BLOCK
    rows = max(1, TILE // columns)
    return {"ROWS": rows, "BLOCK": columns, "num_warps": max(4, rows * columns // 512)}


def chunk_step(size: int, chunks: int) -> int:
    """Elements from one chunk to the next; a multiple of 16 also for a single chunk, so that addresses are known to be
    multiples of 16 bytes whatever the size."""
    return size if chunks > 1 else round_up(size, CHUNK_ALIGN)


def encode_map(quantizer, grad, residual, payload, size: int, seed: int) -> None:
    """Launch the encoding of ``grad`` into ``payload [chunks, nbytes]`` with the maps of a ``MapQuantizer``."""
    _encode(quantizer, grad, 0, 0, 1.0, residual, payload, grad.numel(), size, seed)


def recode_map(quantizer, payloads, residual, payload, numel: int, size: int, scale: float, seed: int) -> None:
    """Launch the merging of ``payloads [sources, nbytes]`` and their encoding into ``payload [nbytes]``."""
    sources, stride = payloads.shape[0], payloads.stride(0)
    _encode(quantizer, payloads, sources, stride, scale, residual, payload[None], numel, size, seed)


def _encode(
    quantizer,
    source,
    num_sources: int,
    source_stride: int,
    scale: float,
    residual,
    payload,
    numel: int,
    size: int,
    seed,
) -> None:
    maps, chunks = quantizer.maps, payload.shape[0]
    statistic = maps.statistic
    shape = _payload_constants(quantizer, size)
    merging = source.dtype == torch.uint8
    common = shape.constexprs | {
        "KINDS": statistic.kinds if statistic else (),
        "TERMS": statistic.terms.triton if statistic else None,
        "ACCUMULATE": maps.accumulate.triton,
        "HAS_RESIDUAL": residual is not None,
        "MERGING": merging,
    }
    target = source if residual is None else residual
    tile_numel = common["ROWS"] * common["BLOCK"]
    tiles = max(1, triton.cdiv(size, tile_numel))
    step = chunk_step(size, chunks)
    partials, num_partials = target, 1
    if common["WHOLE"]:
        # a power of two, so that units of all sizes share a few compiled kernels; without a tile, a program stores 0
        num_partials = min(triton.next_power_of_2(tiles), MAX_PARTIALS)
        partials = torch.empty(chunks, len(statistic.kinds), num_partials, dtype=torch.float32, device=payload.device)
        launch(
            _partials_kernel,
            (num_partials, chunks),
            *(source, target, partials, numel, step, num_sources, source_stride),
            *(shape.blocks, shape.codes_offset, shape.codes_nbytes, scale),
            PARTIALS=num_partials,
            **common,
        )
    elif statistic:  # the field's padding is written by programs that have no elements
        rows = shape.blocks + shape.stats_slots - shape.blocks * statistic.size
        tiles = max(tiles, triton.cdiv(rows, common["ROWS"]))
    launch(
        _encode_kernel,
        (tiles, chunks),
        *(source, target, payload, partials, numel, step, payload.stride(0), num_sources, source_stride),
        *(shape.blocks, shape.stats_slots, shape.codes_offset, shape.codes_nbytes, scale, seed),
        FINISH=statistic.finish.triton if statistic else None,
        PARTIALS=num_partials,
        QUANTIZE=maps.quantize.triton,
        RANDOM_BITS=quantizer.random_bits if quantizer.stochastic else 0,
        KEEP=maps.keep.triton,
        **common,
    )


def decode_map(quantizer, payloads, out, size: int, scale: float, accumulate: bool) -> None:
    """Launch the decoding and merging of ``payloads [sources, chunks, nbytes]`` into ``out``."""
    sources, chunks, _ = payloads.shape
    shape = _payload_constants(quantizer, size)
    launch(
        _decode_kernel,
        (triton.cdiv(size, shape.constexprs["ROWS"] * shape.constexprs["BLOCK"]), chunks),
        *(payloads, out, out.numel(), chunk_step(size, chunks), sources, payloads.stride(0), payloads.stride(1)),
        *(shape.blocks, shape.codes_offset, shape.codes_nbytes, scale),
        ACCUMULATE=accumulate,
        **shape.constexprs,
    )


@dataclass(frozen=True)
class _Shape:
    """A payload as the kernels see it: ``stats_slots`` and ``codes_nbytes`` include padding."""

    blocks: int
    stats_slots: int
    codes_offset: int
    codes_nbytes: int
    constexprs: dict[str, Any]


def _payload_constants(quantizer, size: int) -> _Shape:
    layout, statistic = quantizer.layout(size), quantizer.maps.statistic
    codes = layout["codes"]
    stats = layout["stats"] if statistic else None
    constexprs = {
        "STATUS": STATUS_OK,
        "DEQUANTIZE": quantizer.maps.dequantize.triton,
        "MERGE": quantizer.maps.merge.triton,
        "C": quantizer.constants,
        "NUM_STATS": quantizer.num_stats,
        "STAT_BF16": quantizer.stats_dtype == torch.bfloat16,
        "STATS_OFFSET": stats.offset if stats else 0,
        "WHOLE": quantizer.block is None and statistic is not None,
    }
    return _Shape(
        stats.count // statistic.size if stats else 0,
        stats.nbytes // stats.dtype.itemsize if stats else 0,
        codes.offset,
        codes.nbytes,
        constexprs | _tile(quantizer.block),
    )
