"""Compressors whose payload is the values themselves in some floating-point type: one pair of kernels, one base class.

Such payloads can be added while they travel, so they have no header and no status word; inf and NaN travel as values.
Every NaN is stored as the quiet NaN with the sign bit clear, so that equal values are equal bytes on every device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..compressor import Compressor
from . import casts_host
from .launch import launch
from .map_kernels import chunk_step
from .map_tiles import load_tile, remaining, store_tile
from .numeric import INF_BITS, bf16_bits, is_finite, to_fp32
from .payload import ALIGN_NBYTES, round_up

TILE = 2048

_QUIET_NAN = {
    torch.float32: (torch.int32, 0x7FC00000),
    torch.bfloat16: (torch.int16, 0x7FC0),
    torch.float16: (torch.int16, 0x7E00),
}


@triton.jit
def _cast(values, DTYPE: tl.constexpr):
    """fp32 to ``DTYPE``, ties to even, with one NaN."""
    if tl.bfloat16 == DTYPE:
        return bf16_bits(values).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        bits = values.to(tl.int32, bitcast=True)
        is_nan = (bits & 0x7FFFFFFF) > INF_BITS
        if tl.float16 == DTYPE:
            half = values.to(tl.float16).to(tl.int16, bitcast=True)
            return tl.where(is_nan, 0x7E00, half).to(tl.int16).to(tl.float16, bitcast=True)
        else:
            return tl.where(is_nan, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def _encode_kernel(
    grad_ptr,
    residual_ptr,
    payload_ptr,  # [chunks, payload_stride], of the payload's dtype
    numel,
    chunk_numel,
    payload_stride,
    payload_count,  # padding included
    scale,
    HAS_RESIDUAL: tl.constexpr,
    TILE: tl.constexpr,
):
    tile_first = tl.program_id(0).to(tl.int64) * TILE
    chunk = tl.program_id(1).to(tl.int64)
    chunk_first = chunk * chunk_numel
    first = chunk_first + tile_first
    offsets = tl.arange(0, TILE)
    here = remaining(tl.minimum(chunk_numel, numel - chunk_first), tile_first, TILE)
    values = load_tile(grad_ptr + first, offsets, here, TILE)
    if HAS_RESIDUAL:
        old = load_tile(residual_ptr + first, offsets, here, TILE)
        values += old
    sent = _cast(values * scale, payload_ptr.dtype.element_ty)
    target = payload_ptr + chunk * payload_stride + tile_first + offsets
    if here == TILE:
        tl.store(target, sent)
    else:  # the padding too
        tl.store(target, sent, mask=offsets < payload_count - tile_first)
    if HAS_RESIDUAL:
        left = values - tl.div_rn(to_fp32(sent), tl.zeros((TILE,), tl.float32) + scale)
        kept = tl.where(is_finite(left), left, old)
        store_tile(residual_ptr + first, offsets, kept, here, TILE)


@triton.jit
def _decode_kernel(
    payload_ptr,  # [sources, chunks, ...], of the payload's dtype
    out_ptr,
    numel,
    chunk_numel,
    num_sources,
    source_stride,
    chunk_stride,
    scale,
    ACCUMULATE: tl.constexpr,
    TILE: tl.constexpr,
):
    tile_first = tl.program_id(0).to(tl.int64) * TILE
    chunk = tl.program_id(1).to(tl.int64)
    chunk_first = chunk * chunk_numel
    offsets = tl.arange(0, TILE)
    here = remaining(tl.minimum(chunk_numel, numel - chunk_first), tile_first, TILE)
    total = tl.zeros((TILE,), tl.float32)
    payload_ptr += chunk * chunk_stride + tile_first
    out_ptr += chunk_first + tile_first  # before the loop: after it, ptxas spills one of the terms
    for _ in range(num_sources):
        total += load_tile(payload_ptr, offsets, here, TILE)
        payload_ptr += source_stride
    total *= scale
    if ACCUMULATE:
        total += load_tile(out_ptr, offsets, here, TILE)
    store_tile(out_ptr, offsets, total, here, TILE)


@dataclass(frozen=True)
class CastCompressor(Compressor):
    """Base of the casts: a subclass has ``payload_dtype``, fp32, bf16 or fp16. ``seed`` is not used."""

    summable = True

    def payload_nbytes(self, numel: int) -> int:
        return round_up(max(numel, 1) * self.payload_dtype.itemsize, ALIGN_NBYTES)

    # ---------------------------------------------------------------- reference

    def encode_reference(self, values: torch.Tensor, numel: int, seed: int, first: int) -> torch.Tensor:
        bits_dtype, nan = _QUIET_NAN[self.payload_dtype]
        payload = torch.zeros(self.payload_nbytes(numel), dtype=torch.uint8, device=values.device)
        bits = values.to(self.payload_dtype).view(bits_dtype)
        payload.view(bits_dtype)[: values.numel()] = torch.where(values.isnan(), nan, bits)
        return payload

    def decode_reference(self, payload: torch.Tensor, numel: int) -> torch.Tensor:
        return payload.view(self.payload_dtype)[:numel].float()

    # ---------------------------------------------------------------- host path

    def encode_host(
        self,
        grad: torch.Tensor,
        residual: torch.Tensor | None,
        payload: torch.Tensor,
        size: int,
        seed: int,
        scale: float,
    ) -> None:
        casts_host.encode(self, grad, residual, payload, size, scale)

    def decode_host(self, payloads: torch.Tensor, out: torch.Tensor, size: int, scale: float, accumulate: bool) -> None:
        casts_host.decode(self, payloads, out, size, scale, accumulate)

    # ---------------------------------------------------------------- kernels

    def encode_triton(
        self,
        grad: torch.Tensor,
        residual: torch.Tensor | None,
        payload: torch.Tensor,
        size: int,
        seed: int,
        scale: float,
    ) -> None:
        numel, chunks = grad.numel(), payload.shape[0]
        typed = payload.view(self.payload_dtype)
        target = grad if residual is None else residual
        launch(
            _encode_kernel,
            (triton.cdiv(typed.shape[1], TILE), chunks),
            *(grad, target, typed, numel, chunk_step(size, chunks)),
            *(typed.stride(0), typed.shape[1], scale),
            HAS_RESIDUAL=residual is not None,
            TILE=TILE,
        )

    def decode_triton(
        self, payloads: torch.Tensor, out: torch.Tensor, size: int, scale: float, accumulate: bool
    ) -> None:
        sources, chunks, _ = payloads.shape
        typed = payloads.view(self.payload_dtype)
        launch(
            _decode_kernel,
            (triton.cdiv(size, TILE), chunks),
            *(typed, out, out.numel(), chunk_step(size, chunks), sources),
            *(typed.stride(0), typed.stride(1), scale),
            ACCUMULATE=accumulate,
            TILE=TILE,
        )
