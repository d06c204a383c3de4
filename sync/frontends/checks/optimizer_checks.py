"""Checks of optimizers: for steps in backward, a momentum that is applied twice, and an unknown gradient scaler."""

from __future__ import annotations

import sys
import types
import warnings
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ...plans.plan import Plan


def groups_with(optimizer: torch.optim.Optimizer, ids: Set[int]) -> Iterator[dict[str, Any]]:
    """The parameter groups of an optimizer that have a parameter with one of the ``ids``; none if there are no ids."""
    return (group for group in optimizer.param_groups if ids and not ids.isdisjoint(map(id, group["params"])))


def warn_of_momentum(parameters: Iterable[torch.nn.Parameter], method: str) -> RemovableHandle:
    """Watch the first step of an optimizer that has one of ``parameters``, and warn if it applies a momentum to them.

    Args:
        parameters: parameters whose synchronised gradients contain a momentum already.
        method: name of the method that has applied it, for the warning.

    Returns:
        A handle whose ``remove`` ends the watch. After that first step the watch does nothing.
    """
    watched = {id(parameter) for parameter in parameters}  # no references, which would keep the model alive

    def look(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        groups = list(groups_with(optimizer, watched))
        if not groups:
            return
        watched.clear()  # the hook cannot be removed here: torch iterates over its hooks
        if any(_momentum(group) for group in groups):
            warnings.warn(
                f"gckernels: {method} applies a momentum, and so does {type(optimizer).__name__}, to the same "
                "parameters: it is applied twice. Disable the optimizer's momentum for the compressed parameters, for "
                "example with torch.optim.SGD(..., momentum=0). Parameters that are sent exactly can keep it, in a "
                "separate parameter group.",
                stacklevel=2,
            )

    return register_optimizer_step_pre_hook(look)


def warn_of_scaler(parameters: Iterable[torch.nn.Parameter]) -> RemovableHandle:
    """Watch the first step of an optimizer that has one of ``parameters``, and warn if a gradient scaler makes it.

    Args:
        parameters: parameters with residuals.

    Returns:
        A handle whose ``remove`` ends the watch. After that first step the watch does nothing.
    """
    watched = {id(parameter) for parameter in parameters}

    def look(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not any(groups_with(optimizer, watched)):
            return
        watched.clear()
        if in_a_scaler():
            warnings.warn(
                "gckernels: a GradScaler scales the gradients, but the synchronisation was not given it. Residuals "
                "will be wrong after the scale changes, and a part of them is lost in skipped steps. Pass "
                "grad_scaler=scaler to gckernels.sync.attach.",
                stacklevel=2,
            )

    return register_optimizer_step_pre_hook(look)


def in_a_scaler() -> bool:
    """Whether one of the callers is an enabled ``GradScaler.step``; the call itself does not show it."""
    frame: types.FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not torch.amp.GradScaler.step.__code__:
        frame = frame.f_back
    return frame is not None and frame.f_locals["self"].is_enabled()


def watch_optimizers(
    plan: Plan, parameters: Mapping[str, torch.nn.Parameter], grad_scaler: torch.amp.GradScaler | None
) -> list[RemovableHandle]:
    """Watch optimizers for steps in backward, for a second momentum, and for an unknown gradient scaler.

    Args:
        plan: the plan of the training.
        parameters: the parameters of the plan that the model has, by name.
        grad_scaler: the scaler that the user has passed, if any.

    Returns:
        Handles whose ``remove`` ends the watches.
    """
    watches = [warn_of_steps_in_backward(parameters.values()), *_watch_momenta(plan, parameters)]
    with_residuals = residual_parameters(plan, parameters)
    if grad_scaler is None and with_residuals:
        watches.append(warn_of_scaler(with_residuals))
    return watches


def residual_parameters(plan: Plan, parameters: Mapping[str, torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    """The parameters of which workers keep residuals."""
    units = [unit for unit in plan.units if unit.has_residual("worker") and not unit.in_place]
    names = dict.fromkeys(name for unit in units for name in unit.parameters)
    return [parameters[name] for name in names if name in parameters]


def _watch_momenta(plan: Plan, parameters: Mapping[str, torch.nn.Parameter]) -> list[RemovableHandle]:
    """:func:`warn_of_momentum` for all units whose method applies a momentum; no handles if there are none."""
    with_momentum = [
        (unit.compressor.name, parameters[name])
        for unit in plan.units
        if unit.compressor.traits.applies_momentum and unit.feedback
        for name in unit.parameters
        if name in parameters
    ]
    if not with_momentum:
        return []
    return [warn_of_momentum([parameter for _, parameter in with_momentum], with_momentum[0][0])]


def warn_of_steps_in_backward(parameters: Iterable[torch.nn.Parameter]) -> RemovableHandle:
    """Watch optimizers, and warn of the first step that is made for one of ``parameters`` by a hook of autograd. The
    gradient is then that of this rank alone, under DDP as well.

    Args:
        parameters: parameters whose gradients are averaged at the end of backward.

    Returns:
        A handle whose ``remove`` ends the watch.
    """
    watched = {id(parameter) for parameter in parameters}

    def look(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if torch._C._current_autograd_node() is None:  # as in callbacks at the end of backward
            return
        if any(groups_with(optimizer, watched)):
            watched.clear()
            warnings.warn(
                f"gckernels: a hook of a parameter calls {type(optimizer).__name__}.step in backward, before the "
                "gradient is averaged over the ranks, so their parameters will differ. Call it after backward",
                stacklevel=2,
            )

    return register_optimizer_step_pre_hook(look)


def refuse_steps_in_backward(caller: str, parameters: Mapping[str, torch.nn.Parameter]) -> None:
    """Raise unless all optimizers wait for the end of backward, when gradients have been averaged.

    Args:
        caller: name of the calling function, for errors.
        parameters: all parameters, by name.

    Raises:
        ValueError: a parameter has an optimizer from ``_apply_optimizer_in_backward``. Under DDP it takes the only
            communication hook; elsewhere it uses the gradient of this rank alone.
    """
    for name, parameter in parameters.items():
        if hasattr(parameter, "_in_backward_optimizers"):
            raise ValueError(
                f"{caller}: parameter {name} has an optimizer that steps in backward (_apply_optimizer_in_backward), "
                "before its gradient is averaged; use an optimizer that steps after backward"
            )


def _momentum(group: dict[str, Any]) -> bool:
    """Whether an optimizer's parameter group has a momentum: that of SGD, or the first moment of Adam."""
    return bool(group.get("momentum", 0)) or bool(group.get("betas", (0,))[0])
