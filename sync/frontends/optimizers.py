"""Watches of the optimizers of a training, for the mistakes that its plan makes possible."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.amp import GradScaler
from torch.utils.hooks import RemovableHandle

from ..plans.plan import Plan
from .checks.gradient_use import GradientUse
from .checks.optimizer_checks import residual_parameters, watch_optimizers


class OptimizerWatches:
    """Watches of optimizers, for one plan after the other.

    Args:
        scaler: the gradient scaler of the training; ``None`` if there is none.
    """

    def __init__(self, scaler: GradScaler | None) -> None:
        self._scaler = scaler
        self._watches: Sequence[RemovableHandle] = ()
        self._use: GradientUse | None = None

    def watch(self, plan: Plan, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Watch optimizers for a plan, in place of an earlier one.

        Args:
            plan: the plan.
            parameters: the parameters of the plan, by name.
        """
        self.close()
        self._watches = watch_optimizers(plan, parameters, self._scaler)
        with_residuals = residual_parameters(plan, parameters)
        if self._scaler is None and with_residuals:
            self._use = GradientUse(with_residuals)

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
        if self._use is not None:
            self._use.remove()
        self._watches, self._use = (), None
