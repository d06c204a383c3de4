"""The kernels of PowerSGD that multiply matrices: a matrix by a factor, and both factors with each other."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from ...toolkit.kernels.launch import launch
from ...toolkit.numeric import bf16_bits, bf16_value, is_finite, store, to_fp32
from .tables import on_device, padded

FIELDS = tl.constexpr(7)  # numbers in a row of the table, see _table
BLOCK = 32  # rows and columns of a tile: with 8 warps, everything that a product needs stays in registers
WARPS = 8
PART = 1024  # rows that a program adds up in Q = Mᵀ P

_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _values(grad_ptr, residual_ptr, offsets, mask, HAS_RESIDUAL: tl.constexpr):
    values = to_fp32(tl.load(grad_ptr + offsets, mask=mask, other=0.0))
    if HAS_RESIDUAL:
        values += tl.load(residual_ptr + offsets, mask=mask, other=0.0)
    return values


@triton.jit
def _factor_tile(factor_ptr, first, length, rank, RANK: tl.constexpr, BLOCK: tl.constexpr):
    """A tile ``[RANK, BLOCK]`` of a factor ``[rank, length]``, zeros outside of the factor."""
    columns, offsets = tl.arange(0, RANK).to(tl.int64), first + tl.arange(0, BLOCK)
    mask = (columns < rank)[:, None] & (offsets < length)[None, :]
    return tl.load(factor_ptr + columns[:, None] * length + offsets[None, :], mask=mask, other=0.0)


@triton.jit
def _matrix(table_ptr, matrix, DTYPE: tl.constexpr):
    row = table_ptr + matrix * FIELDS
    grad_ptr = tl.load(row).to(tl.pointer_type(DTYPE))
    residual_ptr = tl.load(row + 1).to(tl.pointer_type(tl.float32))
    left_ptr = tl.load(row + 2).to(tl.pointer_type(tl.float32))
    right_ptr = tl.load(row + 3).to(tl.pointer_type(tl.float32))
    return grad_ptr, residual_ptr, left_ptr, right_ptr, tl.load(row + 4), tl.load(row + 5), tl.load(row + 6)


@triton.jit
def _left_kernel(
    table_ptr,
    work_ptr,  # [programs, 2]: matrix, first row
    scale,
    HAS_RESIDUAL: tl.constexpr,
    DTYPE: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    work = work_ptr + tl.program_id(0) * 2
    matrix, first_row = tl.load(work), tl.load(work + 1)
    grad_ptr, residual_ptr, left_ptr, right_ptr, rows, cols, rank = _matrix(table_ptr, matrix, DTYPE)
    row = first_row + tl.arange(0, BLOCK)
    sums = tl.zeros((BLOCK, RANK), tl.float32)
    for first in range(0, cols, BLOCK):
        column = first + tl.arange(0, BLOCK)
        mask = (row < rows)[:, None] & (column < cols)[None, :]
        values = _values(grad_ptr, residual_ptr, row[:, None] * cols + column[None, :], mask, HAS_RESIDUAL)
        factor = _factor_tile(right_ptr, first, cols, rank, RANK, BLOCK)
        sums = tl.dot(values, tl.trans(factor), sums, input_precision="ieee")
    index = tl.arange(0, RANK).to(tl.int64)
    target = left_ptr + index[None, :] * rows + row[:, None]
    tl.store(target, sums * scale, mask=(row < rows)[:, None] & (index < rank)[None, :])


@triton.jit
def _right_kernel(
    table_ptr,
    work_ptr,  # [programs, 4]: matrix, first row, first column, offset of the sums
    partial_ptr,
    HAS_RESIDUAL: tl.constexpr,
    DTYPE: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK: tl.constexpr,
    PART: tl.constexpr,
):
    work = work_ptr + tl.program_id(0) * 4
    matrix, first_row, first_column, place = tl.load(work), tl.load(work + 1), tl.load(work + 2), tl.load(work + 3)
    grad_ptr, residual_ptr, left_ptr, _, rows, cols, rank = _matrix(table_ptr, matrix, DTYPE)
    column = first_column + tl.arange(0, BLOCK)
    sums = tl.zeros((RANK, BLOCK), tl.float32)
    for first in range(first_row, tl.minimum(first_row + PART, rows), BLOCK):
        row = first + tl.arange(0, BLOCK)
        mask = (row < rows)[:, None] & (column < cols)[None, :]
        values = _values(grad_ptr, residual_ptr, row[:, None] * cols + column[None, :], mask, HAS_RESIDUAL)
        factor = _factor_tile(left_ptr, first, rows, rank, RANK, BLOCK)
        sums = tl.dot(factor, values, sums, input_precision="ieee")
    index = tl.arange(0, RANK)
    tl.store(partial_ptr + place + index[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :], sums)


@triton.jit
def _right_sum_kernel(
    table_ptr,
    work_ptr,  # [programs, 4]: matrix, number of parts, first column, offset of the sums of the first part
    partial_ptr,
    scale,
    RANK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    work = work_ptr + tl.program_id(0) * 4
    matrix, parts, first_column, place = tl.load(work), tl.load(work + 1), tl.load(work + 2), tl.load(work + 3)
    _, _, _, right_ptr, _, cols, rank = _matrix(table_ptr, matrix, tl.float32)
    index, column = tl.arange(0, RANK).to(tl.int64), first_column + tl.arange(0, BLOCK)
    total = tl.zeros((RANK, BLOCK), tl.float32)
    source = partial_ptr + place + index[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    for _ in range(parts):
        total += tl.load(source)
        source += RANK * BLOCK
    mask = (index < rank)[:, None] & (column < cols)[None, :]
    tl.store(right_ptr + index[:, None] * cols + column[None, :], total * scale, mask=mask)


@triton.jit
def _reconstruct_kernel(
    table_ptr,
    work_ptr,  # [programs, 3]: matrix, first row, first column
    HAS_RESIDUAL: tl.constexpr,
    DTYPE: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    work = work_ptr + tl.program_id(0) * 3
    matrix, first_row, first_column = tl.load(work), tl.load(work + 1), tl.load(work + 2)
    grad_ptr, residual_ptr, left_ptr, right_ptr, rows, cols, rank = _matrix(table_ptr, matrix, DTYPE)
    row, column = first_row + tl.arange(0, BLOCK), first_column + tl.arange(0, BLOCK)
    left = _factor_tile(left_ptr, first_row, rows, rank, RANK, BLOCK)
    right = _factor_tile(right_ptr, first_column, cols, rank, RANK, BLOCK)
    product = tl.dot(tl.trans(left), right, input_precision="ieee")
    offsets = row[:, None] * cols + column[None, :]
    mask = (row < rows)[:, None] & (column < cols)[None, :]
    if HAS_RESIDUAL:
        grad = to_fp32(tl.load(grad_ptr + offsets, mask=mask, other=0.0))
        old = tl.load(residual_ptr + offsets, mask=mask, other=0.0)
        store(grad_ptr + offsets, product, mask)
        if tl.float32 != DTYPE:
            product = _rounded(product, DTYPE)
        left_over = grad + old - product
        tl.store(residual_ptr + offsets, tl.where(is_finite(left_over), left_over, old), mask=mask)
    else:
        store(grad_ptr + offsets, product, mask)


@triton.jit
def _rounded(values, DTYPE: tl.constexpr):
    if tl.bfloat16 == DTYPE:
        return bf16_value(bf16_bits(values))
    else:
        return values.to(DTYPE).to(tl.float32)


# -------------------------------------------------------------------- launchers


def _table(grads, residuals, left, right) -> torch.Tensor:
    """A table with a row for every matrix: addresses of gradient, residual, left and right factor; rows, cols, rank."""
    rows = tuple(
        (
            grad.data_ptr(),
            residuals[index].data_ptr() if residuals else 0,
            of_left.data_ptr(),
            of_right.data_ptr(),
            of_left.shape[1],
            of_right.shape[1],
            of_left.shape[0],
        )
        for index, (grad, of_left, of_right) in enumerate(zip(grads, left, right, strict=True))
    )
    return on_device(rows, grads[0].device)


@functools.lru_cache(maxsize=512)
def _row_work(shapes: tuple[tuple[int, int], ...], device: torch.device) -> torch.Tensor:
    work = tuple((index, row) for index, (rows, _) in enumerate(shapes) for row in range(0, rows, BLOCK))
    return on_device(work, device)


@functools.lru_cache(maxsize=512)
def _tile_work(shapes: tuple[tuple[int, int], ...], device: torch.device) -> torch.Tensor:
    work = tuple(
        (index, row, column)
        for index, (rows, cols) in enumerate(shapes)
        for row in range(0, rows, BLOCK)
        for column in range(0, cols, BLOCK)
    )
    return on_device(work, device)


@functools.lru_cache(maxsize=512)
def _part_work(
    shapes: tuple[tuple[int, int], ...], rank: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """The work lists of the two kernels that compute Q, and the number of partial sums."""
    parts, sums, place = [], [], 0
    for index, (rows, cols) in enumerate(shapes):
        for column in range(0, cols, BLOCK):
            starts = range(0, rows, PART)
            sums.append((index, len(starts), column, place))
            for row in starts:
                parts.append((index, row, column, place))
                place += rank * BLOCK
    return on_device(tuple(parts), device), on_device(tuple(sums), device), place


def _shapes(left, right) -> tuple[tuple[int, int], ...]:
    return tuple((a.shape[1], b.shape[1]) for a, b in zip(left, right, strict=True))


def left(grads, residuals, right, left, scale: float) -> None:
    work = _row_work(_shapes(left, right), grads[0].device)
    launch(
        _left_kernel,
        (work.shape[0],),
        *(_table(grads, residuals, left, right), work, scale),
        HAS_RESIDUAL=bool(residuals),
        DTYPE=_TYPES[grads[0].dtype],
        RANK=padded(left, 16),
        BLOCK=BLOCK,
        num_warps=WARPS,
    )


def right(grads, residuals, left, right, scale: float) -> None:
    table, rank = _table(grads, residuals, left, right), padded(left, 16)
    parts, sums, numel = _part_work(_shapes(left, right), rank, grads[0].device)
    partial = torch.empty(numel, dtype=torch.float32, device=grads[0].device)
    launch(
        _right_kernel,
        (parts.shape[0],),
        *(table, parts, partial),
        HAS_RESIDUAL=bool(residuals),
        DTYPE=_TYPES[grads[0].dtype],
        RANK=rank,
        BLOCK=BLOCK,
        PART=PART,
        num_warps=4,  # with 8, two registers are spilled on sm_80
    )
    launch(_right_sum_kernel, (sums.shape[0],), *(table, sums, partial, scale), RANK=rank, BLOCK=BLOCK)


def reconstruct(left, right, grads, residuals) -> None:
    work = _tile_work(_shapes(left, right), grads[0].device)
    launch(
        _reconstruct_kernel,
        (work.shape[0],),
        *(_table(grads, residuals, left, right), work),
        HAS_RESIDUAL=bool(residuals),
        DTYPE=_TYPES[grads[0].dtype],
        RANK=padded(left, 16),
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
