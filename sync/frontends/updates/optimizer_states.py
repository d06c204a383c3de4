"""States that differ between ranks, such as those of optimizers: copies, checks, and the mean of several."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch


def copied(state: Any) -> Any:
    """A copy of dicts, lists and tuples of tensors and of other values."""
    return _mapped([state], lambda tensors: tensors[0].detach().clone())


def mean_of(states: Sequence[Any]) -> Any:
    """The mean of states of the same form, tensor by tensor. Tensors that are all the same, and tensors of integers,
    are those of the first state, and so is everything else.

    Args:
        states: dicts, lists and tuples, in each other in any depth, of tensors and other values.
    """
    return _mapped(states, _mean)


def _mapped(states: Sequence[Any], function: Any) -> Any:
    first = states[0]
    if isinstance(first, torch.Tensor):
        return function([each for each in states if isinstance(each, torch.Tensor) and each.shape == first.shape])
    if isinstance(first, dict):
        dicts = [each for each in states if isinstance(each, dict)]
        return {key: _mapped([each[key] for each in dicts if key in each], function) for key in first}
    if isinstance(first, list | tuple):
        lists = [each for each in states if isinstance(each, list | tuple) and len(each) == len(first)]
        return type(first)(_mapped(list(each), function) for each in zip(*lists, strict=True))
    return copy.deepcopy(first)


def _mean(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    first = tensors[0]
    if not (first.is_floating_point() or first.is_complex()) or all(torch.equal(first, each) for each in tensors):
        return first.detach().clone()
    total = torch.zeros_like(first, dtype=torch.promote_types(first.dtype, torch.float64))
    for each in tensors:
        total += each.to(total)
    return (total / len(tensors)).to(first.dtype)


def check_optimizer(what: str, state: Any, optimizer: torch.optim.Optimizer) -> None:
    """Raise a ValueError unless a state has the parameter groups of an optimizer."""
    if _sizes(state) != _sizes(optimizer.state_dict()):
        raise ValueError(f"state: {what} must be of {type(optimizer).__name__} with the same parameter groups")


def check_optimizers(what: str, states: Any, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raise a ValueError unless there is a state for each optimizer, with the same parameter groups."""
    if not isinstance(states, list) or len(states) != len(optimizers):
        names = ", ".join(type(each).__name__ for each in optimizers)
        raise ValueError(f"state: {what} must be a list of the states of {names}")
    for number, (state, optimizer) in enumerate(zip(states, optimizers, strict=True)):
        check_optimizer(f"{what}[{number}]", state, optimizer)


def _sizes(state: Any) -> list[int] | None:
    """The number of parameters in each group of an optimizer's state; ``None`` for anything else."""
    groups = state.get("param_groups") if isinstance(state, dict) else None
    return None if groups is None else [len(group["params"]) for group in groups]


def check_tensors(what: str, found: Any, expected: Mapping[str, torch.Tensor]) -> None:
    """Raise a ValueError unless ``found`` has a tensor with the shape of each one that is expected."""
    shapes = {name: tuple(each.shape) for name, each in expected.items()}
    if (
        not isinstance(found, dict)
        or {name: tuple(getattr(each, "shape", ())) for name, each in found.items()} != shapes
    ):
        raise ValueError(f"state: {what} must have a tensor for each parameter of the model, of the same shape")
