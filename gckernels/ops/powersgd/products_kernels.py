"""The kernels of PowerSGD that multiply matrices: a matrix by a factor, and both factors with each other.

Matrices are worked on in tiles. With few columns in a factor (``NARROW``), every thread multiplies the elements that it
has loaded, and adds up in registers. With many, tiles are multiplied as matrices, in shared memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ...toolkit.kernels.launch import launch, temporary
from ...toolkit.kernels.launch_batch import bind_launcher
from ...toolkit.numeric import bf16_bits, bf16_value, both, is_finite, store, to_fp32
from ...toolkit.target import for_nvidia
from .tables import on_device, padded

FIELDS = tl.constexpr(7)  # numbers in a row of the table, see _table
NARROW = 8  # columns of a factor whose sums fit the registers


@dataclass(frozen=True)
class _Tiles:
    """How a kernel cuts a matrix.

    Attributes:
        rows, cols: size of a tile, which is worked on at a time.
        part: columns (for P) or rows (for Q) that one program adds up.
        num_warps: warps per program.
    """

    rows: int
    cols: int
    part: int
    num_warps: int


# for factors of many columns and of few; among those tried they keep shared memory and registers the least busy
_LEFT_TILES = _Tiles(64, 32, part=512, num_warps=4), _Tiles(16, 128, part=1024, num_warps=4)
_RIGHT_TILES = _Tiles(16, 64, part=512, num_warps=4), _Tiles(8, 256, part=256, num_warps=4)
_RECONSTRUCT_TILES = _Tiles(64, 64, part=0, num_warps=4), _Tiles(16, 256, part=0, num_warps=4)

_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _product(a, b, sums):
    """``a @ b + sums``. On NVIDIA's GPUs three products of TF32 have almost the precision of fp32, and take the tensor
    cores. A product of fp32 takes every lane, and most of the time of the shared memory."""
    PRECISION: tl.constexpr = "tf32x3" if for_nvidia() else "ieee"
    return tl.dot(a, b, sums, input_precision=PRECISION)


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
def _column(factor_ptr, INDEX: tl.constexpr, offsets, length, rank):
    """The elements at ``offsets`` of column ``INDEX`` of a factor ``[rank, length]``, zeros outside of the factor."""
    return tl.load(factor_ptr + INDEX * length + offsets, mask=both(offsets < length, rank > INDEX), other=0.0)


@triton.jit
def _matrix(table_ptr, matrix, DTYPE: tl.constexpr, ALIGN: tl.constexpr):
    row = table_ptr + matrix * FIELDS
    grad_ptr = tl.load(row).to(tl.pointer_type(DTYPE))
    residual_ptr = tl.load(row + 1).to(tl.pointer_type(tl.float32))
    left_ptr = tl.load(row + 2).to(tl.pointer_type(tl.float32))
    right_ptr = tl.load(row + 3).to(tl.pointer_type(tl.float32))
    cols = tl.load(row + 5)
    if ALIGN > 1:
        grad_ptr, residual_ptr = tl.multiple_of(grad_ptr, 16), tl.multiple_of(residual_ptr, 16)
        right_ptr, cols = tl.multiple_of(right_ptr, 16), tl.multiple_of(cols, ALIGN)
    return grad_ptr, residual_ptr, left_ptr, right_ptr, tl.load(row + 4), cols, tl.load(row + 6)


@triton.jit
def _work(table_ptr, work_ptr, DTYPE: tl.constexpr, ALIGN: tl.constexpr, COLS: tl.constexpr):
    """The work of a program that multiplies: its matrix, the first row and column, and the offset of its sums."""
    work = work_ptr + tl.program_id(0) * 4
    first_column = tl.multiple_of(tl.load(work + 2), COLS)  # a hint for what a function returns is lost
    return _matrix(table_ptr, tl.load(work), DTYPE, ALIGN), tl.load(work + 1), first_column, tl.load(work + 3)


@triton.jit
def _zeros(RANK: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """A tile of zeros for every column of a factor."""
    tiles = ()
    for _ in tl.static_range(RANK):
        tiles = tiles + (tl.zeros((ROWS, COLS), tl.float32),)
    return tiles


@triton.jit
def _added(sums, values, factor_ptr, offsets, length, rank, RANK: tl.constexpr, AXIS: tl.constexpr):
    """``sums``, plus the products of ``values`` and each column of a factor, which is the same along ``AXIS``."""
    tiles = ()
    for index in tl.static_range(RANK):
        column = tl.expand_dims(_column(factor_ptr, index, offsets, length, rank), AXIS)
        tiles = tiles + (tl.fma(values, column, sums[index]),)
    return tiles


@triton.jit
def _left_kernel(
    table_ptr,
    work_ptr,  # [programs, 4]: matrix, first row, first column, offset of the sums
    partial_ptr,
    HAS_RESIDUAL: tl.constexpr,
    DTYPE: tl.constexpr,
    ALIGN: tl.constexpr,
    RANK: tl.constexpr,
    NARROW: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    PART: tl.constexpr,
):
    matrix, first_row, first_column, place = _work(table_ptr, work_ptr, DTYPE, ALIGN, COLS)
    grad_ptr, residual_ptr, _, right_ptr, rows, cols, rank = matrix
    row = first_row + tl.arange(0, ROWS)
    sums = _zeros(RANK, ROWS, COLS) if NARROW else tl.zeros((ROWS, RANK), tl.float32)
    for first in range(first_column, tl.minimum(first_column + PART, cols), COLS):
        column = tl.multiple_of(first, COLS) + tl.arange(0, COLS)
        mask = (row < rows)[:, None] & (column < cols)[None, :]
        values = _values(grad_ptr, residual_ptr, row[:, None] * cols + column[None, :], mask, HAS_RESIDUAL)
        if NARROW:
            sums = _added(sums, values, right_ptr, column, cols, rank, RANK, 0)
        else:
            factor = _factor_tile(right_ptr, tl.multiple_of(first, COLS), cols, rank, RANK, COLS)
            sums = _product(values, tl.trans(factor), sums)
    place_ptr = partial_ptr + place + tl.arange(0, ROWS)
    if NARROW:
        for index in tl.static_range(RANK):
            tl.store(place_ptr + index * ROWS, tl.sum(sums[index], 1))
    else:
        tl.store(place_ptr[None, :] + tl.arange(0, RANK)[:, None] * ROWS, tl.trans(sums))


@triton.jit
def _right_kernel(
    table_ptr,
    work_ptr,  # as for _left_kernel
    partial_ptr,
    HAS_RESIDUAL: tl.constexpr,
    DTYPE: tl.constexpr,
    ALIGN: tl.constexpr,
    RANK: tl.constexpr,
    NARROW: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    PART: tl.constexpr,
):
    matrix, first_row, first_column, place = _work(table_ptr, work_ptr, DTYPE, ALIGN, COLS)
    grad_ptr, residual_ptr, left_ptr, _, rows, cols, rank = matrix
    column = first_column + tl.arange(0, COLS)
    sums = _zeros(RANK, ROWS, COLS) if NARROW else tl.zeros((RANK, COLS), tl.float32)
    for first in range(first_row, tl.minimum(first_row + PART, rows), ROWS):
        row = first + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & (column < cols)[None, :]
        values = _values(grad_ptr, residual_ptr, row[:, None] * cols + column[None, :], mask, HAS_RESIDUAL)
        if NARROW:
            sums = _added(sums, values, left_ptr, row, rows, rank, RANK, 1)
        else:
            factor = _factor_tile(left_ptr, first, rows, rank, RANK, ROWS)
            sums = _product(factor, values, sums)
    place_ptr = partial_ptr + place + tl.arange(0, COLS)
    if NARROW:
        for index in tl.static_range(RANK):
            tl.store(place_ptr + index * COLS, tl.sum(sums[index], 0))
    else:
        tl.store(place_ptr[None, :] + tl.arange(0, RANK)[:, None] * COLS, sums)


@triton.jit
def _sum_kernel(
    table_ptr,
    work_ptr,  # [programs, 4]: matrix, number of parts, first row or column, offset of the sums of the first part
    partial_ptr,
    scale,
    RIGHT: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    work = work_ptr + tl.program_id(0) * 4
    matrix, parts, first, place = tl.load(work), tl.load(work + 1), tl.load(work + 2), tl.load(work + 3)
    _, _, left_ptr, right_ptr, rows, cols, rank = _matrix(table_ptr, matrix, tl.float32, 1)
    index, at = tl.arange(0, RANK).to(tl.int64), first + tl.arange(0, BLOCK)
    total = tl.zeros((RANK, BLOCK), tl.float32)
    source = partial_ptr + place + index[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    for _ in range(parts):
        total += tl.load(source)
        source += RANK * BLOCK
    if RIGHT:
        target, length = right_ptr, cols
    else:
        target, length = left_ptr, rows
    mask = (index < rank)[:, None] & (at < length)[None, :]
    tl.store(target + index[:, None] * length + at[None, :], total * scale, mask=mask)


@triton.jit
def _reconstruct_kernel(
    table_ptr,
    work_ptr,  # [programs, 3]: matrix, first row, first column
    HAS_RESIDUAL: tl.constexpr,
    DTYPE: tl.constexpr,
    ALIGN: tl.constexpr,
    RANK: tl.constexpr,
    NARROW: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    work = work_ptr + tl.program_id(0) * 3
    matrix, first_row, first_column = tl.load(work), tl.load(work + 1), tl.multiple_of(tl.load(work + 2), COLS)
    grad_ptr, residual_ptr, left_ptr, right_ptr, rows, cols, rank = _matrix(table_ptr, matrix, DTYPE, ALIGN)
    row, column = first_row + tl.arange(0, ROWS), first_column + tl.arange(0, COLS)
    if NARROW:
        product = tl.zeros((ROWS, COLS), tl.float32)
        for index in tl.static_range(RANK):
            of_right = _column(right_ptr, index, column, cols, rank)
            product = tl.fma(_column(left_ptr, index, row, rows, rank)[:, None], of_right[None, :], product)
    else:
        left = _factor_tile(left_ptr, first_row, rows, rank, RANK, ROWS)
        right = _factor_tile(right_ptr, first_column, cols, rank, RANK, COLS)
        product = _product(tl.trans(left), right, tl.zeros((ROWS, COLS), tl.float32))
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


def _alike(
    grads, residuals, left, right, tiles_of: tuple[_Tiles, _Tiles]
) -> Iterator[tuple[torch.Tensor, tuple, dict, _Tiles]]:
    """Matrices that can share a launch, as table, shapes, settings and tiles: the same power of two divides columns."""
    groups: dict[int, list[int]] = {}
    for index, of_right in enumerate(right):
        tensors = (grads[index], of_right, *residuals[index : index + 1])
        aligned = all(tensor.data_ptr() % 16 == 0 for tensor in tensors)
        groups.setdefault(min(8, of_right.shape[1] & -of_right.shape[1]) if aligned else 1, []).append(index)
    for align, indices in groups.items():
        g, p, q = ([each[index] for index in indices] for each in (grads, left, right))
        table = _table(g, [residuals[index] for index in indices] if residuals else residuals, p, q)
        narrow = padded(p, 1) <= NARROW
        tiles = tiles_of[narrow]
        settings = {"HAS_RESIDUAL": bool(residuals), "DTYPE": _TYPES[g[0].dtype], "ALIGN": align, "NARROW": narrow}
        settings |= {"RANK": padded(p, 1 if narrow else 16), "ROWS": tiles.rows, "COLS": tiles.cols}
        settings["num_warps"] = tiles.num_warps
        shapes = tuple((a.shape[1], b.shape[1]) for a, b in zip(p, q, strict=True))
        yield table, shapes, settings, tiles


@functools.lru_cache(maxsize=512)
def _tile_work(shapes: tuple[tuple[int, int], ...], tiles: _Tiles, device: torch.device) -> torch.Tensor:
    work = tuple(
        (index, row, column)
        for index, (rows, cols) in enumerate(shapes)
        for row in range(0, rows, tiles.rows)
        for column in range(0, cols, tiles.cols)
    )
    return on_device(work, device)


@functools.lru_cache(maxsize=512)
def _part_work(
    shapes: tuple[tuple[int, int], ...], rank: int, tiles: _Tiles, of_right: bool, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """The work lists of the two kernels that compute P or Q, and the number of partial sums."""
    parts, sums, place = [], [], 0
    block, length = tiles.cols if of_right else tiles.rows, tiles.part
    for index, (rows, cols) in enumerate(shapes):
        kept, added = (cols, rows) if of_right else (rows, cols)
        for first in range(0, kept, block):
            starts = range(0, added, length)
            sums.append((index, len(starts), first, place))
            for start in starts:
                parts.append((index, start, first, place) if of_right else (index, first, start, place))
                place += rank * block
    return on_device(tuple(parts), device), on_device(tuple(sums), device), place


def _multiply(grads, residuals, left, right, of_right: bool, scale: float) -> None:
    device = grads[0].device
    tiles_of = _RIGHT_TILES if of_right else _LEFT_TILES
    for table, shapes, settings, tiles in _alike(grads, residuals, left, right, tiles_of):
        rank = settings["RANK"]
        parts, sums, numel = _part_work(shapes, rank, tiles, of_right, device)
        partial = temporary(numel, dtype=torch.float32, device=device)
        launch(
            *(_right_kernel if of_right else _left_kernel, (parts.shape[0],), table, parts, partial),
            PART=tiles.part,
            **settings,
        )
        block = tiles.cols if of_right else tiles.rows
        launch(
            *(_sum_kernel, (sums.shape[0],), table, sums, partial, scale),
            **{"RIGHT": of_right, "RANK": rank, "BLOCK": block},
        )


def left(grads, residuals, right, left, scale: float) -> None:
    _multiply(grads, residuals, left, right, False, scale)


def right(grads, residuals, left, right, scale: float) -> None:
    _multiply(grads, residuals, left, right, True, scale)


def reconstruct(left, right, grads, residuals) -> None:
    for table, shapes, settings, tiles in _alike(grads, residuals, left, right, _RECONSTRUCT_TILES):
        work = _tile_work(shapes, tiles, grads[0].device)
        launch(_reconstruct_kernel, (work.shape[0],), table, work, **settings)


def bind_left(grads, residuals, right, left, scale: float) -> Callable[[], None]:
    return bind_launcher(functools.partial(_multiply, grads, residuals, left, right, False, scale), grads[0].device)


def bind_right(grads, residuals, left, right, scale: float) -> Callable[[], None]:
    return bind_launcher(functools.partial(_multiply, grads, residuals, left, right, True, scale), grads[0].device)


def bind_reconstruct(left, right, grads, residuals) -> Callable[[], None]:
    return bind_launcher(functools.partial(reconstruct, left, right, grads, residuals), grads[0].device)
