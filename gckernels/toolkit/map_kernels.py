"""The generic kernels of element-wise quantisers: statistic, map, pack; unpack, map, merge.

A quantiser is a statistic and two maps, ``quantize(value, stat, u) -> code`` and ``dequantize(code, stat) -> value``,
given to these kernels as constexpr functions. The kernels add what all quantisers share: error feedback, chunks,
tails, bit packing, the status word and the merging of any number of payloads.

A program works on a tile of ``ROWS`` blocks of ``BLOCK`` elements; a block is what one statistic is taken of. For a
statistic of the whole unit (``WHOLE``) a block is just a tile's row, and a first kernel leaves at most
``MAX_PARTIALS`` partial results per chunk, which every program of the second one reduces by itself. Their number
follows from the size alone, so the result does not depend on the device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..compressor import CHUNK_ALIGN
from .bitpack import pack_bits, unpack_bits
from .launch import launch
from .numeric import bf16_bits, bf16_value, is_finite, store, to_fp32
from .payload import STATUS_OK, round_up
from .random import uniform_tile

TILE = 2048
MAX_PARTIALS = 256
WHOLE_BLOCK = 128


@triton.jit
def remaining(limit, tile_first, TILE_NUMEL: tl.constexpr):
    """Elements from ``tile_first`` to ``limit``, at least 0 and at most a tile's, as int32: what masks compare with."""
    return tl.maximum(tl.minimum(limit - tile_first, TILE_NUMEL), 0).to(tl.int32)


@triton.jit
def load_tile(tile_ptr, offsets, count, TILE_NUMEL: tl.constexpr):
    """``count`` elements and zeros behind them, as fp32.

    A full tile is loaded without a mask: an element count that 16 does not divide would otherwise break every 16-byte
    access up, not only those of the last tile.
    """
    if count == TILE_NUMEL:
        values = tl.load(tile_ptr + offsets)
    else:
        values = tl.load(tile_ptr + offsets, mask=offsets < count, other=0.0)
    return to_fp32(values)


@triton.jit
def store_tile(tile_ptr, offsets, values, count, TILE_NUMEL: tl.constexpr):
    """Store the first ``count`` of the fp32 ``values`` in the pointer's dtype; see :func:`load_tile`."""
    if count == TILE_NUMEL:
        store(tile_ptr + offsets, values, None)
    else:
        store(tile_ptr + offsets, values, offsets < count)


@triton.jit
def _load_values(grad_ptr, residual_ptr, offsets, count, TILE_NUMEL: tl.constexpr, HAS_RESIDUAL: tl.constexpr):
    """What is encoded, and the residual in it (or zeros)."""
    values = load_tile(grad_ptr, offsets, count, TILE_NUMEL)
    residual = tl.zeros(values.shape, tl.float32)
    if HAS_RESIDUAL:
        residual = load_tile(residual_ptr, offsets, count, TILE_NUMEL)
        values += residual
    return values, residual


