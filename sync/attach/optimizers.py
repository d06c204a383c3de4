"""Optimizers beside synchronisation: warnings of a momentum that is applied twice, and of a gradient scaler that nobody
has told of; a refusal of steps in backward."""

from __future__ import annotations

import sys
import types
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ..plans.plan import Plan
from ..programs.named import ALLREDUCE


def warn_of_momentum(parameters: Iterable[torch.nn.Parameter], what: str) -> RemovableHandle:
    """Watch the first step of an optimizer that has one of ``parameters``, and warn if it applies a momentum to them.

    Args:
        parameters: whose gradients hold a momentum already.
        what: applies it, for the warning.

    Returns:
        A handle whose ``remove`` ends the watch; after that first step it does nothing any more.
    """
    watched = {id(parameter) for parameter in parameters}  # no references: a model must not live on because of this

    def look(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not watched:
            return
        groups = [group for group in optimizer.param_groups if not watched.isdisjoint(map(id, group["params"]))]
        if not groups:
            return
        watched.clear()  # not removed: torch is going through its hooks
        if any(_momentum(group) for group in groups):
            warnings.warn(
                f"gckernels: {what} applies a momentum, and so does {type(optimizer).__name__}, to the same "
                "parameters: it is applied twice. Give the optimizer none for the parameters that are compressed, "
                "such as torch.optim.SGD(..., momentum=0); those that are sent exactly can keep theirs, in a parameter "
                "group of their own.",
                stacklevel=2,
            )

    return register_optimizer_step_pre_hook(look)


def warn_of_scaler(parameters: Iterable[torch.nn.Parameter]) -> RemovableHandle:
    """Watch the first step of an optimizer that has one of ``parameters``, and warn if a gradient scaler makes it.

    Args:
        parameters: with residuals.

    Returns:
        A handle whose ``remove`` ends the watch; after that first step it does nothing any more.
    """
    watched = {id(parameter) for parameter in parameters}

    def look(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not watched or all(watched.isdisjoint(map(id, group["params"])) for group in optimizer.param_groups):
            return
        watched.clear()
        if _in_a_scaler():
            warnings.warn(
                "gckernels: a GradScaler scales the gradients, and the synchronisation does not know it: residuals "
                "stay as they are when the scale changes, and steps that are skipped lose what they have sent of them. "
                "Give it to gckernels.sync.attach or Synchronizer: grad_scaler=scaler.",
                stacklevel=2,
            )

    return register_optimizer_step_pre_hook(look)


def _in_a_scaler() -> bool:
    """Whether one of the callers is ``GradScaler.step``. Nothing else tells: an optimizer is called like any other."""
    frame: types.FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not torch.amp.GradScaler.step.__code__:
        frame = frame.f_back
    return frame is not None and frame.f_locals["self"].is_enabled()


def watch_optimizers(
    plan: Plan, parameters: Mapping[str, torch.nn.Parameter], grad_scaler: torch.amp.GradScaler | None
) -> list[RemovableHandle]:
    """Handles of hooks that watch the first steps of optimizers: for a momentum that a plan's methods apply already,
    and for a scaler where there are residuals and the user has named none.

    Args:
        plan: of the parameters.
        parameters: by name.
        grad_scaler: that the user has told of.
    """
    watches = _watch_momenta(plan, parameters)
    remembering = [unit for unit in plan.units if unit.remembers("worker") and unit.program != ALLREDUCE]
    if grad_scaler is None and remembering:
        watches.append(warn_of_scaler(parameters[name] for unit in remembering for name in unit.parameters))
    return watches


def _watch_momenta(plan: Plan, parameters: Mapping[str, torch.nn.Parameter]) -> list[RemovableHandle]:
    """:func:`warn_of_momentum` for what a plan compresses by methods that apply a momentum: one handle if there is any,
    else none."""
    moving = [
        (unit.compressor.name, parameters[name])
        for unit in plan.units
        if unit.compressor.applies_momentum and unit.feedback
        for name in unit.parameters
    ]
    return [warn_of_momentum([parameter for _, parameter in moving], moving[0][0])] if moving else []


def refuse_steps_in_backward(what: str, parameters: Mapping[str, torch.nn.Parameter]) -> None:
    """Raise unless all optimizers wait for the end of backward, when gradients have been averaged.

    Raises:
        ValueError: a parameter has an optimizer from ``_apply_optimizer_in_backward``. Under DDP it takes the only
            communication hook, elsewhere it steps with the gradient of this rank alone.
    """
    for name, parameter in parameters.items():
        if hasattr(parameter, "_in_backward_optimizers"):
            raise ValueError(
                f"{what}: parameter {name} has an optimizer that steps in backward (_apply_optimizer_in_backward), "
                "before its gradient is averaged; step the optimizer after backward instead"
            )


def _momentum(group: dict[str, Any]) -> bool:
    """Whether the optimizer has a momentum for the parameters of a group: SGD's, or Adam's first moment."""
    return bool(group.get("momentum", 0)) or bool(group.get("betas", (0,))[0])
