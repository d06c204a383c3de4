"""Gradients of single parameters that a training throws away between backward and its optimizer's step."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .hooks import weakly

_LOOKED_AT = 64
"""The elements of a gradient that are looked at before all of it is."""


class LayerUse:
    """Says which gradients are gone when an optimizer makes a step, after a synchronised backward has brought them.

    A gradient is gone if it is ``None``, or zeroed in place; the latter is seen on the CPU only, as elsewhere the host
    would wait for the device. If gradients are cleared that no optimizer of torch has used, while another one has made
    a step, a warning names them once: others cannot be seen.

    Args:
        parameters: the parameters with residuals, by name, which are not kept.
        gone: called with the names, before the step.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], gone: Callable[[set[str]], None]) -> None:
        self._gone = gone
        self._parameters = {name: weakref.ref(parameter) for name, parameter in parameters.items()}
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._unused: dict[str, tuple[weakref.ref[torch.Tensor], int]] = {}  # the gradient and its version
        self._in_step = self._has_stepped = self._has_warned = False
        self._handles: list[Any] = [
            register_optimizer_step_pre_hook(weakly(self._before)),
            register_optimizer_step_post_hook(weakly(self._after)),
        ]
        for handle in self._handles:  # nobody need call remove
            weakref.finalize(self, handle.remove).atexit = False

    def synchronised(self) -> None:
        """Expect an optimizer to use the gradients, which a backward has just synchronised with residuals."""
        if self._in_step:  # the optimizer calls backward itself
            return
        found = {name: parameter.grad for name, each in self._parameters.items() if (parameter := each()) is not None}
        if self._has_stepped and not self._has_warned:
            self._warn(found)
        self._unused = {name: (weakref.ref(grad), grad._version) for name, grad in found.items() if grad is not None}
        self._has_stepped = False

    def forget(self) -> None:
        """Expect nothing of the last gradients."""
        self._unused = {}

    def remove(self) -> None:
        """End the watch."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _before(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Look for gradients that are gone, at the begin of an optimizer's step."""
        named = self._named(optimizer)
        if not named:
            return
        self._in_step = self._has_stepped = True
        gone = {name for name, grad in named.items() if name in self._unused and self._is_gone(name, grad)}
        self._use(named)
        if gone:
            self._gone(gone)

    def _after(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if named := self._named(optimizer):
            self._in_step = False
            self._use(named)

    def _use(self, named: Mapping[str, object]) -> None:
        for name in named:
            self._unused.pop(name, None)

    def _named(self, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor | None]:
        """The gradients of an optimizer's parameters with residuals, by name."""
        every = (parameter for group in optimizer.param_groups for parameter in group["params"])
        return {name: each.grad for each in every if (name := self._names.get(id(each))) is not None}

    def _is_gone(self, name: str, grad: torch.Tensor | None) -> bool:
        if grad is None:
            return True
        if grad._version == self._unused[name][1] or grad.device.type != "cpu" or hasattr(grad, "to_local"):
            return False
        return not grad.reshape(-1)[:_LOOKED_AT].any() and not grad.any()

    def _warn(self, now: Mapping[str, torch.Tensor | None]) -> None:
        """Warn of gradients that have been cleared, of which no optimizer has seen anything."""
        lost = sorted(name for name, (grad, _) in self._unused.items() if name in now and grad() is not now[name])
        if lost:
            self._has_warned = True
            names = ", ".join(lost[:10]) + (", ..." if len(lost) > 10 else "")
            warnings.warn(
                f"gckernels: gradients were synchronised and cleared before an optimizer of torch used them: {names}. "
                "Error feedback keeps a part of them, which later steps apply. If nothing else uses them, freeze these "
                "parameters meanwhile, or let the plan exempt them",
                stacklevel=2,
            )
