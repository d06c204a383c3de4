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

from ...compressor import CHUNK_ALIGN
from ..kernels.launch import launch, temporary
from ..payload import HEADER_NBYTES, STATUS_OK, round_up
from .programs import decode_program, encode_program, partials_program

TILE = 2048
PARTIALS, MAX_PARTIALS = 128, 256
WHOLE_BLOCK = 128


@triton.jit(do_not_specialize=["num_partials", "num_sources", "blocks"])
def _partials_kernel(
    source_ptr,  # the gradient, or payloads
    residual_ptr,
    partials_ptr,  # fp32 [chunks, terms, num_partials]
    numel,
    chunk_numel,
    num_partials,
    num_sources,
    source_stride,
    blocks,
    codes_offset,
    codes_nbytes,
    scale,
    TERMS: tl.constexpr,
    KINDS: tl.constexpr,
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
    partials_program(
        source_ptr, residual_ptr, partials_ptr, tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64),
        numel, chunk_numel, num_partials, num_sources, source_stride, blocks, codes_offset, codes_nbytes, scale,
        TERMS, KINDS, ACCUMULATE, HAS_RESIDUAL, MERGING,
        STATUS, DEQUANTIZE, MERGE, C, NUM_STATS, STAT_BF16, STATS_OFFSET, WHOLE, ROWS, BLOCK
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_partials", "num_sources", "blocks", "seed"])
def _encode_kernel(
    source_ptr,  # the gradient, or payloads
    residual_ptr,
    payload_ptr,  # uint8 [chunks, payload_stride]
    partials_ptr,
    numel,
    chunk_numel,
    payload_stride,
    num_partials,
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
    encode_program(
        source_ptr, residual_ptr, payload_ptr, partials_ptr, tl.program_id(0).to(tl.int64),
        tl.program_id(1).to(tl.int64), numel, chunk_numel, payload_stride, num_partials, num_sources, source_stride,
        blocks, stats_slots, codes_offset, codes_nbytes, scale, seed, KINDS, TERMS, FINISH, PARTIALS, QUANTIZE,
        RANDOM_BITS, ACCUMULATE, KEEP, HAS_RESIDUAL, MERGING,
        STATUS, DEQUANTIZE, MERGE, C, NUM_STATS, STAT_BF16, STATS_OFFSET, WHOLE, ROWS, BLOCK
    )  # fmt: skip


@triton.jit(do_not_specialize=["blocks"])
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
    decode_program(
        payload_ptr, out_ptr, tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), numel, chunk_numel,
        num_sources, source_stride, chunk_stride, blocks, codes_offset, codes_nbytes, scale,
        STATUS, DEQUANTIZE, MERGE, C, NUM_STATS, STAT_BF16, STATS_OFFSET, WHOLE, ROWS, BLOCK, ACCUMULATE
    )  # fmt: skip


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
    chunks = payload.shape[0]
    shape = payload_shape(quantizer, size)
    merging = source.dtype == torch.uint8
    target = source if residual is None else residual
    step = chunk_step(size, chunks)
    partials, num_partials = target, 1
    if shape.whole:
        num_partials = shape.num_partials
        partials = temporary(chunks, shape.terms, num_partials, dtype=torch.float32, device=payload.device)
        launch(
            _partials_kernel,
            (num_partials, chunks),
            *(source, target, partials, numel, step, num_partials, num_sources, source_stride),
            *(shape.blocks, shape.codes_offset, shape.codes_nbytes, scale),
            **partials_constexprs(quantizer, residual is not None, merging),
        )
    launch(
        _encode_kernel,
        (shape.encode_tiles, chunks),
        *(source, target, payload, partials, numel, step, payload.stride(0), num_partials, num_sources, source_stride),
        *(shape.blocks, shape.stats_slots, shape.codes_offset, shape.codes_nbytes, scale, seed),
        **encode_constexprs(quantizer, residual is not None, merging, shape.partials_width),
    )


def decode_map(quantizer, payloads, out, size: int, scale: float, accumulate: bool) -> None:
    """Launch the decoding and merging of ``payloads [sources, chunks, nbytes]`` into ``out``."""
    sources, chunks, _ = payloads.shape
    shape = payload_shape(quantizer, size)
    launch(
        _decode_kernel,
        (shape.decode_tiles, chunks),
        *(payloads, out, out.numel(), chunk_step(size, chunks), sources, payloads.stride(0), payloads.stride(1)),
        *(shape.blocks, shape.codes_offset, shape.codes_nbytes, scale),
        ACCUMULATE=accumulate,
        **payload_constexprs(quantizer),
    )


# -------------------------------------------------------------------- what launches have in common


@dataclass(frozen=True)
class Shape:
    """A payload as the kernels see it.

    Attributes:
        blocks: that have statistics; one for the whole chunk.
        stats_slots, codes_nbytes: padding included.
        encode_tiles, decode_tiles: programs that encode and decode a chunk.
        terms: of a statistic of the whole chunk, else 0; ``num_partials`` results of each are combined.
    """

    blocks: int
    stats_slots: int
    codes_offset: int
    codes_nbytes: int
    encode_tiles: int
    decode_tiles: int
    terms: int
    num_partials: int

    @property
    def whole(self) -> bool:
        """There is one statistic for the whole chunk."""
        return self.terms > 0

    @property
    def partials_width(self) -> int:
        """As many results as a program combines, most of them perhaps not there: two widths, so that units of all sizes
        share kernels, of which the narrower takes half the registers."""
        return PARTIALS if self.num_partials <= PARTIALS else MAX_PARTIALS


def payload_shape(quantizer, size: int) -> Shape:
    """Of the payload of ``size`` elements."""
    layout, statistic = quantizer.layout(size), quantizer.maps.statistic
    codes = layout["codes"]
    stats = layout["stats"] if statistic else None
    whole = quantizer.block is None and statistic is not None
    blocks = stats.count // statistic.size if stats else 0
    slots = stats.nbytes // stats.dtype.itemsize if stats else 0
    constexprs = _tile(quantizer.block)
    decode_tiles = triton.cdiv(size, constexprs["ROWS"] * constexprs["BLOCK"])
    tiles = max(1, decode_tiles)
    # without a tile, a program stores 0
    num_partials = min(triton.next_power_of_2(tiles), MAX_PARTIALS)
    if statistic and not whole:  # the field's padding is written by programs that have no elements
        tiles = max(tiles, triton.cdiv(blocks + slots - blocks * statistic.size, constexprs["ROWS"]))
    terms = len(statistic.kinds) if whole else 0
    return Shape(blocks, slots, codes.offset, codes.nbytes, tiles, decode_tiles, terms, num_partials)


def payload_constexprs(quantizer) -> dict[str, Any]:
    """What whatever reads a payload knows when it is compiled."""
    statistic = quantizer.maps.statistic
    return {
        "STATUS": STATUS_OK,
        "DEQUANTIZE": quantizer.maps.dequantize.triton,
        "MERGE": quantizer.maps.merge.triton,
        "C": quantizer.constants,
        "NUM_STATS": quantizer.num_stats,
        "STAT_BF16": quantizer.stats_dtype == torch.bfloat16,
        "STATS_OFFSET": HEADER_NBYTES if statistic else 0,
        "WHOLE": quantizer.block is None and statistic is not None,
    } | _tile(quantizer.block)


def partials_constexprs(quantizer, has_residual: bool, merging: bool) -> dict[str, Any]:
    """What whatever reduces what is encoded knows when it is compiled; ``merging``: payloads are encoded."""
    statistic = quantizer.maps.statistic
    return payload_constexprs(quantizer) | {
        "KINDS": statistic.kinds if statistic else (),
        "TERMS": statistic.terms.triton if statistic else None,
        "ACCUMULATE": quantizer.maps.accumulate.triton,
        "HAS_RESIDUAL": has_residual,
        "MERGING": merging,
    }


def encode_constexprs(quantizer, has_residual: bool, merging: bool, partials_width: int) -> dict[str, Any]:
    """What whatever encodes knows when it is compiled."""
    statistic = quantizer.maps.statistic
    return partials_constexprs(quantizer, has_residual, merging) | {
        "FINISH": statistic.finish.triton if statistic else None,
        "PARTIALS": partials_width,
        "QUANTIZE": quantizer.maps.quantize.triton,
        "RANDOM_BITS": quantizer.random_bits if quantizer.traits.stochastic else 0,
        "KEEP": quantizer.maps.keep.triton,
    }


def _tile(block: int | None) -> dict[str, int]:
    columns = block or WHOLE_BLOCK
    rows = max(1, TILE // columns)
    return {"ROWS": rows, "BLOCK": columns, "num_warps": max(4, rows * columns // 512)}


def chunk_step(size: int, chunks: int) -> int:
    """Elements from one chunk to the next; a multiple of 16 also for a single chunk, so that addresses are known to be
    multiples of 16 bytes whatever the size."""
    return size if chunks > 1 else round_up(size, CHUNK_ALIGN)
