"""What a sparsifier remembers: what it has not sent, and a momentum of what goes in; and how it limits what goes in.

The states are ``u``, the velocity, if there is a momentum ``m``, and ``v``, what has not been sent yet, in this order.
With a gradient ``g``, scaled by ``f``::

    without momentum    v' = v + f g
    with momentum       u' = m u + f g           v' = v + u'
    Nesterov's          u' = m (u + f g)         v' = v + u' + f g

Entries are chosen of ``v'`` and sent. What was sent is subtracted from ``v'``, and ``u'`` is 0 where what was sent is
not (momentum factor masking: Lin et al., arXiv:1712.01887, section 3.2). Elsewhere ``u'`` and ``v'`` stay. Where what
would stay is not finite both keep their old values.

``f`` is 1, or what limits the norm of ``g``, all of the unit, to a given one. The squares are exact in fp64 and are
added up in fp64, in an order that is fixed but not the same in all implementations; ``f`` is rounded to fp32 once. A
sum of n terms is right to ``n * 2**-53`` in any order, its root to half of that, so before the last rounding two
implementations differ by ``(n + 4) * 2**-53`` of ``f`` at most, and after it not at all, unless the middle between
two fp32 numbers is as close as that to ``f``: a chance of ``(n + 4) * 2**-29``, and as errors do not all point the
same way, rather of its root. Then ``f`` is one fp32 number off, and everything else is equal for that ``f``. If the
norm is not finite ``f`` is 1, and inf and NaN stay where they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from ..kernels.launch import launch, temporary
from ..numeric import to_fp32
from ..quantizer.tiles import load_tile, remaining

_TILE, _NUM_WARPS = 2048, 8
_MAX_SUMS = 512  # the kernels' partial sums of squares


@dataclass(frozen=True)
class Memory:
    """How a sparsifier remembers (see the module's docstring).

    Attributes:
        momentum: ``m``, from 0.0 (none: one state instead of two) to below 1.0.
        nesterov: whether the momentum is Nesterov's.
        largest_norm: what the norm of a gradient is limited to, above 0; ``None``: not at all.
    """

    momentum: float = 0.0
    nesterov: bool = False
    largest_norm: float | None = None

    @property
    def states(self) -> int:
        """Vectors that are remembered."""
        return 2 if self.momentum else 1

    def accumulate(self, grad: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """The specification: the new ``u`` and ``v`` before anything is sent, ``[states * numel]``, fp32."""
        if self.largest_norm is not None:
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
        """The specification: what stays of ``u`` and ``v``, ``[states * numel]``, fp32."""
        if not self.momentum:
            return accumulated - decoded
        velocity, values = accumulated[: decoded.numel()], accumulated[decoded.numel() :]
        return torch.cat((torch.where(decoded == 0, velocity, 0.0), values - decoded))

    def factor(self, squares: torch.Tensor) -> torch.Tensor:
        """``f`` of a sum of squares (fp64), fp32."""
        norm, limit = squares.sqrt(), squares.new_tensor(self.largest_norm)
        return torch.where((norm > limit) & torch.isfinite(norm), limit / norm, 1.0).float()


# -------------------------------------------------------------------- kernels


@dataclass(frozen=True)
class Inputs:
    """What the kernels are compiled for: which inputs there are beside the gradient, and what is made of them."""

    residual: bool
    velocity: bool
    nesterov: bool
    clipped: bool


@triton.jit
def _accumulate(gradient, kept, velocity, factor_ptr, momentum, INPUTS: tl.constexpr):
    """``(v', u')`` of fp32 tiles; the gradient itself without a residual."""
    values = gradient
    if INPUTS.clipped:
        gradient = gradient * tl.load(factor_ptr)
    if INPUTS.velocity:
        if INPUTS.nesterov:
            velocity = (velocity + gradient) * momentum
            values = kept + velocity + gradient
        else:
            velocity = velocity * momentum + gradient
            values = kept + velocity
    elif INPUTS.residual:
        values = kept + gradient
    return values, velocity


@triton.jit
def load_values(source, first, offsets, here, INPUTS: tl.constexpr, TILE: tl.constexpr):
    """``(v', u', v, u)`` of a tile of ``source``, see :func:`kernel_source`; the gradient for what there is not."""
    grad_ptr, residual_ptr, velocity_ptr, factor_ptr, momentum = source
    gradient = load_tile(grad_ptr + first, offsets, here, TILE)
    kept = gradient
    velocity = gradient
    if INPUTS.residual:
        kept = load_tile(residual_ptr + first, offsets, here, TILE)
    if INPUTS.velocity:
        velocity = load_tile(velocity_ptr + first, offsets, here, TILE)
    values, new_velocity = _accumulate(gradient, kept, velocity, factor_ptr, momentum, INPUTS)
    return values, new_velocity, kept, velocity


@triton.jit
def gather_values(source, places, mask, INPUTS: tl.constexpr):
    """``v'`` of the elements at ``places``."""
    grad_ptr, residual_ptr, velocity_ptr, factor_ptr, momentum = source
    gradient = to_fp32(tl.load(grad_ptr + places, mask=mask, other=0.0))
    kept = gradient
    velocity = gradient
    if INPUTS.residual:
        kept = tl.load(residual_ptr + places, mask=mask, other=0.0)
    if INPUTS.velocity:
        velocity = tl.load(velocity_ptr + places, mask=mask, other=0.0)
    values, _ = _accumulate(gradient, kept, velocity, factor_ptr, momentum, INPUTS)
    return values


@triton.jit
def _squares_kernel(
    grad_ptr,
    sums_ptr,  # fp64 [programs]
    numel,
    TILE: tl.constexpr,
):
    offsets = tl.arange(0, TILE)
    sums = tl.zeros((TILE,), tl.float64)
    first = tl.program_id(0).to(tl.int64) * TILE
    while first < numel:
        values = load_tile(grad_ptr + first, offsets, remaining(numel, first, TILE), TILE).to(tl.float64)
        sums += values * values
        first += tl.num_programs(0).to(tl.int64) * TILE
    tl.store(sums_ptr + tl.program_id(0), tl.sum(sums, 0))


@triton.jit(do_not_specialize=["count"])
def _factor_kernel(
    sums_ptr,  # fp64 [count]
    factor_ptr,  # fp32 [1]
    count,
    LARGEST_NORM: tl.constexpr,
    MAX_SUMS: tl.constexpr,
):
    offsets = tl.arange(0, MAX_SUMS)
    norm = tl.sqrt(tl.sum(tl.load(sums_ptr + offsets, mask=offsets < count, other=0.0), 0))
    limit = tl.full((), LARGEST_NORM, tl.float64)
    clips = (norm > limit) & (norm < float("inf"))
    factor = tl.where(clips, limit / tl.where(clips, norm, 1.0), 1.0)
    tl.store(factor_ptr, factor.to(tl.float32))


def kernel_source(memory: Memory, grad, residual) -> tuple[tuple[Any, ...], Inputs]:
    """What the kernels select from: their first arguments, gradient, residual, velocity, factor of the gradient,
    momentum; and which of them there are."""
    kept = velocity = factor = grad  # what is not read must be something all the same
    if residual is not None:
        velocity, kept = residual[: grad.numel()], residual[residual.numel() - grad.numel() :]
        if memory.largest_norm is not None:
            factor = launch_factor(grad, memory.largest_norm)
    inputs = Inputs(
        residual=residual is not None,
        velocity=residual is not None and memory.states > 1,
        nesterov=memory.nesterov,
        clipped=factor is not grad,
    )
    return (grad, kept, velocity, factor, memory.momentum), inputs


def launch_factor(grad: torch.Tensor, largest_norm: float) -> torch.Tensor:
    """Launch what finds ``f`` for ``grad``, fp32 ``[1]`` on its device."""
    count = max(1, min(triton.cdiv(grad.numel(), _TILE), _MAX_SUMS))
    sums = temporary(count, dtype=torch.float64, device=grad.device)
    factor = temporary(1, dtype=torch.float32, device=grad.device)
    launch(_squares_kernel, (count,), grad, sums, grad.numel(), TILE=_TILE, num_warps=_NUM_WARPS)
    launch(_factor_kernel, (1,), sums, factor, count, LARGEST_NORM=largest_norm, MAX_SUMS=_MAX_SUMS)
    return factor
