"""The warning of gradients that are synchronised with residuals and then thrown away."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .optimizer_checks import groups_with, in_a_scaler

_THROWN_AWAY = (
    "gckernels: the gradients of a synchronised backward were cleared before an optimizer used them. Error feedback "
    "keeps a part of them, which the next steps apply. Freeze the parameters in such a backward, or put it under "
    "no_sync(); exact() of the attachment averages gradients and leaves residuals alone, and discard_step() takes the "
    "last step back"
)


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
        use = weakref.ref(self)

        def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if (this := use()) is not None and this._has(optimizer):
                this._begin_step()

        def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if (this := use()) is not None and this._has(optimizer):
                this._in_step = this._is_unused = False

        def on_gradient(gradient: torch.Tensor) -> None:
            if (this := use()) is not None and this._is_unused:
                this._look()

        self._handles += [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
        self._handles.append(smallest.register_hook(on_gradient))  # type: ignore[no-untyped-call]
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

    def _has(self, optimizer: torch.optim.Optimizer) -> bool:
        return any(groups_with(optimizer, self._ids))

    def _begin_step(self) -> None:
        if not self._sees_optimizer and in_a_scaler():
            self._ids.clear()
            return
        # some optimizers call backward themselves, several times in a step
        self._sees_optimizer, self._in_step, self._is_unused = True, True, False

    def _look(self) -> None:
        """Warn if the gradient of the last backward is gone. The one that comes has not been accumulated yet."""
        parameter, self._is_unused = self._parameter(), False
        if parameter is None:
            return
        gradient = parameter.grad
        if gradient is None or (gradient.device.type == "cpu" and not gradient.any()):
            self._ids.clear()  # hooks of a tensor cannot be removed while they run
            self._sees_optimizer = False
            warnings.warn(_THROWN_AWAY, stacklevel=2)
