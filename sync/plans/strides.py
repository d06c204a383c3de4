"""How gradients lie in memory: as their parameters do if those have no gaps and no overlaps, otherwise as the
dimensions are numbered. That is autograd's rule.

Everything that is planned, encoded and sent is real: a complex parameter is synchronised as what :func:`in_reals`
makes of it.
"""

from __future__ import annotations

import torch


def in_reals(tensor: torch.Tensor) -> torch.Tensor:
    """A view of the tensor in real numbers, detached: of a complex one with a last dimension of 2, for the real and the
    imaginary part."""
    tensor = tensor.detach()
    if not tensor.is_complex():
        return tensor
    # a conjugate is the same memory read in another way, and cannot be viewed as it is
    return torch.view_as_real(tensor.conj() if tensor.is_conj() else tensor)


def memory_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """The dimensions in the order in which they lie in memory, the outermost first: ``(O, H, W, I)`` for the weight of
    a convolution in channels-last format."""
    return tuple(tensor.shape[dim] for dim in _order(tensor))


def grad_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides of the gradient."""
    strides, step = [0] * tensor.dim(), 1
    for dim in reversed(_order(tensor)):
        strides[dim] = step
        step *= max(tensor.shape[dim], 1)
    return tuple(strides)


def _order(tensor: torch.Tensor) -> list[int]:
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: -strides[dim])  # stable: sizes of 1 stay in their places
    dense = tensor.permute(order).is_contiguous()
    return order if dense else list(range(tensor.dim()))
