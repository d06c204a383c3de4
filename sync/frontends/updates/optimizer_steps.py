"""The steps of an optimizer, counted in the same way on all ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.amp import GradScaler

from ..checks.hooks import weakly
from ..checks.optimizer_checks import in_a_scaler


class OptimizerSteps:
    """Watches an optimizer, and a gradient scaler that skips steps of it on this rank alone. A skipped step counts.

    Args:
        optimizer: the optimizer, of which nothing else is changed.
        scaler: the scaler that calls its steps; ``None`` if there is none. Its method ``step`` is wrapped.
        before: called before each step.
        after: called after each step, and after one that the scaler has skipped.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        scaler: GradScaler | None,
        before: Callable[[], None],
        after: Callable[[], None],
    ) -> None:
        self._before, self._after = weakly(before), weakly(after)
        self._number, self._knows_scaler = 0, scaler is not None
        hooks = (optimizer.register_step_pre_hook, optimizer.register_step_post_hook)
        methods = (weakly(self._on_begin), weakly(self._on_end))
        self._handles: list[Any] = [register(method) for register, method in zip(hooks, methods, strict=True)]
        self._scaler = scaler
        if scaler is not None:
            scaler.step = _counting(scaler, optimizer, weakref.ref(self))  # type: ignore[method-assign]

    def remove(self) -> None:
        """End the watch."""
        for handle in self._handles:
            handle.remove()
        if self._scaler is not None:
            vars(self._scaler).pop("step", None)

    def _on_begin(self, *_: Any) -> None:
        if not self._knows_scaler and not self._number and in_a_scaler():
            raise RuntimeError(
                "gckernels: a GradScaler makes the steps of the optimizer, and may skip one on one rank; give it to "
                "average_updates as grad_scaler, so that a skipped step counts"
            )
        self._before()

    def _on_end(self, *_: Any) -> None:
        self._number += 1
        self._after()

    def count_skipped(self, call: Callable[[], Any]) -> Any:
        """The result of a scaler's step. If that has skipped the step of the optimizer, count it."""
        number = self._number
        result = call()
        if self._number == number:
            self._on_end()
        return result


def _counting(
    scaler: GradScaler, optimizer: torch.optim.Optimizer, weak: weakref.ref[OptimizerSteps]
) -> Callable[..., Any]:
    """The method ``step`` of a scaler, which counts the steps of an optimizer that it skips."""
    step = type(scaler).step

    def counting(stepped: torch.optim.Optimizer, *arguments: Any, **named: Any) -> Any:
        steps = weak()
        if steps is None or stepped is not optimizer:
            return step(scaler, stepped, *arguments, **named)
        return steps.count_skipped(lambda: step(scaler, stepped, *arguments, **named))

    return counting