@triton.jit
def _partials_kernel(
    grad_ptr,
    residual_ptr,
    partials_ptr,  # fp32 [chunks, PARTIALS]
    numel,
    chunk_numel,
    REDUCE: tl.constexpr,
    COMBINE: tl.constexpr,
    PARTIALS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    chunk_first = tl.program_id(1).to(tl.int64) * chunk_numel
    limit = tl.minimum(chunk_numel, numel - chunk_first)
    offsets = tl.arange(0, ROWS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    total = tl.zeros((ROWS,), tl.float32)
    tile_first = tl.program_id(0).to(tl.int64) * (ROWS * BLOCK)
    while tile_first < limit:
        first = chunk_first + tile_first
        here = remaining(limit, tile_first, ROWS * BLOCK)
        values, _ = _load_values(grad_ptr + first, residual_ptr + first, offsets, here, ROWS * BLOCK, HAS_RESIDUAL)
        total = COMBINE(total, REDUCE(values, 1))
        tile_first += PARTIALS * ROWS * BLOCK
    total = REDUCE(total[None, :], 1)
    slots = tl.arange(0, 1)
    tl.store(partials_ptr + tl.program_id(1) * PARTIALS + tl.program_id(0) + slots, total)


@triton.jit(do_not_specialize=["seed"])  # it changes in every step, and 1 or a multiple of 16 is nothing special
def _encode_kernel(
    grad_ptr,
    residual_ptr,
    payload_ptr,  # uint8 [chunks, payload_stride]
    partials_ptr,
    numel,
    chunk_numel,
    payload_stride,
    stats_count,  # padding included
    codes_offset,
    codes_nbytes,  # padding included
    seed: tl.int64,
    STATUS: tl.constexpr,
    STATS_OFFSET: tl.constexpr,
    REDUCE: tl.constexpr,
    FINISH: tl.constexpr,
    QUANTIZE: tl.constexpr,
    DEQUANTIZE: tl.constexpr,
    BITS: tl.constexpr,
    STAT_BF16: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    WHOLE: tl.constexpr,
    PARTIALS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
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
    values, residual = _load_values(grad_ptr + first, residual_ptr + first, offsets, here, ROWS * BLOCK, HAS_RESIDUAL)

    payload_ptr += chunk * payload_stride
    if WHOLE:
        partials = tl.load(partials_ptr + chunk * PARTIALS + tl.arange(0, PARTIALS))
        count = tl.maximum(limit, 1).to(tl.float32) + tl.zeros((1,), tl.float32)
        stat = FINISH(REDUCE(partials[None, :], 1), count, BITS)
    else:
        count = tl.minimum(tl.maximum(here - rows * BLOCK, 1), BLOCK).to(tl.float32)
        stat = FINISH(REDUCE(values, 1), count, BITS)
    finite = is_finite(stat)
    stat = tl.where(finite, stat, float("nan"))
    if STAT_BF16:
        stat_bits = bf16_bits(stat)
        stat = bf16_value(stat_bits)

    # the statistics: one per block, zeros behind the last; or one per chunk, by the first program
    stat_slots = tile * ROWS + rows
    if WHOLE:
        stat_slots = rows + tile * stats_count
    stat_out = tl.where(mask_of_rows(here, rows, BLOCK, WHOLE), stat, 0.0)
    stats_ptr = payload_ptr + STATS_OFFSET
    if STAT_BF16:
        bits = bf16_bits(stat_out).to(tl.int16)
        tl.store(stats_ptr.to(tl.pointer_type(tl.int16)) + stat_slots, bits, mask=stat_slots < stats_count)
    else:
        tl.store(stats_ptr.to(tl.pointer_type(tl.float32)) + stat_slots, stat_out, mask=stat_slots < stats_count)
    if tile == 0:
        words = tl.arange(0, 4)
        tl.store(payload_ptr.to(tl.pointer_type(tl.int32)) + words, tl.where(words == 0, STATUS, 0))

    stat = stat[:, None]
    finite = finite[:, None]
    u = uniform_tile(seed, first, ROWS, BLOCK) if STOCHASTIC else 0.0
    codes = tl.where(finite & (offsets < here), QUANTIZE(values, stat, u, BITS), 0)
    packed = pack_bits(codes, BITS, ROWS, BLOCK)
    ROW_NBYTES: tl.constexpr = BLOCK * BITS // 8
    byte_offsets = tile * (ROWS * ROW_NBYTES) + rows[:, None] * ROW_NBYTES + tl.arange(0, ROW_NBYTES)[None, :]
    tl.store(payload_ptr + codes_offset + byte_offsets, packed, mask=byte_offsets < codes_nbytes)
    if HAS_RESIDUAL:
        # the old value is stored again where the new one is not finite: a mask that varies from element to element
        # would break the 16-byte stores up
        left = values - DEQUANTIZE(codes, stat, BITS)
        kept = tl.where(is_finite(left), left, residual)
        store_tile(residual_ptr + first, offsets, kept, here, ROWS * BLOCK)


@triton.jit
def mask_of_rows(remaining, rows, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    """Which of a tile's statistics are real: rows that hold elements, or, for the whole unit, the first alone."""
    return rows == 0 if WHOLE else rows * BLOCK < remaining


@triton.jit
def _load_stats(stats_ptr, tile, here, ROWS: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    """The statistic of each of a tile's rows, ``[ROWS]``; 0 for rows that hold no element."""
    rows = tl.arange(0, ROWS)
    if WHOLE:
        stat = tl.full((ROWS,), tl.load(stats_ptr), stats_ptr.dtype.element_ty)
    elif here == ROWS * BLOCK:
        stat = tl.load(stats_ptr + tile * ROWS + rows)
    else:
        stat = tl.load(stats_ptr + tile * ROWS + rows, mask=rows * BLOCK < here, other=0)
    return stat


@triton.jit
def _decode_kernel(
    payload_ptr,
    out_ptr,
    numel,
    chunk_numel,
    num_sources,
    source_stride,
    chunk_stride,
    codes_offset,
    codes_nbytes,
    scale,
    STATUS: tl.constexpr,
    STATS_OFFSET: tl.constexpr,
    DEQUANTIZE: tl.constexpr,
    BITS: tl.constexpr,
    STAT_BF16: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):
    tile = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1).to(tl.int64)
    tile_first = tile * (ROWS * BLOCK)
    chunk_first = chunk * chunk_numel
    rows, columns = tl.arange(0, ROWS), tl.arange(0, BLOCK)
    offsets = rows[:, None] * BLOCK + columns[None, :]
    here = remaining(tl.minimum(chunk_numel, numel - chunk_first), tile_first, ROWS * BLOCK)
    ROW_NBYTES: tl.constexpr = BLOCK * BITS // 8
    byte_offsets = tile * (ROWS * ROW_NBYTES) + rows[:, None] * ROW_NBYTES + tl.arange(0, ROW_NBYTES)[None, :]
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    payload_ptr += chunk * chunk_stride
    for _ in range(num_sources):
        status = tl.load(payload_ptr.to(tl.pointer_type(tl.int32)))
        stats_ptr = payload_ptr + STATS_OFFSET
        if STAT_BF16:
            bits = _load_stats(stats_ptr.to(tl.pointer_type(tl.int16)), tile, here, ROWS, BLOCK, WHOLE)
            stat = bf16_value(bits.to(tl.int32) & 0xFFFF)
        else:
            stat = _load_stats(stats_ptr.to(tl.pointer_type(tl.float32)), tile, here, ROWS, BLOCK, WHOLE)
        stat = tl.where(status == STATUS, stat, float("nan"))
        packed = tl.load(payload_ptr + codes_offset + byte_offsets, mask=byte_offsets < codes_nbytes, other=0)
        total += DEQUANTIZE(unpack_bits(packed, BITS, ROWS, BLOCK), stat[:, None], BITS)
        payload_ptr += source_stride
    total *= scale
    out_ptr += chunk_first + tile_first
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
    maps, numel, chunks = quantizer.maps, grad.numel(), payload.shape[0]
    layout = quantizer.layout(size)
    stats, codes = layout["stats"], layout["codes"]
    tile = _tile(quantizer.block)
    tile_numel = tile["ROWS"] * tile["BLOCK"]
    tiles = max(1, triton.cdiv(size, tile_numel))
    whole = quantizer.block is None
    target = grad if residual is None else residual
    common = {"REDUCE": maps.reduce.triton, "HAS_RESIDUAL": residual is not None} | tile
    partials, num_partials = target, 1
    if whole:
        # a power of two, so that units of all sizes share a few compiled kernels; without a tile, a program stores 0
        num_partials = min(triton.next_power_of_2(tiles), MAX_PARTIALS)
        partials = torch.empty(chunks, num_partials, dtype=torch.float32, device=grad.device)
        launch(
            _partials_kernel,
            (num_partials, chunks),
            *(grad, target, partials, numel, chunk_step(size, chunks)),
            COMBINE=maps.combine.triton,
            PARTIALS=num_partials,
            **common,
        )
    stats_count = stats.nbytes // stats.dtype.itemsize
    if not whole:  # the field's padding is written by programs that have no elements
        tiles = max(tiles, triton.cdiv(stats_count, tile["ROWS"]))
    launch(
        _encode_kernel,
        (tiles, chunks),
        *(grad, target, payload, partials, numel, chunk_step(size, chunks), payload.stride(0)),
        *(stats_count, codes.offset, codes.nbytes, seed),
        STATUS=STATUS_OK,
        STATS_OFFSET=stats.offset,
        FINISH=maps.finish.triton,
        QUANTIZE=maps.quantize.triton,
        DEQUANTIZE=maps.dequantize.triton,
        BITS=quantizer.bits,
        STAT_BF16=stats.dtype == torch.bfloat16,
        STOCHASTIC=quantizer.stochastic,
        WHOLE=whole,
        PARTIALS=num_partials,
        **common,
    )


def decode_map(quantizer, payloads, out, size: int, scale: float, accumulate: bool) -> None:
    """Launch the decoding and merging of ``payloads [sources, chunks, nbytes]`` into ``out``."""
    sources, chunks, _ = payloads.shape
    layout = quantizer.layout(size)
    stats, codes = layout["stats"], layout["codes"]
    tile = _tile(quantizer.block)
    launch(
        _decode_kernel,
        (triton.cdiv(size, tile["ROWS"] * tile["BLOCK"]), chunks),
        *(payloads, out, out.numel(), chunk_step(size, chunks), sources, payloads.stride(0), payloads.stride(1)),
        *(codes.offset, codes.nbytes, scale),
        STATUS=STATUS_OK,
        STATS_OFFSET=stats.offset,
        DEQUANTIZE=quantizer.maps.dequantize.triton,
        BITS=quantizer.bits,
        STAT_BF16=stats.dtype == torch.bfloat16,
        WHOLE=quantizer.block is None,
        ACCUMULATE=accumulate,
        **tile,
    )
