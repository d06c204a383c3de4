"""The kernels of the casts for many units in one launch; see ``toolkit/quantizer/batch_kernels.py``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from ...batch import grouped
from ...codec import Decoding, Encoding, Recoding, Work
from ..kernels.batch import (
    DTYPES,
    KernelBackend,
    Table,
    aligned,
    alignment,
    alignment_of,
    find_row,
    load_count,
    load_pointer,
    load_stride,
)
from ..kernels.launch import bind_launch
from ..payload import ALIGN_NBYTES
from ..tiles import chunk_step
from . import kernels
from .kernels import TILE, CastUnit, decode_program, encode_program

_ENCODE_FIELDS = tl.constexpr(10)
_DECODE_FIELDS = tl.constexpr(8)


@triton.jit(do_not_specialize=["num_sources"])
def _encode_batch_kernel(
    units_ptr,
    table_ptr,  # see _encode_group
    num_sources,
    scale,
    DTYPE: tl.constexpr,  # the source's dtype
    SENT: tl.constexpr,  # the payload's dtype
    MULTIPLE: tl.constexpr,  # numbers of the payload's dtype in 16 bytes
    ALIGNED: tl.constexpr,
    NUMEL_OF: tl.constexpr,  # divides all sizes
    HAS_RESIDUAL: tl.constexpr,
    MERGING: tl.constexpr,
    TILE: tl.constexpr,
):
    row, chunk, tile = find_row(units_ptr, table_ptr, _ENCODE_FIELDS)
    source_ptr = load_pointer(row + 2, DTYPE, ALIGNED)
    residual_ptr = load_pointer(row + 3, tl.float32, ALIGNED)
    payload_ptr = load_pointer(row + 4, SENT, ALIGNED)
    numel, chunk_numel = load_count(row + 5, NUMEL_OF), load_count(row + 6, 16)
    payload_stride, payload_count = load_stride(row + 7, MULTIPLE), load_count(row + 8, MULTIPLE)
    source_stride = load_stride(row + 9, MULTIPLE)
    encode_program(
        source_ptr, residual_ptr, payload_ptr, tile, chunk, numel, chunk_numel, payload_stride, payload_count,
        num_sources, source_stride, scale, HAS_RESIDUAL, MERGING, TILE
    )  # fmt: skip


@triton.jit
def _decode_batch_kernel(
    units_ptr,
    table_ptr,  # see _decode_group
    num_sources,
    scale,
    DTYPE: tl.constexpr,  # the outputs' dtype
    SENT: tl.constexpr,
    MULTIPLE: tl.constexpr,
    ALIGNED: tl.constexpr,
    NUMEL_OF: tl.constexpr,  # divides all sizes
    ACCUMULATE: tl.constexpr,
    TILE: tl.constexpr,
):
    row, chunk, tile = find_row(units_ptr, table_ptr, _DECODE_FIELDS)
    payload_ptr = load_pointer(row + 2, SENT, ALIGNED)
    out_ptr = load_pointer(row + 3, DTYPE, ALIGNED)
    numel, chunk_numel = load_count(row + 4, NUMEL_OF), load_count(row + 5, 16)
    source_stride, chunk_stride = load_stride(row + 6, MULTIPLE), load_stride(row + 7, MULTIPLE)
    decode_program(
        payload_ptr, out_ptr, tile, chunk, numel, chunk_numel, num_sources, source_stride, chunk_stride, scale,
        ACCUMULATE, TILE
    )  # fmt: skip


class CastTriton(KernelBackend):
    """Casts as kernels; small units that are bound together are one launch."""

    encode = staticmethod(kernels.encode)
    decode = staticmethod(kernels.decode)
    recode = staticmethod(kernels.recode)

    def encode_together(self, units: Sequence[Encoding], scale: float, added: torch.Tensor | None) -> list[Work]:
        sent = units[0].compressor.traits.payload_dtype
        casts = [CastUnit(u.grad, u.residual, u.payload.view(sent), u.grad.numel(), u.size) for u in units]
        return _encode_together(sent, casts, scale)

    def recode_together(self, units: Sequence[Recoding], scale: float, added: torch.Tensor | None) -> list[Work]:
        sent = units[0].compressor.traits.payload_dtype
        casts = [
            CastUnit(u.payloads.view(sent), u.residual, u.payload[None].view(sent), u.numel, u.size, True)
            for u in units
        ]
        return _encode_together(sent, casts, scale)

    def decode_together(self, units: Sequence[Decoding], scale: float, accumulate: bool) -> list[Work]:
        groups = grouped(units, lambda unit: (unit.out.dtype, alignment_of(unit), unit.payloads.shape[0]))
        sent = units[0].compressor.traits.payload_dtype
        return [_decode_group(sent, group, scale, accumulate) for group in groups]


def _encode_together(sent: torch.dtype, units: Sequence[CastUnit], scale: float) -> list[Work]:
    groups = grouped(units, lambda unit: (unit.source.dtype, unit.residual is not None, _alignment(unit), unit.sources))
    return [_encode_group(sent, group, scale) for group in groups]


def _encode_group(sent: torch.dtype, units: Sequence[CastUnit], scale: float) -> Work:
    first = units[0]
    rows = [
        (
            *(unit.source.data_ptr(), unit.residual_or_any.data_ptr(), unit.payload.data_ptr(), unit.numel, unit.step),
            *(unit.payload.stride(0), unit.payload.shape[1], unit.source_stride),
        )
        for unit in units
    ]
    table = Table([unit.grid for unit in units], rows, first.payload.device)
    constexprs = _constexprs(first.source.dtype, sent, _alignment(first)) | first.constexprs
    args = *table.args, first.sources, scale
    return bind_launch(_encode_batch_kernel, table.grid, *args, maxnreg=first.maxnreg, **constexprs)


def _decode_group(sent: torch.dtype, units: Sequence[Decoding], scale: float, accumulate: bool) -> Work:
    first, width = units[0], sent.itemsize
    rows = [
        (
            *(unit.payloads.data_ptr(), unit.out.data_ptr(), unit.out.numel()),
            *(chunk_step(unit.size, unit.payloads.shape[1]), unit.payloads.stride(0) // width),
            unit.payloads.stride(1) // width,
        )
        for unit in units
    ]
    table = Table([(triton.cdiv(unit.size, TILE), unit.payloads.shape[1]) for unit in units], rows, first.out.device)
    constexprs = _constexprs(first.out.dtype, sent, alignment_of(first))
    args = (*table.args, first.payloads.shape[0], scale)
    return bind_launch(_decode_batch_kernel, table.grid, *args, ACCUMULATE=accumulate, **constexprs)


def _constexprs(dtype: torch.dtype, sent: torch.dtype, common: tuple[bool, int]) -> dict[str, Any]:
    types = {"DTYPE": DTYPES[dtype], "SENT": DTYPES[sent], "MULTIPLE": ALIGN_NBYTES // sent.itemsize}
    return types | aligned(common) | {"TILE": TILE}


def _alignment(unit: CastUnit) -> tuple[bool, int]:
    return alignment(unit.numel, unit.source, unit.residual, unit.payload)
