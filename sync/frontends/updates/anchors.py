"""The parameters of the last synchronisation, the same on all ranks, from which updates are measured.

An anchor has at least 32 bits, also that of a parameter with 16. It begins a round as the parameter does; with fewer
bits in the parameter the anchor keeps the rest. So means of small updates add up, and none is measured twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...plans.strides import grad_strides
from ..members import Members
from .optimizer_states import check_optimizer, copied
from .updates_request import Outer


class Anchors:
    """The anchors of a model, and the outer optimizer that moves them.

    Args:
        parameters: the values of the parameters of the model, by name, the same on all ranks.
        outer: makes the outer optimizer.
        device: the memory in which anchors and the state of the outer optimizer lie; that of the parameters if
            ``None``.

    Attributes:
        values: the anchors, by name.
        members: their forms, and references to them.
        outer: the outer optimizer.
    """

    def __init__(
        self, parameters: Mapping[str, torch.Tensor], outer: Outer, device: torch.device | None = None
    ) -> None:
        self.values = {name: _anchor(each, device or each.device) for name, each in parameters.items()}
        self.members = Members(torch.nn.ParameterList(self.values.values()), self.values)
        self.outer = outer(list(self.values.values()))

    def begin(self, name: str, parameter: torch.Tensor) -> torch.Tensor:
        """The value with which a parameter has begun the round, in its own dtype and on its device."""
        return self.values[name].detach().to(parameter)

    @torch.no_grad()
    def move(self, means: Mapping[str, torch.Tensor]) -> None:
        """Let the outer optimizer move some anchors by the means of their updates, which have the sign of gradients.
        It leaves all others alone."""
        for name, mean in means.items():
            self.values[name].grad = mean.detach().to(self.values[name])
        self.outer.step()
        for name in means:
            self.values[name].grad = None

    def state_dict(self) -> dict[str, Any]:
        """Copies of the anchors, and the state of the outer optimizer."""
        return {"anchors": copied(self.values), "outer": copied(self.outer.state_dict())}

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise a ValueError unless :meth:`load` may be given a state."""
        check_tensors("anchors", state.get("anchors"), self.values)
        check_optimizer("outer", state.get("outer"), self.outer)

    @torch.no_grad()
    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of :meth:`state_dict`."""
        for name, anchor in self.values.items():
            anchor.copy_(state["anchors"][name])
        self.outer.load_state_dict(state["outer"])


def _anchor(parameter: torch.Tensor, device: torch.device) -> torch.nn.Parameter:
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    is_pinned = device.type == "cpu" and parameter.is_cuda  # the device copies from there by itself
    strides = grad_strides(parameter)
    values = torch.empty_strided(parameter.shape, strides, dtype=dtype, device=device, pin_memory=is_pinned)
    return torch.nn.Parameter(values.copy_(parameter.detach()))


def check_tensors(what: str, found: Any, expected: Mapping[str, torch.Tensor]) -> None:
    """Raise a ValueError unless ``found`` has a tensor with the shape of each one that is expected."""
    shapes = {name: tuple(each.shape) for name, each in expected.items()}
    if (
        not isinstance(found, dict)
        or {name: tuple(getattr(each, "shape", ())) for name, each in found.items()} != shapes
    ):
        raise ValueError(f"state: {what} must have a tensor for each parameter of the model, of the same shape")
