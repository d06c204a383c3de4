"""Errors that are assumed for traces that have none: those on synthetic gradients.

A synthetic gradient is what backward makes in a linear layer: the sum, over the samples of a batch, of products of a
column and a row. Samples, rows and columns have very different magnitudes, so the elements are heavy-tailed.
"""

from __future__ import annotations

import functools

import torch

from gckernels.compressor import Compressor

from .errors import relative_error

_SHAPE = (256, 512)
_SAMPLES, _STEPS = 32, 6
_RMS = 0.01  # compressors with an absolute threshold depend on it


@functools.lru_cache(maxsize=256)
def assumed_error(method: Compressor) -> float | None:
    """The relative error of a method on synthetic gradients; ``None`` if it cannot be measured.

    Args:
        method: the method, not fitted to a shape.
    """
    return relative_error(method, synthetic_gradients(), _SHAPE)


def synthetic_gradients() -> tuple[torch.Tensor, ...]:
    """Consecutive gradients of a matrix, as vectors; always the same. They take milliseconds, and megabytes."""
    generator = torch.Generator().manual_seed(0)

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator, dtype=torch.float32, device="cpu")

    rows, cols = _SHAPE
    by_row, by_col = normal(rows, 1).mul(0.5).exp(), normal(1, cols).mul(0.3).exp()
    gradients = []
    for _ in range(_STEPS):
        by_sample = normal(_SAMPLES, 1).exp()  # few samples have most of the loss
        deltas, inputs = normal(_SAMPLES, rows) * by_sample, normal(_SAMPLES, cols).relu()
        with torch.autocast("cpu", enabled=False):  # the caller's would have products in another type
            gradient = (deltas.T @ inputs * by_row * by_col).view(-1)
        gradients.append(gradient * (_RMS / gradient.square().mean().sqrt()))
    return tuple(gradients)
