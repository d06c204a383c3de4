"""Watches of the optimizers of a training, for the mistakes that its plan makes possible."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.amp import GradScaler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ...plans.plan import Plan
from .hooks import weakly
from .optimizer_checks import (
    groups_with,
    in_a_scaler,
    warn_of_momentum,
    warn_of_scaler,
    warn_of_steps_in_backward,
)

if TYPE_CHECKING:
    from .layer_use import LayerUse

_THROWN_AWAY = (
    "gckernels: the gradients of a synchronised backward were cleared before an optimizer used them. Error feedback "
    "keeps a part of them, which the next steps apply. Freeze the parameters in such a backward, or put it under "
    "no_sync(); exact() of the attachment averages gradients and leaves residuals alone, and discard_step() takes the "
    "last step back"
)


_SHARED = (
    "gckernels: the gradients of {} are thrown away before the optimizer's step, and lie in units with others that are "
    "used. Error feedback keeps a part of them, which later steps apply. Freeze these parameters meanwhile, or give a "
    "plan in which they are units of their own"
)


class OptimizerWatches:
    """Watches of optimizers, for one plan after the other.

    Args:
        scaler: the gradient scaler of the training; ``None`` if there is none.
        forget: called with keys of units if the last gradients of all their parameters are thrown away.
    """

    def __init__(self, scaler: GradScaler | None, forget: Callable[[Collection[str]], None]) -> None:
        self._scaler, self._forget = scaler, forget
        self._units: dict[str, frozenset[str]] = {}  # the parameters of units with residuals, by key
        self._layers: LayerUse | None = None
        self._has_warned = False
        self._watches: list[Any] = []
        self._use: GradientUse | None = None

    def watch(self, plan: Plan, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Watch optimizers for a plan, in place of an earlier one.

        Args:
            plan: the plan.
            parameters: the parameters of the plan that the model has, by name.
        """
        self.close()
        momenta: dict[str, str] = {}  # the method, by parameter
        residuals: dict[str, None] = {}
        self._units = {}
        for unit in plan.units:
            names = [name for name in unit.parameters if name in parameters]
            if unit.compressor.traits.applies_momentum and unit.feedback:
                momenta |= dict.fromkeys(names, unit.compressor.name)
            if unit.has_residual("worker") and not unit.in_place:
                residuals |= dict.fromkeys(names)
                self._units[unit.key] = frozenset(names)
        self._watches.append(warn_of_steps_in_backward(parameters.values()))
        if momenta:
            self._watches.append(warn_of_momentum([parameters[name] for name in momenta], next(iter(momenta.values()))))
        if residuals:
            from . import layer_use

            self._layers = layer_use.LayerUse({name: parameters[name] for name in residuals}, weakly(self._gone))
            self._watches.append(self._layers)
        if residuals and self._scaler is None:
            watched = [parameters[name] for name in residuals]
            self._use = GradientUse(watched)
            self._watches += [warn_of_scaler(watched), self._use]

    def synchronised(self) -> None:
        """Expect an optimizer to use the gradients, which a backward has just synchronised with residuals."""
        for watch in (self._use, self._layers):
            if watch is not None:
                watch.synchronised()

    def forget_step(self) -> None:
        """Expect nothing of the last gradients."""
        for watch in (self._use, self._layers):
            if watch is not None:
                watch.forget()

    def close(self) -> None:
        """End all watches."""
        for watch in self._watches:
            watch.remove()
        self._watches, self._use, self._layers = [], None, None

    def _gone(self, names: set[str]) -> None:
        """Forget what residuals hold of gradients that are gone. A unit with gradients that are used keeps all."""
        self._forget([key for key, parameters in self._units.items() if parameters <= names])
        shared = {name for parameters in self._units.values() if not parameters <= names for name in parameters & names}
        if shared and not self._has_warned:
            self._has_warned = True
            warnings.warn(_SHARED.format(", ".join(sorted(shared))), stacklevel=2)


class GradientUse:
    """Warns once if the gradients of a synchronised backward are gone when the next backward begins, and no optimizer
    has used them. It only does so after an optimizer of torch has made a step with these parameters, because others
    cannot be seen. It does nothing if that step was one of a gradient scaler, which may skip steps.

    Gradients that are zeroed in place are seen on the CPU only: elsewhere the host would wait for the device.

    Args:
        parameters: the parameters with residuals.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        watched = list(parameters)
        self._ids = {id(parameter) for parameter in watched}  # no references, which would keep the model alive
        self._sees_optimizer = self._in_step = self._is_unused = False
        trained = [parameter for parameter in watched if parameter.requires_grad]
        self._handles: list[Any] = []
        if not trained:
            return
        smallest = min(trained, key=torch.Tensor.numel)
        self._parameter = weakref.ref(smallest)
        self._handles += [
            register_optimizer_step_pre_hook(weakly(self._before)),
            register_optimizer_step_post_hook(weakly(self._after)),
            smallest.register_hook(weakly(self._look)),  # type: ignore[no-untyped-call]
        ]
        for handle in self._handles:  # nobody need call remove
            weakref.finalize(self, handle.remove).atexit = False

    def synchronised(self) -> None:
        """Expect an optimizer to use the gradients, which a backward has just synchronised with residuals."""
        parameter = self._parameter() if self._handles else None
        has_gradient = parameter is not None and parameter.grad is not None
        self._is_unused = self._sees_optimizer and has_gradient and not self._in_step

    def forget(self) -> None:
        """Expect nothing of the last gradients."""
        self._is_unused = False

    def remove(self) -> None:
        """End the watch."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _before(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Note the begin of an optimizer's step."""
        if not any(groups_with(optimizer, self._ids)):
            return
        if not self._sees_optimizer and in_a_scaler():
            self._ids.clear()
            return
        # some optimizers call backward themselves, several times in a step
        self._sees_optimizer, self._in_step, self._is_unused = True, True, False

    def _after(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Note the end of an optimizer's step."""
        if any(groups_with(optimizer, self._ids)):
            self._in_step = self._is_unused = False

    def _look(self, gradient: torch.Tensor) -> None:
        """Warn if the gradient of the last backward is gone. The one that comes has not been accumulated yet."""
        if not self._is_unused:
            return
        parameter, self._is_unused = self._parameter(), False
        if parameter is None:
            return
        kept = parameter.grad
        if kept is None or (kept.device.type == "cpu" and not kept.any()):
            self._ids.clear()  # hooks of a tensor cannot be removed while they run
            self._sees_optimizer = False
            warnings.warn(_THROWN_AWAY, stacklevel=2)
