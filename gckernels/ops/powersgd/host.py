"""The host path of PowerSGD: ``host.c`` and ``bases_host.c``, or the reference where these cannot be compiled."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ...compressor import SEED_MASK
from ...toolkit.host.library import COMMON, DTYPES, declare, library
from ...toolkit.host.structs import c_structs, pointer
from ...toolkit.host.threads import run_parts
from ...toolkit.payload import round_up
from . import reference

_TEMPLATES = [Path(__file__).with_name(f"{name}.c") for name in ("host", "bases_host")]
_WIDTH = 256  # columns that are worked on at a time
_ROWS = 16  # rows that are worked on at a time
_PIECE = 128  # elements of a column of a factor that are worked on at a time
_CACHED = 2**20  # elements: a matrix of this size fits the cache of all cores, and is not prefetched
_UNIT = 2**15  # elements of a unit of work, approximately
_MIN_PART_ROWS = 64  # with fewer rows, adding up the parts takes longer than computing them
_MIN_SUMS = 2**18  # with fewer sums of parts, another thread does not pay off
_MAX_PARTS = 16  # parts into which the rows of a matrix are cut; the sums of all parts are added up at the end
_FUNCTIONS = ("orthogonalise", "left", "right", "right_sum", "reconstruct", "keep")


class _Matrix(ctypes.Structure):
    """A matrix, as ``matrix_t`` in ``host.c``."""

    _fields_ = (
        ("grad", pointer()),
        ("residual", pointer(ctypes.c_float)),  # or None
        # [rank, rows] and [rank, cols]; for orthogonalise and keep: a factor, and the kept factor or None
        *((name, pointer(ctypes.c_float)) for name in ("left", "right")),
        ("scratch", pointer()),
        *((name, ctypes.c_int64) for name in ("rows", "cols", "rank")),
        ("first", ctypes.c_int64),  # number of the first unit of work of the matrix
        # rows of a unit of work, or of a part; number of parts
        *((name, ctypes.c_int64) for name in ("height", "parts")),
        ("seed", ctypes.c_uint64),
    )


class _Call(ctypes.Structure):
    """Arguments of the functions in ``host.c``, as ``call_t``."""

    _fields_ = (
        *(("matrices", pointer(_Matrix)), ("count", ctypes.c_int64)),
        *(("dtype", ctypes.c_int32), ("random", ctypes.c_int32), ("scale", ctypes.c_float)),
    )


def orthogonalise(factors, seeds: Sequence[int] | None, added: int = 0) -> None:
    """Make every factor an orthonormal basis of its columns (``reference.orthogonalise``), in place."""
    built = build()
    if seeds is not None:
        seeds = [(seed + added) & SEED_MASK for seed in seeds]
    if built is None:
        for index, factor in enumerate(factors):
            factor.copy_(reference.orthogonalise(factor, None if seeds is None else seeds[index]))
        return
    scratch = [
        torch.empty(factor.shape[0] * round_up(factor.shape[1], _PIECE), dtype=torch.float64) for factor in factors
    ]
    matrices = (_Matrix * len(factors))(
        *(
            _Matrix(
                left=factor.data_ptr(),
                scratch=each.data_ptr(),
                rows=factor.shape[1],
                rank=factor.shape[0],
                seed=0 if seeds is None else seeds[index],
            )
            for index, (factor, each) in enumerate(zip(factors, scratch, strict=True))
        )
    )
    _run(built.orthogonalise, matrices, len(factors), random=seeds is not None)


def left(grads, residuals, right, left, scale: float) -> None:
    """Compute the left factor of every matrix, ``P = scale * M Q``, into ``left``."""
    built = build()
    if built is None:
        for index, (grad, given, result) in enumerate(zip(grads, right, left, strict=True)):
            values = reference.matrix(grad, residuals[index] if residuals else None, result.shape[1])
            result.copy_(reference.left_of(values, given, scale))
        return
    matrices, units = _by_rows(grads, residuals, left, right)
    _run(built.left, matrices, units, dtype=DTYPES[grads[0].dtype], scale=scale)


def right(grads, residuals, left, right, scale: float) -> None:
    """Compute the right factor of every matrix, ``Q = scale * Mᵀ P``, into ``right``."""
    built = build()
    if built is None:
        for index, (grad, given, result) in enumerate(zip(grads, left, right, strict=True)):
            values = reference.matrix(grad, residuals[index] if residuals else None, given.shape[1])
            result.copy_(reference.right_of(values, given, scale))
        return
    matrices, scratch, units = _matrices(grads, residuals, left, right), [], 0
    for each in matrices:
        # the order of addition must depend on the size of the matrix alone
        height = max(-(-each.rows // _MAX_PARTS), _UNIT // max(each.cols, 1), _MIN_PART_ROWS)
        each.first, each.height, each.parts = units, height, max(-(-each.rows // height), 1)
        units += each.parts
        scratch.append(torch.empty(each.parts * each.rank * round_up(each.cols, _WIDTH)))
        each.scratch = scratch[-1].data_ptr()
    _run(built.right, matrices, units, dtype=DTYPES[grads[0].dtype])
    units = 0
    for each in matrices:
        each.first = units
        units += -(-each.cols // _WIDTH)
    numel = sum(each.numel() for each in scratch)
    _run(built.right_sum, matrices, units, min_part=units * _MIN_SUMS // max(numel, 1), scale=scale)


def reconstruct(left, right, grads, residuals) -> None:
    """Replace every gradient by the product of its factors, and its residual by the remainder."""
    built = build()
    if built is None:
        for index, (of_left, of_right, grad) in enumerate(zip(left, right, grads, strict=True)):
            residual = residuals[index] if residuals else None
            product, remainder = reference.reconstruct(of_left, of_right, grad, residual)
            grad.copy_(product)
            if residual is not None:
                residual.copy_(remainder)
        return
    matrices, units = _by_rows(grads, residuals, left, right)
    _run(built.reconstruct, matrices, units, dtype=DTYPES[grads[0].dtype])


def keep(means, factors) -> None:
    """Copy every mean into the factor that the next step begins with (``reference.keep``)."""
    built = build()
    if built is None:
        for index, mean in enumerate(means):
            new, kept = reference.keep(mean, factors[index] if factors else None)
            mean.copy_(new)
            if kept is not None:
                factors[index].copy_(kept)
        return
    matrices = (_Matrix * len(means))(
        *(
            _Matrix(
                left=mean.data_ptr(),
                right=factors[index].data_ptr() if factors else None,
                rows=mean.shape[1],
                rank=mean.shape[0],
            )
            for index, mean in enumerate(means)
        )
    )
    _run(built.keep, matrices, len(means))


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
            )
            for index, (grad, of_left, of_right) in enumerate(zip(grads, left, right, strict=True))
        )
    )


def _by_rows(grads, residuals, left, right) -> tuple[Any, int]:
    """The matrices, cut into units of work of some rows each, and the number of units."""
    matrices, units = _matrices(grads, residuals, left, right), 0
    for each in matrices:
        each.first, each.height = units, max(_ROWS, _UNIT // max(each.cols, 1) // _ROWS * _ROWS)
        units += -(-each.rows // each.height)
    return matrices, units


def _run(function: Callable[..., Any], matrices: Any, units: int, min_part: int = 1, **settings: Any) -> None:
    call = _Call(matrices=ctypes.addressof(matrices), count=len(matrices), **settings)
    run_parts(functools.partial(function, ctypes.byref(call)), units, min_part)


@functools.cache
def build() -> Any:
    """The compiled functions, or ``None`` if they cannot be compiled."""
    built: Any = library(program())
    if built is not None:
        declare(built, *_FUNCTIONS)
    return built


def program() -> str:
    """The source of the C program of PowerSGD."""
    constants: dict[str, object] = {"WIDTH": _WIDTH, "ROWS": _ROWS, "PIECE": _PIECE, "CACHED": _CACHED}
    constants |= {"MAX_RANK": reference.MAX_RANK, "DEPENDENT": reference.DEPENDENT.hex()}
    defines = "".join(f"#define {name} {value}\n" for name, value in constants.items())
    structs = c_structs(matrix_t=_Matrix, call_t=_Call)
    return "\n".join((defines, COMMON, structs, *(each.read_text() for each in _TEMPLATES)))
