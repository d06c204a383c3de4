"""Watches of the optimizers of a training, for the mistakes that its plan makes possible."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.amp import GradScaler

from ..plans.plan import Plan
from .checks.gradient_use import GradientUse
from .checks.optimizer_checks import warn_of_momentum, warn_of_scaler, warn_of_steps_in_backward


class OptimizerWatches:
    """Watches of optimizers, for one plan after the other.

    Args:
        scaler: the gradient scaler of the training; ``None`` if there is none.
    """

    def __init__(self, scaler: GradScaler | None) -> None:
        self._scaler = scaler
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
        for unit in plan.units:
            names = [name for name in unit.parameters if name in parameters]
            if unit.compressor.traits.applies_momentum and unit.feedback:
                momenta |= dict.fromkeys(names, unit.compressor.name)
            if unit.has_residual("worker") and not unit.in_place:
                residuals |= dict.fromkeys(names)
        self._watches.append(warn_of_steps_in_backward(parameters.values()))
        if momenta:
            self._watches.append(warn_of_momentum([parameters[name] for name in momenta], next(iter(momenta.values()))))
        if residuals and self._scaler is None:
            watched = [parameters[name] for name in residuals]
            self._use = GradientUse(watched)
            self._watches += [warn_of_scaler(watched), self._use]

    def synchronised(self) -> None:
        """Expect an optimizer to use the gradients, which a backward has just synchronised with residuals."""
        if self._use is not None:
            self._use.synchronised()

    def forget_step(self) -> None:
        """Expect nothing of the last gradients."""
        if self._use is not None:
            self._use.forget()

    def close(self) -> None:
        """End all watches."""
        for watch in self._watches:
            watch.remove()
        self._watches, self._use = [], None
