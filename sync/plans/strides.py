"""Layouts of gradients in memory, by autograd's rule.

A gradient has the strides of its parameter if the parameter has no gaps and no overlaps, and contiguous ones otherwise.

Everything that is planned, encoded and sent is real: :func:`in_reals` makes real numbers of a complex parameter.
"""

from __future__ import annotations

import torch


def in_reals(tensor: torch.Tensor) -> torch.Tensor:
    """A detached view of the tensor in real numbers. A complex tensor gets a last dimension of 2, for the real and the
    imaginary part."""
    tensor = tensor.detach()
    if not tensor.is_complex():
        return tensor
    # torch cannot view a lazy conjugate as reals; conj() gives back the tensor whose memory it shares
    return torch.view_as_real(tensor.conj() if tensor.is_conj() else tensor)


def memory_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """The sizes of the dimensions in memory order, the outermost first: ``(O, H, W, I)`` for the weight of a
    convolution in channels-last format."""
    return tuple(tensor.shape[dim] for dim in _order(tensor))


def grad_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides that autograd gives the gradient of ``tensor``."""
    strides, step = [0] * tensor.dim(), 1
    for dim in reversed(_order(tensor)):
        strides[dim] = step
        step *= max(tensor.shape[dim], 1)
    return tuple(strides)


def in_memory(piece: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """The view of a piece of memory as the gradient of ``parameter``, with its shape and dtype.

    Args:
        piece: ``[numel]``, real numbers in the order in which they lie in the gradient.
    """
    reals = in_reals(parameter)
    view = piece.as_strided(reals.shape, grad_strides(reals), piece.storage_offset())
    return torch.view_as_complex(view) if parameter.is_complex() else view


def _order(tensor: torch.Tensor) -> list[int]:
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: -strides[dim])  # stable for dimensions of size 1
    dense = tensor.permute(order).is_contiguous()
    return order if dense else list(range(tensor.dim()))
