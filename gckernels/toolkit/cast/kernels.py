"""The kernels of the casts."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...codec import Decoding, Encoding, Recoding
from ..constants import constants
from ..kernels.launch import launch
from ..kernels.places import tile_of
from ..kernels.sharing import KernelBackend
from ..numeric import INF_BITS, bf16_bits, is_finite, to_fp32
from ..tiles import chunk_step, load_tile, remaining, store_tile

TILE = 2048
_MAXNREG, _MAXNREG_OF_MERGING = 96, 128


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


@triton.jit(do_not_specialize=["num_sources"])
def _encode_kernel(
    source_ptr,  # the gradient, or payloads
    residual_ptr,
    payload_ptr,  # [chunks, payload_stride], of the payload's dtype
    numel,
    chunk_numel,
    payload_stride,
    payload_slots,  # numbers of a payload, padding included
    num_sources,
    source_stride,
    scale,  # factor on the sent values or, when merging, on the sum
    C: tl.constexpr,
    place=None,
):
    TILE: tl.constexpr = C.tile
    tile, chunk = tile_of(place)
    tile_first = tile * TILE
    chunk_first = chunk * chunk_numel
    first = chunk_first + tile_first
    offsets = tl.arange(0, TILE)
    here = remaining(tl.minimum(chunk_numel, numel - chunk_first), tile_first, TILE)
    if C.merging:
        values = _merged(source_ptr + first, offsets, here, num_sources, source_stride, scale, TILE)
    else:
        values = load_tile(source_ptr + first, offsets, here, TILE)
    if C.has_residual:
        old = load_tile(residual_ptr + first, offsets, here, TILE)
        values += old
    scaled = values if C.merging else values * scale
    sent = _cast(scaled, payload_ptr.dtype.element_ty)
    if not C.merging:  # merged payloads have one chunk
        payload_ptr += chunk * payload_stride
    target = payload_ptr + tile_first + offsets
    if here == TILE:
        tl.store(target, sent)
    else:  # includes the padding
        tl.store(target, sent, mask=offsets < payload_slots - tile_first)
    if C.has_residual:
        decoded = to_fp32(sent)
        if not C.merging:
            decoded = tl.div_rn(decoded, tl.zeros((TILE,), tl.float32) + scale)
        left = values - decoded
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
    C: tl.constexpr,
    place=None,
):
    TILE: tl.constexpr = C.tile
    tile, chunk = tile_of(place)
    tile_first = tile * TILE
    chunk_first = chunk * chunk_numel
    offsets = tl.arange(0, TILE)
    here = remaining(tl.minimum(chunk_numel, numel - chunk_first), tile_first, TILE)
    payload_ptr += chunk * chunk_stride + tile_first
    out_ptr += chunk_first + tile_first  # before the loop: after it, ptxas spills one of the terms
    total = _merged(payload_ptr, offsets, here, num_sources, source_stride, scale, TILE)
    if C.accumulate:
        total += load_tile(out_ptr, offsets, here, TILE)
    store_tile(out_ptr, offsets, total, here, TILE)


# -------------------------------------------------------------------- launches


def encode(unit: Encoding, scale: float = 1.0) -> None:
    """Launch the encoding of a unit."""
    _launch_encode(unit, unit.grad, unit.grad.numel(), unit.payload, scale)


def recode(unit: Recoding, scale: float = 1.0) -> None:
    """Launch the merging and encoding of a unit."""
    source = unit.payloads.view(unit.compressor.traits.payload_dtype)
    _launch_encode(unit, source, unit.numel, unit.payload[None], scale, (source.shape[0], source.stride(0)))


def _launch_encode(
    unit: Encoding | Recoding,
    source: torch.Tensor,
    numel: int,
    payload: torch.Tensor,
    scale: float,
    sources: tuple[int, int] = (0, 0),
) -> None:
    """Launch the encoding of ``source``, a gradient or payloads, whose number and stride are ``sources``."""
    numbers, residual = payload.view(unit.compressor.traits.payload_dtype), unit.residual
    (chunks, slots), merging, maxnreg = numbers.shape, isinstance(unit, Recoding), None
    if residual is not None:  # by itself, ptxas gives the program too few, and spills a value
        maxnreg = _MAXNREG_OF_MERGING if merging else _MAXNREG
    launch(
        _encode_kernel,
        (triton.cdiv(slots, TILE), chunks),
        *(source, source if residual is None else residual, numbers, numel, chunk_step(unit.size, chunks)),
        *(numbers.stride(0), slots, *sources, scale),
        C=constants(tile=TILE, has_residual=residual is not None, merging=merging),
        maxnreg=maxnreg,
    )


def decode(unit: Decoding, scale: float = 1.0, accumulate: bool = False) -> None:
    """Launch the decoding and merging of a unit."""
    numbers, out = unit.payloads.view(unit.compressor.traits.payload_dtype), unit.out
    sources, chunks, _ = numbers.shape
    launch(
        _decode_kernel,
        (triton.cdiv(unit.size, TILE), chunks),
        *(numbers, out, out.numel(), chunk_step(unit.size, chunks), sources, numbers.stride(0), numbers.stride(1)),
        scale,
        C=constants(tile=TILE, accumulate=accumulate),
    )


class CastTriton(KernelBackend):
    """Casts as kernels. Small units that are bound together share a launch."""

    encode = staticmethod(encode)
    decode = staticmethod(decode)
    recode = staticmethod(recode)
