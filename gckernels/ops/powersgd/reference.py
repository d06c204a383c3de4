"""The specification of PowerSGD: each stage of a step in plain torch, for one matrix.

All factors are transposed, ``[rank, length]``.
"""

from __future__ import annotations

import torch

from ...toolkit.random import uniform

MAX_RANK = 32
DEPENDENT = 2.0**-20
"""Threshold below which the remainder of a column, relative to the column, is rounding noise. The remainder is the part
outside the span of the columns before it. An entry of an fp32 product is known to about 2**-23 of its size, times a
small factor for the length of its sum."""


def orthogonalise(factor: torch.Tensor, seed: int | None) -> torch.Tensor:
    """An orthonormal basis of the columns of a factor ``[rank, length]``: Gram-Schmidt in fp64, twice per column.

    A column that depends on the columns before it (:data:`DEPENDENT`) becomes zero: the product of both factors is
    exact without it. A factor with which a step begins has a ``seed``: its dependent columns become random instead,
    because a zero column would stay zero for ever. With a seed, a column that is not finite becomes random as well.
    Without a seed, a factor that is not finite becomes all NaN, so that every element of the matrix shows it.
    """
    if seed is None and not factor.isfinite().all():
        return torch.full_like(factor, torch.nan)
    rank, length = factor.shape
    basis = torch.zeros(0, length, dtype=torch.float64, device=factor.device)
    for column in range(rank):
        vector = _remainder(factor[column].double(), basis)
        if not vector.any() and seed is not None:
            random = uniform(seed, column * length, length, 16, factor.device).double() - 0.5
            vector = _remainder(random, basis)
        basis = torch.cat((basis, vector[None]))
    return basis.float()


def _remainder(vector: torch.Tensor, basis: torch.Tensor) -> torch.Tensor:
    """The part of ``vector`` outside the span of ``basis [columns, length]``, normalised, or zero."""
    before = vector.norm()
    for _ in range(2):
        vector = vector - (basis @ vector) @ basis
    after = vector.norm()
    independent = after > DEPENDENT * before  # false for NaN
    return torch.where(independent, vector / after, 0.0)


def matrix(grad: torch.Tensor, residual: torch.Tensor | None, rows: int) -> torch.Tensor:
    """The matrix ``[rows, cols]``, fp32: a gradient ``[rows * cols]`` plus its residual."""
    values = grad.float() if residual is None else grad.float() + residual
    return values.view(rows, -1)


def left_of(values: torch.Tensor, right: torch.Tensor, scale: float) -> torch.Tensor:
    """``P = scale * M Q``, as ``[rank, rows]``, from ``M [rows, cols]`` and ``right [rank, cols]``."""
    return (right @ values.T).mul_(scale)


def right_of(values: torch.Tensor, left: torch.Tensor, scale: float) -> torch.Tensor:
    """``Q = scale * Mᵀ P``, as ``[rank, cols]``, from ``M [rows, cols]`` and ``left [rank, rows]``."""
    return (left @ values).mul_(scale)


def reconstruct(
    left: torch.Tensor, right: torch.Tensor, grad: torch.Tensor, residual: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The product ``P Qᵀ`` as ``[rows * cols]`` in the gradient's dtype, and the new residual.

    The new residual is the old one plus the gradient, minus the product after rounding, which is the same on all ranks.
    Where it is not finite, the old value stays.
    """
    product = (left.T @ right).view(-1).to(grad.dtype)
    if residual is None:
        return product, None
    remainder = grad.float() + residual - product.float()
    return product, torch.where(remainder.isfinite(), remainder, residual)


def keep(mean: torch.Tensor, factor: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The mean, and the factor with which the next step begins.

    A mean that is not finite becomes all NaN, so that every element of the matrix shows it, and the factor stays. The
    factor also stays when the mean is all zero: then no rank has used the matrix in this step.
    """
    if not mean.isfinite().all():
        return torch.full_like(mean, torch.nan), factor
    return mean, factor if factor is None or not mean.any() else mean
