"""Checks of optimizers: for steps in backward, a momentum that is applied twice, and an unknown gradient scaler."""

from __future__ import annotations

import sys
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from .models import FABRIC


def groups_with(optimizer: torch.optim.Optimizer, ids: Set[int]) -> Iterator[dict[str, Any]]:
    """The parameter groups of an optimizer that have a parameter with one of the ``ids``; none if there are no ids."""
    return (group for group in optimizer.param_groups if ids and not ids.isdisjoint(map(id, group["params"])))


_PROPORTIONAL = (torch.optim.SGD, torch.optim.ASGD, torch.optim.LBFGS)


def normalises(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer makes steps whose length does not follow its gradients', as optimizers of Adam's class and
    Muon do. It holds for all that are not of SGD's class, because their settings do not show it: Muon and Lion have no
    second moments, and RMSprop has no ``betas``. Other packages have SGD by names such as ``FusedSGD``."""
    is_named = any("SGD" in each.__name__ and "Sign" not in each.__name__ for each in type(optimizer).__mro__)
    return not (isinstance(optimizer, _PROPORTIONAL) or is_named)


def warn_of_momentum(parameters: Iterable[torch.nn.Parameter], method: str) -> RemovableHandle:
    """Watch the first step of an optimizer that has one of ``parameters``, and warn if it applies a momentum to them.

    Args:
        parameters: parameters whose synchronised gradients contain a momentum already.
        method: name of the method that has applied it, for the warning.
    """

    def text(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> str:
        if not any(map(_momentum, groups)):
            return ""
        return (
            f"gckernels: {method} applies a momentum, and so does {type(optimizer).__name__}, to the same "
            "parameters: it is applied twice. Disable the optimizer's momentum for the compressed parameters, for "
            "example with torch.optim.SGD(..., momentum=0). Parameters that are sent exactly can keep it, in a "
            "separate parameter group."
        )

    return _warn_at_first_step(parameters, text)


def warn_of_scaler(parameters: Iterable[torch.nn.Parameter]) -> RemovableHandle:
    """Watch the first step of an optimizer that has one of ``parameters``, which have residuals, and warn if a gradient
    scaler makes it."""
    warning = (
        "gckernels: a GradScaler scales the gradients, but the synchronisation was not given it. Residuals "
        "will be wrong after the scale changes, and a part of them is lost in skipped steps. Pass "
        "grad_scaler=scaler to gckernels.sync.attach."
    )
    return _warn_at_first_step(parameters, lambda *_: warning if in_a_scaler() else "")


def warn_of_steps_in_backward(parameters: Iterable[torch.nn.Parameter]) -> RemovableHandle:
    """Watch optimizers, and warn of the first step that is made for one of ``parameters`` by a hook of autograd. The
    gradient is then that of this rank alone, under DDP as well.

    Args:
        parameters: parameters whose gradients are averaged at the end of backward.
    """

    def text(optimizer: torch.optim.Optimizer, groups: object) -> str:
        return (
            f"gckernels: a hook of a parameter calls {type(optimizer).__name__}.step in backward, before the "
            "gradient is averaged over the ranks, so their parameters will differ. Call it after backward"
        )

    # there is no node in callbacks at the end of backward
    return _warn_at_first_step(parameters, text, when=torch._C._current_autograd_node)


def _warn_at_first_step(
    parameters: Iterable[torch.nn.Parameter],
    text: Callable[[torch.optim.Optimizer, list[dict[str, Any]]], str],
    when: Callable[[], object] = lambda: True,
) -> RemovableHandle:
    """Watch optimizers, and warn at the first step of one that has some of ``parameters``.

    Args:
        parameters: the parameters.
        text: the warning, given the optimizer and its groups with these parameters; empty if there is none.
        when: returns something true if a step counts.
    """

    def warn(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> None:
        if warning := text(optimizer, groups):
            warnings.warn(warning, stacklevel=3)

    return at_first_step(parameters, warn, when)


def at_first_step(
    parameters: Iterable[torch.nn.Parameter],
    call: Callable[[torch.optim.Optimizer, list[dict[str, Any]]], object],
    when: Callable[[], object] = lambda: True,
) -> RemovableHandle:
    """Watch optimizers, and call a function at the first step of one that has some of ``parameters``.

    Args:
        parameters: the parameters.
        call: the function, given the optimizer and its groups with these parameters.
        when: returns something true if a step counts.

    Returns:
        A handle whose ``remove`` ends the watch. After that first step the watch does nothing.
    """
    watched = {id(parameter) for parameter in parameters}  # no references, which would keep the model alive

    def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if when() and (groups := list(groups_with(optimizer, watched))):
            watched.clear()  # the hook cannot be removed here: torch iterates over its hooks
            call(optimizer, groups)

    return register_optimizer_step_pre_hook(look)


def in_a_scaler() -> bool:
    """Whether one of the callers is an enabled ``GradScaler.step``; the call itself does not show it."""
    return calling_scaler() is not None


def calling_scaler() -> torch.amp.GradScaler | None:
    """The enabled gradient scaler whose ``step`` is one of the callers; ``None`` if there is none."""
    frame: types.FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not torch.amp.GradScaler.step.__code__:
        frame = frame.f_back
    scaler: torch.amp.GradScaler | None = None if frame is None else frame.f_locals["self"]
    return scaler if scaler is not None and scaler.is_enabled() else None


def unwrapped(optimizer: Any) -> Any:
    """The optimizer inside one that Accelerate or Lightning Fabric has prepared; anything else as it is."""
    packages = {each.__module__.split(".")[0] for each in type(optimizer).__mro__}
    return optimizer if packages.isdisjoint(("accelerate", *FABRIC)) else optimizer.optimizer


def hooked(caller: str, optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer whose steps call hooks: that inside one that Accelerate has prepared, otherwise the given one.

    Raises:
        TypeError: it is no optimizer, or calls no hooks.
    """
    optimizer = unwrapped(optimizer)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"{caller}: optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    try:
        optimizer.register_step_pre_hook(lambda *_: None).remove()
    except AttributeError as error:
        inside = "; give it the optimizer inside" if hasattr(optimizer, "optimizer") else ""
        raise TypeError(
            f"{caller}: optimizer must call the hooks of torch.optim.Optimizer, and {type(optimizer).__name__} has "
            f"none{inside}"
        ) from error
    return optimizer


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
    """Whether an optimizer's parameter group has a momentum: SGD's, or the first moment of Adam."""
    return bool(group.get("momentum", 0)) or bool(group.get("betas", (0,))[0])
