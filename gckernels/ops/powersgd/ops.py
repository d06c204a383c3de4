"""The torch ops of PowerSGD, and the same bound to their tensors. One call works on any number of matrices; on a GPU it
takes a launch or two, ``orthogonalise`` four. (Matrices whose columns let threads load 16 bytes at a time and others
do not share launches.)

Matrix ``i`` is ``grads[i]``, a vector of ``rows * cols`` elements, plus ``residuals[i]`` if there are residuals. Its
factors are ``left[i] [rank, rows]`` and ``right[i] [rank, cols]``; their shapes determine ``rows``, ``cols`` and
``rank``. There is at least one matrix. The dispatcher chooses the implementation, as in ``registration.py``: C on the
CPU, Triton on CUDA.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...arguments import check_added
from ...codec import GRAD_DTYPES
from ...devices import is_accelerator
from .reference import MAX_RANK

_library = torch.library.Library("gckernels", "FRAGMENT")

Tensors = Sequence[torch.Tensor]
Bound = Callable[[], None]


def orthogonalise(factors: Tensors, seeds: Sequence[int] | None = None, added: int = 0) -> None:
    """Replace each factor ``[rank, length]`` by an orthonormal basis of its columns (which are its rows in memory).

    Args:
        factors: fp32, contiguous, changed in place.
        seeds: one for each factor. With seeds, columns that are dependent or not finite become random. Without seeds,
            dependent columns become zero, and a factor that is not finite becomes all NaN.
        added: number that is added to every seed, modulo 2**63. Seeds that stay the same are copied to a GPU only once,
            so the part that changes from step to step is passed here.

    Raises:
        TypeError, ValueError: naming the argument; nothing has been changed.
    """
    torch.ops.gckernels.powersgd_orthogonalise(factors, seeds, added)


def left(grads: Tensors, residuals: Tensors, right: Tensors, left: Tensors, scale: float = 1.0) -> None:
    """Compute ``P = scale * M Q`` for every matrix ``M = grad + residual``.

    Args:
        grads: ``[rows * cols]``, contiguous, all fp32, bf16 or fp16.
        residuals: ``[rows * cols]``, contiguous, fp32, one for each gradient, or none at all.
        right: ``Q``, ``[rank, cols]``, contiguous, fp32.
        left: ``P``, ``[rank, rows]``, contiguous, fp32; written.
        scale: factor on the result, ``1 / world_size`` if the results of all ranks are going to be added up.

    Raises:
        TypeError, ValueError: naming the argument; nothing has been changed.
    """
    torch.ops.gckernels.powersgd_left(grads, residuals, right, left, scale)


def right(grads: Tensors, residuals: Tensors, left: Tensors, right: Tensors, scale: float = 1.0) -> None:
    """Compute ``Q = scale * Mᵀ P`` for every matrix. As :func:`left`, but ``left`` is read and ``right`` is written."""
    torch.ops.gckernels.powersgd_right(grads, residuals, left, right, scale)


def reconstruct(left: Tensors, right: Tensors, grads: Tensors, residuals: Tensors) -> None:
    """Replace every gradient by ``P Qᵀ``, and its residual by ``grad + residual - P Qᵀ``.

    Where the new residual is not finite, the old value stays. The arguments are the same as for :func:`left`; ``grads``
    and ``residuals`` are changed.
    """
    torch.ops.gckernels.powersgd_reconstruct(left, right, grads, residuals)


def keep(means: Tensors, factors: Tensors) -> None:
    """Copy each mean ``[rank, length]``, fp32, contiguous, into its factor, unless the mean is all zero or not finite.
    A mean that is not finite becomes all NaN. ``factors`` may be empty."""
    torch.ops.gckernels.powersgd_keep(means, factors)


# -------------------------------------------------------------------- argument checks


def _check_factors(name: str, argument: str, factors: Tensors, device: torch.device) -> None:
    for factor in factors:
        if factor.dtype != torch.float32:
            raise TypeError(f"{name}: {argument} must be torch.float32, got {factor.dtype}")
        if factor.dim() != 2 or not factor.is_contiguous():
            shape, stride = tuple(factor.shape), factor.stride()
            raise ValueError(
                f"{name}: {argument} must be contiguous [rank, length], got shape {shape} with strides {stride}"
            )
        if not 1 <= factor.shape[0] <= MAX_RANK:
            raise ValueError(f"{name}: {argument} must be of rank 1 to {MAX_RANK}, got {factor.shape[0]}")
        if factor.device != device:
            raise ValueError(f"{name}: {argument} is on {factor.device}, other tensors on {device}")


def _check_as_many(name: str, optional: str | None, /, **arguments: Sequence[Any]) -> None:
    counts = {argument: len(values) for argument, values in arguments.items() if values or argument != optional}
    equal = len(set(counts.values())) == 1
    if not equal or 0 in counts.values():
        listed = ", ".join(f"{count} {argument}" for argument, count in counts.items())
        wanted = "at least one" if equal else "as many"
        allowed = f"; only {optional} may be empty" if optional else ""
        raise ValueError(f"{name}: there must be {wanted} of each, got {listed}{allowed}")


def _check_matrices(name: str, grads: Tensors, residuals: Tensors, left: Tensors, right: Tensors) -> None:
    _check_as_many(name, "residuals", grads=grads, left=left, right=right, residuals=residuals)
    device, dtype = grads[0].device, grads[0].dtype
    _check_factors(name, "left", left, device)
    _check_factors(name, "right", right, device)
    for index, (grad, of_left, of_right) in enumerate(zip(grads, left, right, strict=True)):
        if grad.dtype not in GRAD_DTYPES or grad.dtype != dtype:
            allowed = ", ".join(str(dtype) for dtype in GRAD_DTYPES)
            raise TypeError(f"{name}: grads must all be of one of the dtypes {allowed}, got {dtype} and {grad.dtype}")
        (rank, rows), (other, cols) = of_left.shape, of_right.shape
        if rank != other:
            raise ValueError(f"{name}: left[{index}] is of rank {rank}, right[{index}] of rank {other}")
        _check_vector(name, f"grads[{index}]", grad, rows * cols, device)
        if residuals:
            if residuals[index].dtype != torch.float32:
                raise TypeError(f"{name}: residuals must be torch.float32, got {residuals[index].dtype}")
            _check_vector(name, f"residuals[{index}]", residuals[index], rows * cols, device)


def _check_vector(name: str, argument: str, tensor: torch.Tensor, numel: int, device: torch.device) -> None:
    if tensor.dim() != 1 or not tensor.is_contiguous() or tensor.numel() != numel:
        shape, stride = tuple(tensor.shape), tensor.stride()
        raise ValueError(
            f"{name}: {argument} must be a contiguous vector of {numel} elements, got shape {shape}, strides {stride}"
        )
    if tensor.device != device:
        raise ValueError(f"{name}: {argument} is on {tensor.device}, other tensors on {device}")


# -------------------------------------------------------------------- binding


def bind_orthogonalise(
    factors: Tensors, seeds: Sequence[int] | None = None, added: torch.Tensor | None = None
) -> Bound:
    """A function that repeats :func:`orthogonalise` of the same tensors; ``added``, int64, is read at every call.

    The arguments are checked once, here, and what a call needs is prepared. The tensors must keep their places in
    memory, and the function keeps them alive. This holds for all functions that bind.
    """
    name = "powersgd_orthogonalise"
    _check_as_many(name, None, factors=factors, **({} if seeds is None else {"seeds": seeds}))
    _check_factors(name, "factors", factors, factors[0].device)
    check_added(added, factors[0].device)
    return _holding(back_end(factors).bind_orthogonalise(factors, seeds, added), factors)


def bind_left(grads: Tensors, residuals: Tensors, right: Tensors, left: Tensors, scale: float = 1.0) -> Bound:
    """A function that repeats :func:`left`."""
    _check_matrices("powersgd_left", grads, residuals, left, right)
    return _holding(back_end(grads).bind_left(grads, residuals, right, left, scale), grads, residuals, right, left)


def bind_right(grads: Tensors, residuals: Tensors, left: Tensors, right: Tensors, scale: float = 1.0) -> Bound:
    """A function that repeats :func:`right`."""
    _check_matrices("powersgd_right", grads, residuals, left, right)
    return _holding(back_end(grads).bind_right(grads, residuals, left, right, scale), grads, residuals, right, left)


def bind_reconstruct(left: Tensors, right: Tensors, grads: Tensors, residuals: Tensors) -> Bound:
    """A function that repeats :func:`reconstruct`."""
    _check_matrices("powersgd_reconstruct", grads, residuals, left, right)
    return _holding(back_end(grads).bind_reconstruct(left, right, grads, residuals), grads, residuals, right, left)


def bind_keep(means: Tensors, factors: Tensors) -> Bound:
    """A function that repeats :func:`keep`."""
    name = "powersgd_keep"
    _check_as_many(name, "factors", means=means, factors=factors)
    _check_factors(name, "means", means, means[0].device)
    _check_factors(name, "factors", factors, means[0].device)
    for index, (mean, factor) in enumerate(zip(means, factors, strict=False)):
        if mean.shape != factor.shape:
            raise ValueError(f"{name}: means[{index}] is {tuple(mean.shape)}, factors[{index}] {tuple(factor.shape)}")
    return _holding(back_end(means).bind_keep(means, factors), means, factors)


def back_end(tensors: Tensors) -> Any:
    """The module with the steps for the device of the tensors."""
    device = tensors[0].device
    if device.type == "meta":
        return _META
    if is_accelerator(device):
        from . import kernels

        return kernels
    from . import host

    return host


def _holding(work: Callable[..., None], *tensors: Tensors) -> Callable[..., None]:
    """``work``, which keeps the tensors alive as long as it lives."""
    held = functools.partial(work)
    held.tensors = tensors  # type: ignore[attr-defined]
    return held


# -------------------------------------------------------------------- registration


def _orthogonalise(factors: Tensors, seeds: Sequence[int] | None = None, added: int = 0) -> None:
    # filled by the device itself, so that the host neither copies nor waits
    number = torch.full((1,), added, dtype=torch.int64, device=factors[0].device) if added and factors else None
    bind_orthogonalise(factors, seeds, number)()


def _once(bind: Callable[..., Bound]) -> Callable[..., None]:
    return lambda *given, **named: bind(*given, **named)()


_OPS: dict[str, Callable[..., None]] = {
    "powersgd_orthogonalise(Tensor(a!)[] factors, SymInt[]? seeds=None, SymInt added=0) -> ()": _orthogonalise,
    "powersgd_left(Tensor[] grads, Tensor[] residuals, Tensor[] right, Tensor(a!)[] left, float scale=1.0) -> ()": (
        _once(bind_left)
    ),
    "powersgd_right(Tensor[] grads, Tensor[] residuals, Tensor[] left, Tensor(a!)[] right, float scale=1.0) -> ()": (
        _once(bind_right)
    ),
    "powersgd_reconstruct(Tensor[] left, Tensor[] right, Tensor(a!)[] grads, Tensor(b!)[] residuals) -> ()": (
        _once(bind_reconstruct)
    ),
    "powersgd_keep(Tensor(a!)[] means, Tensor(b!)[] factors) -> ()": _once(bind_keep),
}


def _fake(*_: Any) -> None:
    """The ops return nothing and only write into their arguments."""


class _Meta:
    """Stand-in for a back end, for tensors without memory: what is bound to them does nothing."""

    def __getattr__(self, stage: str) -> Callable[..., Callable[..., None]]:
        return lambda *_: _fake


_META = _Meta()

for _schema, _op in _OPS.items():
    _name = _schema.partition("(")[0]
    _library.define(_schema)
    _library.impl(_name, _op, "CompositeExplicitAutograd")
    torch.library.register_fake(f"gckernels::{_name}", _fake, lib=_library)
