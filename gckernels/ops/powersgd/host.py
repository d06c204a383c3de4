"""The host path of PowerSGD: ``host.c`` and ``bases_host.c``, or the reference where these cannot be compiled.

Each function binds a stage: it returns a function that runs the stage on these tensors, any number of times.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...codec import SEED_MASK, number_in
from ...toolkit.host.library import COMMON, DTYPES, declare, defined, library
from ...toolkit.host.sources import program_text
from ...toolkit.host.structs import c_structs, pointer
from ...toolkit.host.threads import get_num_threads, run_parts
from ...toolkit.payload import round_up
from . import reference

_TEMPLATES = "host.c", "bases_host.c"
_WIDTH = 1280  # columns that are worked on at a time at most
_FACTOR = 2**13  # elements of the right factor that are worked on at a time at most: they stay in the nearest cache
_PARTLY = 256  # columns that are worked on at a time if they are not all
_WIDE = 64  # such numbers of columns are multiples of it
_ROWS = 16  # rows that are worked on at a time
_PIECE = 128  # elements of a column of a factor that are worked on at a time
_PART = 32  # pieces of a factor in a unit of work; inner products of all parts are added up
_MIN_PART = 2**15  # elements of a factor that are worth another thread
_FOUND_NBYTES = 8704  # space for found_t in bases_host.c
_CACHED = 2**20  # elements: a matrix of this size fits the cache of all cores, and is not prefetched
_UNIT = 2**15  # elements of a unit of work, approximately
_MIN_PART_ROWS = 64  # with fewer rows, adding up the parts takes longer than computing them
_MIN_SUMS = 2**18  # with fewer sums of parts, another thread does not pay off
_MAX_PARTS = 16  # parts into which the rows of a matrix are cut; the sums of all parts are added up at the end
_BASES = ("multiply_parts", "solve_all", "replace_parts", "finish", "orthogonalise")
_FUNCTIONS = (*_BASES, "left", "right", "right_sum", "reconstruct", "keep")


class _Matrix(ctypes.Structure):
    """A matrix, as ``matrix_t`` in ``host.c``."""

    _fields_ = (
        ("grad", pointer()),
        ("residual", pointer(ctypes.c_float)),  # or None
        # [rank, rows] and [rank, cols]; for bases and keep: a factor, and the kept factor or None
        *((name, pointer(ctypes.c_float)) for name in ("left", "right")),
        ("scratch", ctypes.c_int64),  # where its scratch begins, in bytes
        *((name, ctypes.c_int64) for name in ("rows", "cols", "rank", "width")),
        ("first", ctypes.c_int64),  # number of the first unit of work of the matrix
        # rows of a unit of work, or of a part, or pieces of a part of a factor; number of parts
        *((name, ctypes.c_int64) for name in ("height", "parts")),
        ("seed", ctypes.c_uint64),
    )


class _Call(ctypes.Structure):
    """Arguments of the functions in ``host.c``, as ``call_t``."""

    _fields_ = (
        *(("matrices", pointer(_Matrix)), ("count", ctypes.c_int64), ("scratch", pointer())),
        *(("dtype", ctypes.c_int32), ("random", ctypes.c_int32), ("scale", ctypes.c_float)),
    )


def bind_orthogonalise(factors, seeds: Sequence[int] | None, added: torch.Tensor | None = None) -> Callable[[], None]:
    """A function that makes every factor an orthonormal basis of its columns (``reference.orthogonalise``), in place.

    The number in ``added`` is added to every seed, modulo 2**63.
    """
    built = build()
    if built is None:
        return functools.partial(_orthogonalise_slowly, factors, seeds, added)
    matrices, units, nbytes = (_Matrix * len(factors))(), 0, 0
    for matrix, factor in zip(matrices, factors, strict=True):
        matrix.left, (matrix.rank, matrix.rows) = factor.data_ptr(), factor.shape
        pieces = -(-matrix.rows // _PIECE)
        matrix.first, matrix.height, matrix.parts, matrix.scratch = units, _PART, -(-pieces // _PART), nbytes
        units += matrix.parts
        numel = matrix.parts * matrix.rank**2 + matrix.rank * pieces * _PIECE
        nbytes += round_up(_FOUND_NBYTES + 8 * numel, 64)
    call = _call(matrices, random=seeds is not None)
    multiply, solve, replace, finish, whole = (_bound(getattr(built, name), call) for name in _BASES)
    min_part = max(1, _MIN_PART * units // max(sum(factor.numel() for factor in factors), 1))
    shared, count = units // min_part > 1, len(factors)

    def orthogonalise() -> None:
        if seeds is not None:
            number = number_in(added)
            for index, seed in enumerate(seeds):
                matrices[index].seed = (seed + number) & SEED_MASK
        scratch = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        call.scratch = scratch.data_ptr()
        if shared and get_num_threads() > 1:
            run_parts(multiply, units, min_part)
            solve(0, count)
            run_parts(replace, units, min_part)
            run_parts(finish, count, 1)
        else:
            whole(0, count)

    return orthogonalise


def _orthogonalise_slowly(factors, seeds: Sequence[int] | None, added: torch.Tensor | None) -> None:
    number = number_in(added)
    for index, factor in enumerate(factors):
        seed = None if seeds is None else (seeds[index] + number) & SEED_MASK
        factor.copy_(reference.orthogonalise(factor, seed))


def bind_left(grads, residuals, right, left, scale: float) -> Callable[[], None]:
    """A function that computes the left factor of every matrix, ``P = scale * M Q``, into ``left``."""
    built = build()
    if built is None:
        return functools.partial(_left_slowly, grads, residuals, right, left, scale)
    matrices, units = _by_rows(grads, residuals, left, right)
    work = _bound(built.left, _call(matrices, dtype=DTYPES[grads[0].dtype], scale=scale))
    return functools.partial(run_parts, work, units, 1)


def _left_slowly(grads, residuals, right, left, scale: float) -> None:
    for index, (grad, given, result) in enumerate(zip(grads, right, left, strict=True)):
        values = reference.matrix(grad, residuals[index] if residuals else None, result.shape[1])
        result.copy_(reference.left_of(values, given, scale))


def bind_right(grads, residuals, left, right, scale: float) -> Callable[[], None]:
    """A function that computes the right factor of every matrix, ``Q = scale * Mᵀ P``, into ``right``."""
    built = build()
    if built is None:
        return functools.partial(_right_slowly, grads, residuals, left, right, scale)
    matrices, units, numel = _matrices(grads, residuals, left, right), 0, 0
    for each in matrices:
        # the order of addition must depend on the size of the matrix alone
        height = max(-(-each.rows // _MAX_PARTS), _UNIT // max(each.cols, 1), _MIN_PART_ROWS)
        each.first, each.height, each.parts = units, height, max(-(-each.rows // height), 1)
        units += each.parts
        each.scratch = 4 * numel
        numel += each.parts * each.rank * round_up(each.cols, each.width)
    parts = _call(matrices, dtype=DTYPES[grads[0].dtype])
    columns, tiles = (_Matrix * len(grads)).from_buffer_copy(matrices), 0
    for each in columns:
        each.first = tiles
        tiles += -(-each.cols // each.width)
    sums = _call(columns, scale=scale)
    multiply, add_up = _bound(built.right, parts), _bound(built.right_sum, sums)
    min_part = tiles * _MIN_SUMS // max(numel, 1)

    def compute() -> None:
        scratch = torch.empty(numel, dtype=torch.float32, device="cpu")
        parts.scratch = sums.scratch = scratch.data_ptr()
        run_parts(multiply, units, 1)
        run_parts(add_up, tiles, min_part)

    return compute


def _right_slowly(grads, residuals, left, right, scale: float) -> None:
    for index, (grad, given, result) in enumerate(zip(grads, left, right, strict=True)):
        values = reference.matrix(grad, residuals[index] if residuals else None, given.shape[1])
        result.copy_(reference.right_of(values, given, scale))


def bind_reconstruct(left, right, grads, residuals) -> Callable[[], None]:
    """A function that replaces every gradient by the product of its factors, and its residual by the remainder."""
    built = build()
    if built is None:
        return functools.partial(_reconstruct_slowly, left, right, grads, residuals)
    matrices, units = _by_rows(grads, residuals, left, right)
    return functools.partial(
        run_parts, _bound(built.reconstruct, _call(matrices, dtype=DTYPES[grads[0].dtype])), units, 1
    )


def _reconstruct_slowly(left, right, grads, residuals) -> None:
    for index, (of_left, of_right, grad) in enumerate(zip(left, right, grads, strict=True)):
        residual = residuals[index] if residuals else None
        product, remainder = reference.reconstruct(of_left, of_right, grad, residual)
        grad.copy_(product)
        if residual is not None:
            residual.copy_(remainder)


def bind_keep(means, factors) -> Callable[[], None]:
    """A function that copies every mean into the factor that the next step begins with (``reference.keep``)."""
    built = build()
    if built is None:
        return functools.partial(_keep_slowly, means, factors)
    matrices = (_Matrix * len(means))()
    for index, (matrix, mean) in enumerate(zip(matrices, means, strict=True)):
        matrix.left, (matrix.rank, matrix.rows) = mean.data_ptr(), mean.shape
        matrix.right = factors[index].data_ptr() if factors else None
    return functools.partial(run_parts, _bound(built.keep, _call(matrices)), len(means), 1)


def _keep_slowly(means, factors) -> None:
    for index, mean in enumerate(means):
        new, kept = reference.keep(mean, factors[index] if factors else None)
        mean.copy_(new)
        if kept is not None:
            factors[index].copy_(kept)


def _matrices(grads, residuals, left, right) -> Any:
    return (_Matrix * len(grads))(
        *(
            _Matrix(
                grad=grad.data_ptr(),
                residual=residuals[index].data_ptr() if residuals else None,
                left=of_left.data_ptr(),
                right=of_right.data_ptr(),
                rows=of_left.shape[1],
                cols=of_right.shape[1],
                rank=of_left.shape[0],
                width=_width(of_right.shape[1], of_left.shape[0]),
            )
            for index, (grad, of_left, of_right) in enumerate(zip(grads, left, right, strict=True))
        )
    )


def _width(cols: int, rank: int) -> int:
    """The number of columns of a matrix that are worked on at a time."""
    width = round_up(cols, _WIDE)
    return width if 0 < width <= min(_WIDTH, _FACTOR // rank) else _PARTLY


def _by_rows(grads, residuals, left, right) -> tuple[Any, int]:
    """The matrices, cut into units of work of some rows each, and the number of units."""
    matrices, units = _matrices(grads, residuals, left, right), 0
    for each in matrices:
        each.first, each.height = units, max(_ROWS, _UNIT // max(each.cols, 1) // _ROWS * _ROWS)
        units += -(-each.rows // each.height)
    return matrices, units


def _call(matrices: Any, **settings: Any) -> _Call:
    call = _Call(matrices=ctypes.addressof(matrices), count=len(matrices), **settings)
    call.kept = matrices  # the call has only its address
    return call


def _bound(function: Callable[..., Any], call: _Call) -> Callable[[int, int], None]:
    return functools.partial(function, ctypes.byref(call))


@functools.cache
def build() -> Any:
    """The compiled functions, or ``None`` if they cannot be compiled."""
    return declare(library(program()), *_FUNCTIONS)


def program() -> str:
    """The source of the C program of PowerSGD."""
    defines = defined(
        WIDTH=_WIDTH,
        ROWS=_ROWS,
        PIECE=_PIECE,
        CACHED=_CACHED,
        FOUND_NBYTES=_FOUND_NBYTES,
        ROUNDS=reference.ROUNDS,
        MAX_RANK=reference.MAX_RANK,
        DEPENDENT=reference.DEPENDENT.hex(),
        CLEAR=reference.CLEAR.hex(),
    )
    structs = c_structs(matrix_t=_Matrix, call_t=_Call)
    return "\n".join((defines, COMMON, structs, program_text(__package__, *_TEMPLATES)))
