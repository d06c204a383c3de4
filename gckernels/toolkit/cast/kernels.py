"""The kernels of the casts, for one unit per launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from ...codec import Decoding, Encoding, Recoding
from ..kernels.launch import launch
from ..numeric import INF_BITS, bf16_bits, is_finite, to_fp32
from ..tiles import chunk_step, load_tile, remaining, store_tile

TILE = 2048
_MAXNREG, _MAXNREG_OF_MERGING = 96, 128

# -------------------------------------------------------------------- bodies of Triton programs


@triton.jit
def _cast(values, DTYPE: tl.constexpr):
    """fp32 ``values`` in ``DTYPE``, rounded to nearest, ties to even; every NaN becomes the same NaN."""
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
def _merged(payload_ptr, offsets, here, num_sources, source_stride, scale, TILE: tl.constexpr):
    """The sum of a tile over all sources, in order, times ``scale``."""
    total = tl.zeros((TILE,), tl.float32)
    for _ in range(num_sources):
        total += load_tile(payload_ptr, offsets, here, TILE)
        payload_ptr += source_stride
    return total * scale


@triton.jit
def encode_program(
    source_ptr,  # the gradient, or payloads
    residual_ptr,
    payload_ptr,  # [chunks, payload_stride], of the payload's dtype
    tile,
    chunk,
    numel,
    chunk_numel,
    payload_stride,
    payload_count,  # padding included
    num_sources,
    source_stride,
    scale,  # factor on the sent values or, when merging, on the sum
    HAS_RESIDUAL: tl.constexpr,
    MERGING: tl.constexpr,
    TILE: tl.constexpr,
):
    tile_first = tile * TILE
    chunk_first = chunk * chunk_numel
    first = chunk_first + tile_first
    offsets = tl.arange(0, TILE)
    here = remaining(tl.minimum(chunk_numel, numel - chunk_first), tile_first, TILE)
    if MERGING:
        values = _merged(source_ptr + first, offsets, here, num_sources, source_stride, scale, TILE)
    else:
        values = load_tile(source_ptr + first, offsets, here, TILE)
    if HAS_RESIDUAL:
        old = load_tile(residual_ptr + first, offsets, here, TILE)
        values += old
    scaled = values if MERGING else values * scale
    sent = _cast(scaled, payload_ptr.dtype.element_ty)
    target = payload_ptr + chunk * payload_stride + tile_first + offsets
    if here == TILE:
        tl.store(target, sent)
    else:  # includes the padding
        tl.store(target, sent, mask=offsets < payload_count - tile_first)
    if HAS_RESIDUAL:
        decoded = to_fp32(sent)
        if not MERGING:
            decoded = tl.div_rn(decoded, tl.zeros((TILE,), tl.float32) + scale)
        left = values - decoded
        kept = tl.where(is_finite(left), left, old)
        store_tile(residual_ptr + first, offsets, kept, here, TILE)


@triton.jit
def decode_program(
    payload_ptr,  # [sources, chunks, ...], of the payload's dtype
    out_ptr,
    tile,
    chunk,
    numel,
    chunk_numel,
    num_sources,
    source_stride,
    chunk_stride,
    scale,
    ACCUMULATE: tl.constexpr,
    TILE: tl.constexpr,
):
    tile_first = tile * TILE
    chunk_first = chunk * chunk_numel
    offsets = tl.arange(0, TILE)
    here = remaining(tl.minimum(chunk_numel, numel - chunk_first), tile_first, TILE)
    payload_ptr += chunk * chunk_stride + tile_first
    out_ptr += chunk_first + tile_first  # before the loop: after it, ptxas spills one of the terms
    total = _merged(payload_ptr, offsets, here, num_sources, source_stride, scale, TILE)
    if ACCUMULATE:
        total += load_tile(out_ptr, offsets, here, TILE)
    store_tile(out_ptr, offsets, total, here, TILE)


# -------------------------------------------------------------------- one unit


@triton.jit(do_not_specialize=["num_sources"])
def _encode_kernel(
    source_ptr,
    residual_ptr,
    payload_ptr,
    numel,
    chunk_numel,
    payload_stride,
    payload_count,
    num_sources,
    source_stride,
    scale,
    HAS_RESIDUAL: tl.constexpr,
    MERGING: tl.constexpr,
    TILE: tl.constexpr,
):
    encode_program(
        source_ptr, residual_ptr, payload_ptr, tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), numel,
        chunk_numel, payload_stride, payload_count, num_sources, source_stride, scale, HAS_RESIDUAL, MERGING, TILE
    )  # fmt: skip


@triton.jit
def _decode_kernel(
    payload_ptr,
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
    decode_program(
        payload_ptr, out_ptr, tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), numel, chunk_numel,
        num_sources, source_stride, chunk_stride, scale, ACCUMULATE, TILE
    )  # fmt: skip


def encode(unit: Encoding, scale: float = 1.0) -> None:
    """Launch the encoding of a unit."""
    payload = unit.payload.view(unit.compressor.traits.payload_dtype)
    _launch_encode(CastUnit(unit.grad, unit.residual, payload, unit.grad.numel(), unit.size), scale)


def recode(unit: Recoding, scale: float = 1.0) -> None:
    """Launch the merging and encoding of a unit."""
    sent = unit.compressor.traits.payload_dtype
    source, target = unit.payloads.view(sent), unit.payload[None].view(sent)
    _launch_encode(CastUnit(source, unit.residual, target, unit.numel, unit.size, True), scale)


def _launch_encode(unit: CastUnit, scale: float) -> None:
    launch(
        _encode_kernel,
        unit.grid,
        *(unit.source, unit.residual_or_any, unit.payload, unit.numel, unit.step, unit.payload.stride(0)),
        *(unit.payload.shape[1], unit.sources, unit.source_stride, scale),
        maxnreg=unit.maxnreg,
        **unit.constexprs,
    )


def decode(unit: Decoding, scale: float = 1.0, accumulate: bool = False) -> None:
    """Launch the decoding and merging of a unit."""
    sources, chunks, _ = unit.payloads.shape
    typed = unit.payloads.view(unit.compressor.traits.payload_dtype)
    launch(
        _decode_kernel,
        (triton.cdiv(unit.size, TILE), chunks),
        *(typed, unit.out, unit.out.numel(), chunk_step(unit.size, chunks), sources),
        *(typed.stride(0), typed.stride(1), scale),
        ACCUMULATE=accumulate,
        TILE=TILE,
    )


@dataclass(frozen=True)
class CastUnit:
    """The arguments of an encoding; if ``merging``, the source is ``[sources, count]`` in the payload's dtype."""

    source: torch.Tensor
    residual: torch.Tensor | None
    payload: torch.Tensor  # [chunks, count], viewed in its dtype
    numel: int
    size: int
    merging: bool = False

    @property
    def grid(self) -> tuple[int, int]:
        return triton.cdiv(self.payload.shape[1], TILE), self.payload.shape[0]

    @property
    def step(self) -> int:
        return chunk_step(self.size, self.payload.shape[0])

    @property
    def sources(self) -> int:
        return self.source.shape[0] if self.merging else 0

    @property
    def source_stride(self) -> int:
        return self.source.stride(0) if self.merging else 0

    @property
    def residual_or_any(self) -> torch.Tensor:
        return self.source if self.residual is None else self.residual

    @property
    def maxnreg(self) -> int | None:
        """Limit of a program's registers. By itself, ptxas gives one with a residual too few, and spills a value."""
        if self.residual is None:
            return None
        return _MAXNREG_OF_MERGING if self.merging else _MAXNREG

    @property
    def constexprs(self) -> dict[str, Any]:
        return {"HAS_RESIDUAL": self.residual is not None, "MERGING": self.merging, "TILE": TILE}
