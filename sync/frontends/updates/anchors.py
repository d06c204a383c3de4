"""The parameters of the last synchronisation, the same on all ranks, from which updates are measured.

An anchor has at least 32 bits, also that of a parameter with 16. It begins a round as the parameter does; with fewer
bits in the parameter the anchor keeps the rest. So means of small updates add up, and none is measured twice.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...plans.strides import grad_strides
from ..members import Members
from .updates_request import Outer

PLAIN_MEAN: Outer = functools.partial(torch.optim.SGD, lr=1.0)
"""The outer optimizer that adds the mean of the updates to the anchors."""


class Anchors:
    """The anchors of a model, and the outer optimizer that moves them.

    Args:
        parameters: the parameters of the model, by name, the same on all ranks.
        outer: makes the outer optimizer.

    Attributes:
        values: the anchors, by name. Their gradients are the means of the updates, with the sign of gradients.
        members: their forms, and references to them.
        outer: the outer optimizer.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], outer: Outer) -> None:
        self.values = {name: _anchor(parameter) for name, parameter in parameters.items()}
        self.members = Members(torch.nn.ParameterList(self.values.values()), self.values)
        self.outer = outer(list(self.values.values()))

    def begin(self, name: str, parameter: torch.Tensor) -> torch.Tensor:
        """The value with which a parameter has begun the round, in its own dtype."""
        return self.values[name].detach().to(parameter.dtype)

    def state_dict(self) -> dict[str, Any]:
        """Copies of the anchors, and the state of the outer optimizer."""
        anchors = {name: anchor.detach().clone() for name, anchor in self.values.items()}
        return {"anchors": anchors, "outer": copy.deepcopy(self.outer.state_dict())}

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise a ValueError unless :meth:`load` may be given a state."""
        check_tensors("anchors", state.get("anchors"), self.values)
        if _sizes(state.get("outer")) != _sizes(self.outer.state_dict()):
            raise ValueError(f"state: outer must be of {type(self.outer).__name__} with the same parameter groups")

    @torch.no_grad()
    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of :meth:`state_dict`."""
        for name, anchor in self.values.items():
            anchor.copy_(state["anchors"][name])
        self.outer.load_state_dict(state["outer"])


def _anchor(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    values = torch.empty_strided(parameter.shape, grad_strides(parameter), dtype=dtype, device=parameter.device)
    return torch.nn.Parameter(values.copy_(parameter.detach()))


def check_tensors(what: str, found: Any, expected: Mapping[str, torch.Tensor]) -> None:
    """Raise a ValueError unless ``found`` has a tensor with the shape of each one that is expected."""
    shapes = {name: tuple(each.shape) for name, each in expected.items()}
    if (
        not isinstance(found, dict)
        or {name: tuple(getattr(each, "shape", ())) for name, each in found.items()} != shapes
    ):
        raise ValueError(f"state: {what} must have a tensor for each parameter of the model, of the same shape")


def mean_of(states: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The mean of the tensors of all ranks, by name."""
    return {name: functools.reduce(torch.add, (each[name] / len(states) for each in states)) for name in states[0]}


def _sizes(state: Any) -> list[int] | None:
    """The number of parameters in each group of an optimizer's state; ``None`` for anything else."""
    groups = state.get("param_groups") if isinstance(state, dict) else None
    return None if groups is None else [len(group["params"]) for group in groups]
