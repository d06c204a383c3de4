"""The gradients of a training step: how large they are, and when backward has computed them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, TypeAlias

import torch

from gckernels.toolkit.fields import dtype_named

from ..plans.json_files import MAX_NUMBER, Entry
from ..plans.json_records import JsonForm

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""The dtypes of gradients."""

Float: TypeAlias = Annotated[float, JsonForm(Entry.number, float)]
# an encoding that makes inf has an error without bound
Error: TypeAlias = Annotated[float, JsonForm(Entry.number, lambda error: min(float(error), MAX_NUMBER))]


class TraceError(ValueError):
    """Raised for a trace that is not valid, or that lacks something; the message says what to do."""


def _dtype(entry: Entry) -> torch.dtype:
    dtype = dtype_named(entry.text())
    if dtype is None or dtype not in DTYPES:
        entry.refuse(f"one of {', '.join(str(each).removeprefix('torch.') for each in DTYPES)}")
    return dtype


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

    name: Annotated[str, JsonForm(Entry.name)]
    numel: int
    ready_s: Float
    shape: tuple[int, ...] | None = None
    dtype: Annotated[torch.dtype, JsonForm(_dtype, lambda dtype: str(dtype).removeprefix("torch."))] = torch.float32
    role: Role = Role.WEIGHT
    norm: Float | None = None
    errors: Mapping[str, Error] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """The bytes of the gradient."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class TracedGather:
    """A gather of the parameters of a group of FSDP2, before they are used."""

    names: tuple[Annotated[str, JsonForm(Entry.name)], ...]
    """The names of the parameters, which are those of a bucket of the trace."""
    asked_s: Float  # seconds from the start of the step, without communication, until FSDP asks for it
    needed_s: Float  # likewise until the computation waits for it
    frozen_numel: int = 0  # the elements of frozen parameters that are gathered beside them
