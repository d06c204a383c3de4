"""The kernels of :mod:`~gckernels.ops.randomk` for many units in one launch; see ``toolkit/kernels/batch.py``."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import triton
import triton.language as tl

from ...batch import grouped
from ...codec import SEED_MASK, Decoding, Encoding, Recoding, Work
from ...toolkit.constants import constants
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
from .kernels import _accumulate_kernel, _emit_kernel, decode_tile
from .positions_kernels import NUM_WARPS, TILE, reciprocal

_ENCODE_FIELDS = tl.constexpr(16)
_DECODE_FIELDS = tl.constexpr(13)
_TILE = tl.constexpr(TILE)


@triton.jit
def _accumulate_batch_kernel(
    units_ptr,
    table_ptr,  # see _encode_group
    nonfinite_ptr,  # int32, one for every chunk of every unit
    scale,
    added_ptr,  # to what is added to every seed
    DTYPE: tl.constexpr,  # type of the gradients
    ALIGNED: tl.constexpr,
    NUMEL_OF: tl.constexpr,  # divides all sizes
    C: tl.constexpr,
):
    row, place = find_place(units_ptr, table_ptr, _ENCODE_FIELDS)
    grad_ptr, residual_ptr = load_pointer(row + 2, DTYPE, ALIGNED), load_pointer(row + 3, tl.float32, ALIGNED)
    numel, chunk_numel, size = load_count(row + 6, NUMEL_OF), load_count(row + 7, 16), tl.load(row + 8)
    k, least, inverse_k, inverse_size = tl.load(row + 11), tl.load(row + 12), tl.load(row + 13), tl.load(row + 14)
    _accumulate_kernel(
        grad_ptr, residual_ptr, nonfinite_ptr + tl.load(row + 5), numel, chunk_numel, size, k, least, inverse_k,
        inverse_size, tl.load(row + 15), scale, C, place, added_ptr
    )  # fmt: skip


@triton.jit
def _emit_batch_kernel(
    units_ptr,
    table_ptr,  # see _encode_group
    nonfinite_ptr,
    scale,
    added_ptr,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    NUMEL_OF: tl.constexpr,
    C: tl.constexpr,
):
    row, place = find_place(units_ptr, table_ptr, _ENCODE_FIELDS)
    grad_ptr, residual_ptr = load_pointer(row + 2, DTYPE, ALIGNED), load_pointer(row + 3, tl.float32, ALIGNED)
    payload_ptr = load_pointer(row + 4, tl.float32, ALIGNED)
    numel, chunk_numel, size = load_count(row + 6, NUMEL_OF), load_count(row + 7, 16), tl.load(row + 8)
    # stores of 16 bytes would take an exchange through shared memory, as every thread reads elements far apart
    payload_stride, payload_count = load_stride(row + 9, 1), load_count(row + 10, 1)
    k, least, inverse_k = tl.load(row + 11), tl.load(row + 12), tl.load(row + 13)
    _emit_kernel(
        grad_ptr, residual_ptr, payload_ptr, nonfinite_ptr + tl.load(row + 5), numel, chunk_numel, size, payload_stride,
        payload_count, k, least, inverse_k, tl.load(row + 15), scale, C, place, added_ptr
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_items", "num_sources"])
def _decode_batch_kernel(
    units_ptr,
    table_ptr,  # see _decode_group
    scratch_ptr,  # fp32 [programs, TILE]
    num_items,  # tiles of all units
    num_sources,
    scale,
    DTYPE: tl.constexpr,  # type of the outputs
    ALIGNED: tl.constexpr,
    NUMEL_OF: tl.constexpr,  # divides all sizes
    C: tl.constexpr,
):
    scratch_ptr += tl.program_id(0).to(tl.int64) * _TILE
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        row, chunk, tile = find_row_of(item, units_ptr, table_ptr, _DECODE_FIELDS)
        payload_ptr, out_ptr = load_pointer(row + 2, tl.float32, ALIGNED), load_pointer(row + 3, DTYPE, ALIGNED)
        numel, chunk_numel, size = load_count(row + 4, NUMEL_OF), load_count(row + 5, 16), tl.load(row + 6)
        source_stride, chunk_stride = load_stride(row + 7, 4), load_stride(row + 8, 4)
        decode_tile(
            payload_ptr, out_ptr, scratch_ptr, tile.to(tl.int64), chunk.to(tl.int64), numel, chunk_numel, size,
            num_sources, source_stride, chunk_stride, tl.load(row + 9), tl.load(row + 10), tl.load(row + 11),
            tl.load(row + 12), scale, C
        )  # fmt: skip


class RandomKTriton(KernelBackend):
    """The algorithm as kernels. Small units that are bound together share launches, except where they are recoded."""

    encode = staticmethod(launchers.encode)
    decode = staticmethod(launchers.decode)

    def encode_together(self, units: Sequence[Encoding], scale: float, added: torch.Tensor | None) -> list[Work]:
        groups = grouped(units, lambda unit: (unit.grad.dtype, unit.residual is not None, _alignment(unit)))
        return [_encode_group(group, scale, added) for group in groups]

    def decode_together(self, units: Sequence[Decoding], scale: float, accumulate: bool) -> list[Work]:
        groups = grouped(units, lambda unit: (unit.out.dtype, alignment_of(unit), unit.payloads.shape[0]))
        return [_decode_group(group, scale, accumulate) for group in groups]

    def recode_together(self, units: Sequence[Recoding], scale: float, added: torch.Tensor | None) -> list[Work]:
        return [LaunchBackend.bind_recodes(self, units, scale, added)]


def _encode_group(units: Sequence[Encoding], scale: float, added: torch.Tensor | None) -> Work:
    first, device = units[0], units[0].payload.device
    chunks = [unit.payload.shape[0] for unit in units]
    rows, tiles, emitted = [], [], []
    for unit, count, place in zip(units, chunks, accumulate(chunks, initial=0), strict=False):
        payload, k = unit.payload.view(torch.float32), unit.compressor.capacity(unit.size)
        kept = unit.grad if unit.residual is None else unit.residual
        tensors = unit.grad.data_ptr(), kept.data_ptr(), payload.data_ptr(), place, unit.grad.numel()
        sizes = chunk_step(unit.size, count), unit.size, payload.stride(0), payload.shape[1]
        inverses = reciprocal(k), reciprocal(unit.size)
        rows.append((*tensors, *sizes, k, unit.size // max(k, 1), *inverses, unit.seed & SEED_MASK))
        tiles.append((triton.cdiv(unit.size, TILE), count))
        emitted.append((launchers.emit_programs_of(payload.shape[1]), count))
    nonfinite = torch.zeros(sum(chunks), dtype=torch.int32, device=device)
    common: dict[str, Any] = {"DTYPE": DTYPES[first.grad.dtype], **aligned(_alignment(first))}
    common |= {"num_warps": NUM_WARPS}
    has_residual = first.residual is not None
    of_grads, of_payloads = Table(tiles, rows, device), Table(emitted, rows, device)
    constants_of_grads = launchers.accumulate_constants(first.compressor, has_residual)
    numbers = nonfinite, scale, added
    accumulating = bind_launch(
        _accumulate_batch_kernel, of_grads.grid, *of_grads.args, *numbers, C=constants_of_grads, **common
    )
    emitting = bind_launch(
        _emit_batch_kernel,
        of_payloads.grid,
        *of_payloads.args,
        *numbers,
        C=constants(has_residual=has_residual),
        **common,
    )

    def work() -> None:
        nonfinite.zero_()
        accumulating()
        emitting()

    return work


def _decode_group(units: Sequence[Decoding], scale: float, accumulate: bool) -> Work:
    first, device = units[0], units[0].out.device
    rows, tiles = [], []
    for unit in units:
        chunks, k, numbers = (
            unit.payloads.shape[1],
            unit.compressor.capacity(unit.size),
            unit.payloads.view(torch.float32),
        )
        tensors = numbers.data_ptr(), unit.out.data_ptr(), unit.out.numel(), chunk_step(unit.size, chunks)
        inverses = reciprocal(k), reciprocal(unit.size)
        rows.append((*tensors, unit.size, numbers.stride(0), numbers.stride(1), k, unit.size // max(k, 1), *inverses))
        tiles.append((triton.cdiv(min(unit.size, unit.out.numel()), TILE), chunks))
    table = Table(tiles, rows, device)
    (items,) = table.grid
    programs = launchers.programs_of(items)
    scratch = torch.empty(programs, TILE, dtype=torch.float32, device=device)
    arguments: tuple[Any, ...] = (*table.args, scratch, items, first.payloads.shape[0], scale)
    return bind_launch(
        _decode_batch_kernel,
        (programs,),
        *arguments,
        DTYPE=DTYPES[first.out.dtype],
        **aligned(alignment_of(first)),
        C=launchers.decode_constants(first.compressor, accumulate),
        num_warps=NUM_WARPS,
    )


def _alignment(unit: Encoding) -> tuple[bool, int]:
    return alignment(unit.grad.numel(), unit.grad, unit.residual, unit.payload)
