"""The kernels of :mod:`~gckernels.ops.chunktopk` for many units in one launch; see ``toolkit/kernels/batch.py``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from ...batch import grouped
from ...codec import Decoding, Encoding, Recoding, Work
from ...toolkit.kernels.batch import (
    DTYPES,
    KernelBackend,
    Table,
    aligned,
    alignment,
    alignment_of,
    find_place,
    find_row_of,
    load_count,
    load_pointer,
    load_stride,
)
from ...toolkit.kernels.launch import bind_launch
from ...toolkit.kernels.launch_batch import LaunchBackend
from ...toolkit.tiles import chunk_step
from . import launchers
from .kernels import _encode_kernel, decode_program

_ENCODE_FIELDS = tl.constexpr(14)
_DECODE_FIELDS = tl.constexpr(10)


@triton.jit
def _encode_batch_kernel(
    units_ptr,
    table_ptr,  # see _encode_units
    scratch_ptr,  # int16 [programs, C.listed]
    DTYPE: tl.constexpr,  # type of the gradients
    ALIGNED: tl.constexpr,
    NUMEL_OF: tl.constexpr,  # divides all sizes
    C: tl.constexpr,
):
    row, place = find_place(units_ptr, table_ptr, _ENCODE_FIELDS)
    grad_ptr, residual_ptr = load_pointer(row + 2, DTYPE, ALIGNED), load_pointer(row + 3, tl.float32, ALIGNED)
    payload_ptr = load_pointer(row + 4, tl.uint8, ALIGNED)
    numel, chunk_numel = load_count(row + 5, NUMEL_OF), load_count(row + 6, 16)
    payload_stride, num_groups, scales_nbytes = (
        load_stride(row + 7, 16),
        load_count(row + 8, 1),
        load_count(row + 9, 16),
    )
    indices_offset, indices_nbytes = load_count(row + 10, 16), load_count(row + 11, 16)
    values_offset, values_nbytes = load_count(row + 12, 16), load_count(row + 13, 16)
    _encode_kernel(
        grad_ptr, residual_ptr, payload_ptr, scratch_ptr + tl.program_id(0).to(tl.int64) * C.listed, numel, chunk_numel,
        payload_stride, num_groups, scales_nbytes, indices_offset, indices_nbytes, values_offset, values_nbytes, C,
        place
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_items", "num_sources"])
def _decode_batch_kernel(
    units_ptr,
    table_ptr,  # see _decode_units
    scratch_ptr,  # fp32 [at once, C.groups * C.group]
    num_items,  # programs of all units
    num_sources,
    scale,
    DTYPE: tl.constexpr,  # type of the outputs
    ALIGNED: tl.constexpr,
    NUMEL_OF: tl.constexpr,  # divides all sizes
    C: tl.constexpr,
):
    scratch_ptr += tl.program_id(0).to(tl.int64) * (C.groups * C.group)
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        row, chunk, program = find_row_of(item, units_ptr, table_ptr, _DECODE_FIELDS)
        payload_ptr, out_ptr = load_pointer(row + 2, tl.uint8, ALIGNED), load_pointer(row + 3, DTYPE, ALIGNED)
        numel, chunk_numel = load_count(row + 4, NUMEL_OF), load_count(row + 5, 16)
        source_stride, chunk_stride = load_stride(row + 6, 16), load_stride(row + 7, 16)
        indices_offset, values_offset = load_count(row + 8, 16), load_count(row + 9, 16)
        decode_program(
            payload_ptr, out_ptr, scratch_ptr, program, chunk, numel, chunk_numel, num_sources, source_stride,
            chunk_stride, indices_offset, values_offset, scale, C
        )  # fmt: skip


class ChunkTopKTriton(KernelBackend):
    """The algorithm as kernels. Small units that are bound together share one launch, except where they are recoded."""

    encode = staticmethod(launchers.encode)
    decode = staticmethod(launchers.decode)

    def encode_together(self, units: Sequence[Encoding], scale: float, added: torch.Tensor | None) -> list[Work]:
        groups = grouped(units, lambda unit: (unit.grad.dtype, unit.residual is not None, _alignment(unit)))
        return [_encode_units(group) for group in groups]

    def decode_together(self, units: Sequence[Decoding], scale: float, accumulate: bool) -> list[Work]:
        groups = grouped(units, lambda unit: (unit.out.dtype, alignment_of(unit), unit.payloads.shape[0]))
        return [_decode_units(group, scale, accumulate) for group in groups]

    def recode_together(self, units: Sequence[Recoding], scale: float, added: torch.Tensor | None) -> list[Work]:
        return [LaunchBackend.bind_recodes(self, units, scale, added)]


def _encode_units(units: Sequence[Encoding]) -> Work:
    first, compressor = units[0], units[0].compressor
    rows = [
        (
            *(unit.grad.data_ptr(), (unit.grad if unit.residual is None else unit.residual).data_ptr()),
            *(unit.payload.data_ptr(), unit.grad.numel(), chunk_step(unit.size, unit.payload.shape[0])),
            *(unit.payload.stride(0), launchers.groups_of(compressor, unit.size)),
            *launchers.fields_of(compressor, unit.size),
        )
        for unit in units
    ]
    programs = [(launchers.encode_programs_of(compressor, unit.size), unit.payload.shape[0]) for unit in units]
    table = Table(programs, rows, first.payload.device)
    settings = launchers.encode_settings(compressor, first.grad.dtype, first.residual is not None)
    scratch = torch.empty(*table.grid, settings["C"].listed, dtype=torch.int16, device=first.payload.device)
    types = {"DTYPE": DTYPES[first.grad.dtype], **aligned(_alignment(first))}
    return bind_launch(_encode_batch_kernel, table.grid, *table.args, scratch, **types, **settings)


def _decode_units(units: Sequence[Decoding], scale: float, accumulate: bool) -> Work:
    first, compressor = units[0], units[0].compressor
    rows, programs = [], []
    for unit in units:
        chunks = unit.payloads.shape[1]
        layout = compressor.layout(unit.size)
        strides = unit.payloads.stride(0), unit.payloads.stride(1)
        tensors = unit.payloads.data_ptr(), unit.out.data_ptr(), unit.out.numel(), chunk_step(unit.size, chunks)
        rows.append((*tensors, *strides, layout["indices"].offset, layout["values"].offset))
        programs.append((launchers.programs_of(compressor, min(unit.size, unit.out.numel())), chunks))
    table = Table(programs, rows, first.out.device)
    (items,) = table.grid
    at_once, room = launchers.decode_scratch(compressor, items)
    scratch = torch.empty(at_once, room, dtype=torch.float32, device=first.out.device)
    types = {"DTYPE": DTYPES[first.out.dtype], **aligned(alignment_of(first))}
    arguments: tuple[Any, ...] = (*table.args, scratch, items, first.payloads.shape[0], scale)
    settings = launchers.decode_settings(compressor, accumulate)
    return bind_launch(_decode_batch_kernel, (at_once,), *arguments, **types, **settings)


def _alignment(unit: Encoding) -> tuple[bool, int]:
    return alignment(unit.grad.numel(), unit.grad, unit.residual, unit.payload)
