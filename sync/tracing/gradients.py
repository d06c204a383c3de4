"""Gradients that a recording keeps, and the errors of compressors on them.

Every tensor is kept by one rank only, so that memory and work are shared. Large tensors are represented by their first
rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch

from gckernels.compressor import Compressor

from ..accuracy.errors import relative_errors
from ..plans.strides import grad_strides, in_reals, memory_shape
from ..programs.topology import balanced

KEPT_STEPS = 4
"""The last recorded steps whose gradients are kept. Error feedback is warmed up on the first half of them."""
MAX_NUMEL = 4 * 2**20
"""The number of elements from which on a tensor is represented by a part of it. Errors are relative, and a part of this
size has that of the whole to better than a percent."""

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers with as many bytes as a number of a gradient."""


class KeptGradients:
    """The last gradients of the tensors that one rank keeps, on the host.

    Args:
        parameters: the parameters, by name.
        rank: this rank.
        world_size: the number of ranks that share the work.
        max_numel: the number of elements of a tensor that are kept at most.
    """

    def __init__(
        self, parameters: Mapping[str, torch.nn.Parameter], rank: int, world_size: int, max_numel: int = MAX_NUMEL
    ) -> None:
        self._max_numel = max_numel
        self._numels = {name: in_reals(each).numel() for name, each in parameters.items()}
        owners = balanced({name: min(numel, max_numel) for name, numel in self._numels.items()}, world_size)
        self._kept: dict[str, list[torch.Tensor]] = {name: [] for name in parameters if owners[name] == rank}
        self._shapes: dict[str, tuple[int, ...]] = {}

    def keep(self, name: str, gradient: torch.Tensor) -> None:
        """Copy the gradient of a tensor in one step, before it is averaged, if this rank keeps it."""
        kept = self._kept.get(name)
        if kept is not None:
            vector, self._shapes[name] = _piece(gradient, self._max_numel)
            kept.append(vector)
            del kept[:-KEPT_STEPS]

    def measured(self, methods: Sequence[Compressor]) -> dict[str, tuple[float, dict[str, float]]]:
        """The norm and the errors of every tensor that this rank keeps, by its name.

        The norm is the mean over the steps with finite gradients; a tensor without one is left out.
        """
        found = {}
        for name, kept in self._kept.items():
            norms = [float(vector.double().norm()) for vector in kept]
            norms = [norm for norm in norms if math.isfinite(norm)]
            if norms:
                whole = math.sqrt(self._numels[name] / max(kept[0].numel(), 1))
                found[name] = whole * sum(norms) / len(norms), relative_errors(methods, kept, self._shapes[name])
        return found


def digests(parameters: Iterable[torch.nn.Parameter], device: torch.device) -> torch.Tensor:
    """For every parameter a number that depends on each bit of its gradient, 0 without one: ``[n]`` int64, on
    ``device``. Nothing waits for the device."""
    found = []
    for parameter in parameters:
        if parameter.grad is None:
            found.append(torch.zeros((), dtype=torch.int64, device=device))
        else:
            real = in_reals(parameter.grad.detach())
            found.append(real.view(_BITS[real.element_size()]).sum(dtype=torch.int64).to(device, non_blocking=True))
    return torch.stack(found)


def _piece(gradient: torch.Tensor, max_numel: int) -> tuple[torch.Tensor, tuple[int, ...]]:
    """A copy of a gradient's first rows as a vector on the host, in memory order, and the sizes of its dimensions."""
    real = in_reals(gradient)
    shape = memory_shape(real)
    if real.numel() > max_numel:
        shape = (max(max_numel * shape[0] // real.numel(), 1), *shape[1:])
    vector = torch.empty(real.numel(), dtype=real.dtype, device=real.device)
    vector.as_strided(real.shape, grad_strides(real)).copy_(real)
    return vector[: math.prod(shape)].to("cpu", copy=True), shape
