"""The specification of PowerSGD: each stage of a step in plain torch, for one matrix.

All factors are transposed, ``[rank, length]``.
"""

from __future__ import annotations

import torch

from ...toolkit.random import dither

MAX_RANK = 32
DEPENDENT = 2.0**-20
"""Threshold below which the remainder of a column, relative to the column, is rounding noise. The remainder is the part
outside the span of the columns before it. An entry of an fp32 product is known to about 2**-23 of its size, times a
small factor for the length of its sum."""
CLEAR = 2.0**20
"""Largest square of the coefficients of a basis vector, in columns of length 1, with which the vector is used. The
rounding of inner products in fp64, 2**-53, is multiplied by it: what two such vectors have in common is about 2**-33 of
their length, much less than the rounding of their elements to fp32."""
ROUNDS = 5
"""Largest number of rounds in which a basis is made; nearly all take one.

Each round can take columns apart that have all but 2**-10 in common. So two are enough for all that is not
:data:`DEPENDENT`, one tells what is, and one makes the random columns in its place orthonormal. One more is for random
columns that happen to be close to others, and for columns of which each is close to the one before it."""


def orthogonalise(factor: torch.Tensor, seed: int | None) -> torch.Tensor:
    """An orthonormal basis of the columns of a factor ``[rank, length]``: from inner products and their Cholesky
    factor, in fp64 (:func:`coefficients`), again if columns were too close to each other.

    The columns keep their order: each is replaced by its part outside the span of the columns before it. A column that
    depends on the columns before it (:data:`DEPENDENT`) becomes zero: the product of both factors is exact without it.
    A factor with which a step begins has a ``seed``: its dependent columns become random instead, because a zero column
    would stay zero for ever. With a seed, a column that is not finite becomes random as well. Without a seed, a factor
    that is not finite becomes all NaN, so that every element of the matrix shows it. A column that is still too close
    to others after the last of :data:`ROUNDS` rounds becomes zero.
    """
    if seed is None and not factor.isfinite().all():
        return torch.full_like(factor, torch.nan)
    rank, length = factor.shape
    basis = factor.double()
    before = torch.zeros(rank, dtype=torch.float64, device=factor.device)  # squares of lengths; 0: not known yet
    for turn in range(ROUNDS):
        gram = basis @ basis.T
        before = torch.where(before == 0, gram.diagonal(), before)
        usable = gram.diagonal() > DEPENDENT**2 * before  # false for NaN, and for inf, which no finite column has
        taken, clear = coefficients(gram, usable)
        last = turn == ROUNDS - 1
        if last:
            taken = taken * clear
        basis = taken.T @ torch.where(usable[:, None], basis, 0.0)
        before[clear] = 0  # their length is 1 from now on
        if seed is not None and not last:
            for column in (~usable).nonzero().flatten().tolist():
                basis[column] = dither(seed, column * length, length, device=factor.device).double() - 128.5
                before[column] = 0
        if bool((clear if seed is not None else clear | ~usable).all()):
            break
    return basis.float()


def coefficients(gram: torch.Tensor, usable: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The coefficients with which columns are added up to an orthonormal basis.

    ``gram = Uᵀ D U``, where ``U`` is triangular with ones on its diagonal, and the coefficients are ``U⁻¹ D**-½``. A
    column that is too close to the clear columns before it (:data:`CLEAR`) is not clear: no other column is made
    orthogonal to it in this round, and it is reduced to its remainder, not normalised.

    Args:
        gram: inner products of the columns, ``fp64 [rank, rank]``.
        usable: which columns to work on; coefficients of the others are zero.

    Returns:
        The coefficients ``[rank, rank]``, one column for each new column, and which of these are clear.
    """
    rank = gram.shape[0]
    squares, later = gram.diagonal().clone(), torch.arange(rank, dtype=torch.int64, device=gram.device)
    left, taken = gram.clone(), torch.eye(rank, dtype=torch.float64, device=gram.device)
    clear = torch.zeros_like(usable)
    for column in range(rank):
        square, own = left[column, column], taken[:, column].clone()
        used = torch.where(own == 0, 0.0, own.square() * squares).sum()
        clear[column] = usable[column] & (square > 0) & (used <= CLEAR * square)
        if not clear[column]:
            continue
        share = torch.where(usable & (later > column), left[column] / square, 0.0)
        left = left - left[:, column, None] * share
        taken = taken - own[:, None] * share
        taken[:, column] = own / square.sqrt()
    return torch.where(usable, taken, 0.0), clear


def matrix(grad: torch.Tensor, residual: torch.Tensor | None, rows: int) -> torch.Tensor:
    """The matrix ``[rows, cols]``, fp32: a gradient ``[rows * cols]`` plus its residual."""
    values = grad.float() if residual is None else grad.float() + residual
    return values.view(rows, -1)


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a @ b`` in their own type, also where the caller's autocast has another one for products."""
    with torch.autocast(a.device.type, enabled=False):
        return a @ b


def left_of(values: torch.Tensor, right: torch.Tensor, scale: float) -> torch.Tensor:
    """``P = scale * M Q``, as ``[rank, rows]``, from ``M [rows, cols]`` and ``right [rank, cols]``."""
    return _product(right, values.T).mul_(scale)


def right_of(values: torch.Tensor, left: torch.Tensor, scale: float) -> torch.Tensor:
    """``Q = scale * Mᵀ P``, as ``[rank, cols]``, from ``M [rows, cols]`` and ``left [rank, rows]``."""
    return _product(left, values).mul_(scale)


def reconstruct(
    left: torch.Tensor, right: torch.Tensor, grad: torch.Tensor, residual: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The product ``P Qᵀ`` as ``[rows * cols]`` in the gradient's dtype, and the new residual.

    The new residual is the old one plus the gradient, minus the product after rounding, which is the same on all ranks.
    Where it is not finite, the old value stays.
    """
    product = _product(left.T, right).view(-1).to(grad.dtype)
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
