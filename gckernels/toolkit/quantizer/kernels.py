"""The generic kernels of element-wise quantisers: encoding, decoding and recoding of one unit.

A quantiser has a statistic and two maps, ``quantize(values, stats, dither, C) -> code`` and ``dequantize(code, stats,
C) -> value``. The kernels get these functions, and everything else that is known at compile time, in one object, ``Q``;
see :func:`.launches.kernel_constants`. The kernels themselves do everything that all quantisers share: error feedback,
random numbers, chunks, tails, bit packing, the status word and the merging of any number of payloads. They encode a
gradient or, for the owner of a shard, the merged decodings of payloads (``Q.merging``), which never reach memory.

A program works on a tile of ``Q.rows`` blocks of ``Q.block`` elements. Each block has its own statistics. With a
statistic of the whole unit (``Q.whole``), a block is only a row of a tile: a first kernel writes at most
``MAX_PARTIALS`` partial results per chunk. Every program that encodes reduces all of them if they are at most
``PARTIALS``, otherwise one program of a launch in between does. The number of partial results follows from the size
alone, so the result does not depend on the device. The encoding programs go through the unit backwards: its end, which
was read last, is still in the cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...codec import Decoding, Encoding, Recoding
from ..kernels.launch import launch, temporary
from ..kernels.seeds import seed_of
from ..tiles import chunk_step
from .launches import MAX_PARTIALS, encode_maxnreg, kernel_constants, payload_shape, residual_form
from .programs import combine_program, decode_program, encode_program, partials_program


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
    Q: tl.constexpr,
):
    partials_program(
        source_ptr, residual_ptr, partials_ptr, tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64),
        numel, chunk_numel, num_partials, num_sources, source_stride, blocks, codes_offset, codes_nbytes, scale, Q
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_partials"])
def _combine_kernel(
    partials_ptr,  # fp32 [chunks, terms, num_partials]
    combined_ptr,  # fp32 [chunks, terms]
    num_partials,
    Q: tl.constexpr,
):
    combine_program(partials_ptr, combined_ptr, tl.program_id(0).to(tl.int64), num_partials, Q)


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
    added_ptr,
    Q: tl.constexpr,
):
    tile = tl.program_id(0)
    if Q.whole:
        tile = tl.num_programs(0) - 1 - tile
    encode_program(
        source_ptr, residual_ptr, payload_ptr, partials_ptr, tile.to(tl.int64), tl.program_id(1).to(tl.int64), numel,
        chunk_numel, payload_stride, num_partials, num_sources, source_stride, blocks, stats_slots, codes_offset,
        codes_nbytes, scale, seed_of(seed, added_ptr), Q
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
    Q: tl.constexpr,
):
    decode_program(
        payload_ptr, out_ptr, tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), numel, chunk_numel,
        num_sources, source_stride, chunk_stride, blocks, codes_offset, codes_nbytes, scale, Q
    )  # fmt: skip


def encode(unit: Encoding, scale: float = 1.0) -> None:
    """Launch the encoding of a unit."""
    _encode(unit.compressor, unit.grad, 0, 0, 1.0, unit.residual, unit.payload, unit.grad.numel(), unit.size, unit.seed)


def recode(unit: Recoding, scale: float = 1.0) -> None:
    """Launch the merging and encoding of a unit."""
    sources, stride = unit.payloads.shape[0], unit.payloads.stride(0)
    target = unit.residual, unit.payload[None], unit.numel, unit.size, unit.seed
    _encode(unit.compressor.shard_compressor, unit.payloads, sources, stride, scale, *target)


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
    kept, merging = residual_form(residual), source.dtype == torch.uint8
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
            Q=kernel_constants(quantizer, **kept, merging=merging),
            num_warps=shape.encode_warps(quantizer, source.dtype, kept["has_residual"]),
        )
        if shape.combines:
            combined = temporary(chunks, shape.terms, dtype=torch.float32, device=payload.device)
            constants = kernel_constants(quantizer, partials_width=MAX_PARTIALS)
            launch(_combine_kernel, (chunks,), partials, combined, num_partials, Q=constants)
            partials, num_partials = combined, 1
    launch(
        _encode_kernel,
        (shape.encode_tiles, chunks),
        *(source, target, payload, partials, numel, step, payload.stride(0), num_partials, num_sources, source_stride),
        *(shape.blocks, shape.stats_slots, shape.codes_offset, shape.codes_nbytes, scale, seed),
        Q=kernel_constants(quantizer, **kept, merging=merging, partials_width=shape.partials_width),
        num_warps=shape.encode_warps(quantizer, source.dtype, kept["has_residual"]),
        maxnreg=encode_maxnreg(quantizer, kept["has_residual"], merging),
    )


def decode(unit: Decoding, scale: float = 1.0, accumulate: bool = False) -> None:
    """Launch the decoding and merging of a unit."""
    payloads, out = unit.payloads, unit.out
    sources, chunks, _ = payloads.shape
    shape = payload_shape(unit.compressor, unit.size)
    launch(
        _decode_kernel,
        (shape.decode_tiles, chunks),
        *(payloads, out, out.numel(), chunk_step(unit.size, chunks), sources, payloads.stride(0), payloads.stride(1)),
        *(shape.blocks, shape.codes_offset, shape.codes_nbytes, scale),
        Q=kernel_constants(unit.compressor, adds_to_out=accumulate),
        num_warps=shape.decode_warps,
    )
