"""Traces of models: which gradients a training step has, how large they are, and when backward has computed them."""

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


@dataclass(frozen=True)
class Trace:
    """A training step without compression and without the time of communication. All times are in seconds.

    Attributes:
        model: the name of the model.
        tensors: the gradients, in the order in which they are ready.
        backward_s: from the start of backward until the last gradient is ready.
        forward_s: everything before backward; 0 if the trace does not say. The optimizer is in it where a trace does
            not tell them apart.
        optimizer_s: everything after the gradients are averaged; 0 if the trace does not say.
        buckets: DDP's buckets, as names of tensors in the order of their memory, first launched first; empty if the
            trace is not of a DDP model.
        source: where the numbers come from, for people.
        copies_gradients: whether DDP copies averaged gradients out of its buckets, as it does without
            ``gradient_as_bucket_view``.
    """

    model: str
    tensors: tuple[TracedTensor, ...]
    backward_s: float
    forward_s: float = 0.0
    optimizer_s: float = 0.0
    buckets: tuple[tuple[str, ...], ...] = ()
    source: str = ""
    copies_gradients: bool = False

    @property
    def is_whole_step(self) -> bool:
        """Whether it has more of a step than backward. Otherwise steps that are predicted from it are backward and
        synchronisation alone, and all gains look larger than those of a training."""
        return self.forward_s > 0


class TraceError(ValueError):
    """Raised for a trace that is not valid, or that lacks something; the message says what to do."""
