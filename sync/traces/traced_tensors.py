"""The gradients of a training step: how large they are, and when backward has computed them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

import torch


class Role(Enum):
    """The place of a tensor in its model, on which it depends whether compressing it is safe."""

    WEIGHT = "weight"
    VECTOR = "vector"  # fewer than two dimensions, such as biases and norms
    EMBEDDING = "embedding"
    OUTPUT = "output"  # the weight of the last layer


@dataclass(frozen=True)
class TracedTensor:
    """One gradient of a model.

    Attributes:
        name: the plain name of the parameter.
        numel: the number of elements, in real numbers.
        ready_s: seconds from the start of backward until the gradient is ready on the slowest rank.
        shape: the sizes of the dimensions in memory order; ``None`` if the trace does not say.
        dtype: the dtype of the gradient.
        role: the place of the tensor in the model.
        norm: the Euclidean norm of the gradient, as a mean over steps; ``None`` if the trace does not say.
        errors: the relative error ``|g - decode(encode(g))| / |g|`` of every measured compressor, by its spec.
    """

    name: str
    numel: int
    ready_s: float
    shape: tuple[int, ...] | None = None
    dtype: torch.dtype = torch.float32
    role: Role = Role.WEIGHT
    norm: float | None = None
    errors: Mapping[str, float] = field(default_factory=dict)


class TraceError(ValueError):
    """Raised for a trace that is not valid, or that lacks something; the message says what to do."""
