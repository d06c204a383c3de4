"""The states that a sparsifier keeps from step to step: the residual, and the velocity of a momentum.

The states are ``u``, the velocity, if there is a momentum ``m``, and then ``v``, the residual: the sum of everything
that has not been sent yet. With a gradient ``g`` and its factor ``f``::

    without momentum    v' = v + f g
    with momentum       u' = m u + f g           v' = v + u'
    Nesterov's          u' = m (u + f g)         v' = v + u' + f g

Entries of ``v'`` are selected and sent. The decoded entries are subtracted from ``v'``, and ``u'`` is 0 where they are
not 0 (momentum factor masking: Lin et al., arXiv:1712.01887, section 3.2). Elsewhere ``u'`` and ``v'`` stay. Where the
new value is not finite both keep their old values.

``f`` is 1, or limits the norm of the unit's gradient. The squares are exact in fp64 and are added up in fp64, in an
order that is fixed but not the same in all implementations; ``f`` is rounded to fp32 once. A sum of n terms is right to
``n * 2**-53`` in any order, its root to half of that. Two implementations therefore differ by ``(n + 4) * 2**-53`` of
``f`` at most before the last rounding. After it they are equal, unless the middle between two fp32 numbers is as close
as that to ``f``: a chance of ``(n + 4) * 2**-29`` at most, and rather of its root, as errors do not all have the same
sign. Then ``f`` is one fp32 number off, and everything else is equal for that ``f``. If the norm is not finite, ``f``
is 1, and inf and NaN stay where they are.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from ..constants import constants
from ..kernels.launch import launch, temporary
from ..kernels.places import place_of
from ..numeric import to_fp32
from ..tiles import load_tile, remaining

_TILE, _NUM_WARPS = 2048, 8
_MAX_SUMS = 512  # the kernels' partial sums of squares
_SUMS = tl.constexpr(_MAX_SUMS)


@dataclass(frozen=True)
class Accumulation:
    """How a gradient is accumulated into the states (see the module's docstring).

    Attributes:
        momentum: ``m``, from 0.0 (none: one state instead of two) to below 1.0.
        nesterov: whether the momentum is Nesterov's.
        max_norm: largest norm of a gradient, above 0; ``None``: no limit.
    """

    momentum: float = 0.0
    nesterov: bool = False
    max_norm: float | None = None

    @property
    def states(self) -> int:
        """Number of states, each as long as the gradient."""
        return 2 if self.momentum else 1

    def accumulate(self, grad: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """The specification: ``u'`` and ``v'`` before anything is sent, fp32 ``[states * numel]``."""
        if self.max_norm is not None:
            grad = grad * self.factor(grad.double().square().sum())
        if not self.momentum:
            return grad + residual
        velocity, kept = residual[: grad.numel()], residual[grad.numel() :]
        if self.nesterov:
            velocity = (velocity + grad) * self.momentum
            return torch.cat((velocity, kept + velocity + grad))
        velocity = velocity * self.momentum + grad
        return torch.cat((velocity, kept + velocity))

    def keep(self, accumulated: torch.Tensor, decoded: torch.Tensor) -> torch.Tensor:
        """The specification: ``u`` and ``v`` after ``decoded`` was sent, fp32 ``[states * numel]``."""
        if not self.momentum:
            return accumulated - decoded
        velocity, values = accumulated[: decoded.numel()], accumulated[decoded.numel() :]
        return torch.cat((torch.where(decoded == 0, velocity, 0.0), values - decoded))

    def factor(self, squares: torch.Tensor) -> torch.Tensor:
        """``f``, fp32, from the sum of the squares of the gradient, fp64."""
        assert self.max_norm is not None
        norm = squares.sqrt()
        limit = torch.full_like(squares, self.max_norm)  # a number that is copied to a device makes the host wait
        return torch.where((norm > limit) & torch.isfinite(norm), limit / norm, 1.0).float()


# -------------------------------------------------------------------- kernels


@triton.jit
def _accumulate(gradient, kept, velocity, factor_ptr, momentum, C: tl.constexpr):
    """``(v', u')`` of fp32 tiles; the gradient itself without a residual."""
    values = gradient
    if C.clipped:
        gradient = gradient * tl.load(factor_ptr)
    if C.has_velocity:
        if C.nesterov:
            velocity = (velocity + gradient) * momentum
            values = kept + velocity + gradient
        else:
            velocity = velocity * momentum + gradient
            values = kept + velocity
    elif C.has_residual:
        values = kept + gradient
    return values, velocity


@triton.jit
def load_values(source, first, offsets, here, C: tl.constexpr):
    """``(v', u', v, u)`` of a tile of ``source``, see :func:`kernel_source`; the gradient in place of missing ones."""
    grad_ptr, residual_ptr, velocity_ptr, factor_ptr, momentum = source
    gradient = load_tile(grad_ptr + first, offsets, here, C.tile)
    kept = gradient
    velocity = gradient
    if C.has_residual:
        kept = load_tile(residual_ptr + first, offsets, here, C.tile)
    if C.has_velocity:
        velocity = load_tile(velocity_ptr + first, offsets, here, C.tile)
    values, new_velocity = _accumulate(gradient, kept, velocity, factor_ptr, momentum, C)
    return values, new_velocity, kept, velocity


@triton.jit
def gather_values(source, places, mask, C: tl.constexpr):
    """The same as :func:`load_values`, of the elements at ``places``, and zeros where the mask is not set."""
    grad_ptr, residual_ptr, velocity_ptr, factor_ptr, momentum = source
    gradient = to_fp32(tl.load(grad_ptr + places, mask=mask, other=0.0))
    kept = gradient
    velocity = gradient
    if C.has_residual:
        kept = tl.load(residual_ptr + places, mask=mask, other=0.0)
    if C.has_velocity:
        velocity = tl.load(velocity_ptr + places, mask=mask, other=0.0)
    values, new_velocity = _accumulate(gradient, kept, velocity, factor_ptr, momentum, C)
    return values, new_velocity, kept, velocity


@triton.jit
def _squares_kernel(
    grad_ptr,
    sums_ptr,  # fp64 [programs]
    numel,
    C: tl.constexpr,
    place=None,
):
    TILE: tl.constexpr = C.tile
    program, programs, _ = place_of(place)
    offsets = tl.arange(0, TILE)
    sums = tl.zeros((TILE,), tl.float64)
    first = program.to(tl.int64) * TILE
    while first < numel:
        values = load_tile(grad_ptr + first, offsets, remaining(numel, first, TILE), TILE).to(tl.float64)
        sums += values * values
        first += programs.to(tl.int64) * TILE
    tl.store(sums_ptr + program, tl.sum(sums, 0))


@triton.jit(do_not_specialize=["count"])
def _factor_kernel(
    sums_ptr,  # fp64 [count]
    factor_ptr,  # fp32 [1]
    count,
    C: tl.constexpr,
    place=None,
):
    offsets = tl.arange(0, _SUMS)
    norm = tl.sqrt(tl.sum(tl.load(sums_ptr + offsets, mask=offsets < count, other=0.0), 0))
    limit = tl.full((), C.max_norm_bits, tl.int64).to(tl.float64, bitcast=True)
    clips = (norm > limit) & (norm < float("inf"))
    factor = tl.where(clips, limit / tl.where(clips, norm, 1.0), 1.0)
    tl.store(factor_ptr, factor.to(tl.float32))


def kernel_source(accumulation: Accumulation, grad, residual) -> tuple[tuple[Any, ...], dict[str, bool]]:
    """The first arguments of kernels that select: gradient, residual, velocity, factor of the gradient, momentum; and
    which of them there are, as compile-time constants."""
    kept = velocity = factor = grad  # an argument that is not read must still be a tensor
    if residual is not None:
        velocity, kept = residual[: grad.numel()], residual[residual.numel() - grad.numel() :]
        if accumulation.max_norm is not None:
            factor = launch_factor(grad, accumulation.max_norm)
    present = {
        "has_residual": residual is not None,
        "has_velocity": residual is not None and accumulation.states > 1,
        "nesterov": accumulation.nesterov,
        "clipped": factor is not grad,
    }
    return (grad, kept, velocity, factor, accumulation.momentum), present


def launch_factor(grad: torch.Tensor, max_norm: float) -> torch.Tensor:
    """Launch the computation of ``f`` for ``grad``, fp32 ``[1]`` on its device."""
    count = max(1, min(triton.cdiv(grad.numel(), _TILE), _MAX_SUMS))
    sums = temporary(count, dtype=torch.float64, device=grad.device)
    factor = temporary(1, dtype=torch.float32, device=grad.device)
    launch(_squares_kernel, (count,), grad, sums, grad.numel(), C=constants(tile=_TILE), num_warps=_NUM_WARPS)
    (bits,) = struct.unpack("q", struct.pack("d", max_norm))  # constants are rounded to fp32, except for integers
    launch(_factor_kernel, (1,), sums, factor, count, C=constants(max_norm_bits=bits))
    return factor
