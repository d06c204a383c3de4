"""Hooks that mark the moments of a training's steps: forward, every gradient, the optimizer's step; and their clocks.

The clocks of recordings also know for how long a thread has waited for a core.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from gckernels.devices import is_accelerator

from ..communication.clocks import StreamClock
from ..communication.cores import Moment
from ..frontends.checks.hooks import ModelHook
from ..frontends.checks.models import on_accumulated
from ..frontends.ddp.step_ends import hook_gradients, misses_gradients

Mark: TypeAlias = "Moment | torch.Event"


class Clock(Protocol):
    """Marks moments, and later says how far they are apart."""

    def mark(self) -> Mark:
        """A mark of this moment."""

    def seconds(self, first: Mark, second: Mark) -> float:
        """The seconds between two marks. On a GPU the host waits until both are reached."""

    def waiting_s(self, first: Mark, second: Mark) -> float:
        """The seconds of them in which the thread waited for a core that other threads had. On a GPU there are none."""


class HostClock:
    """The clock of a training on the CPU."""

    def mark(self) -> Mark:
        return Moment.now()

    def seconds(self, first: Mark, second: Mark) -> float:
        assert isinstance(first, Moment) and isinstance(second, Moment)
        return second.elapsed_s(first)

    def waiting_s(self, first: Mark, second: Mark) -> float:
        assert isinstance(first, Moment) and isinstance(second, Moment)
        return second.waiting_s(first)


def recording_clock(device: torch.device) -> Clock:
    """The clock of a recording on a device."""
    return StreamClock(device) if is_accelerator(device) else HostClock()


# -------------------------------------------------------------------- steps

NOT_READY = -1.0
"""The ready time of a tensor that a step has given no gradient."""


@dataclass(frozen=True)
class StepTimes:
    """The times of a step on this rank, in seconds."""

    forward_s: float
    """From the end of the step before, or from the start of the first forward, to the start of backward."""
    ready_s: Sequence[float]  # for every parameter, from the start of backward until its gradient is ready
    before_s: float | None
    """From the averaged gradients of the step before to the end of its optimizer; ``None`` if unknown."""


@dataclass(frozen=True)
class WatchedStep:
    """A step on this rank."""

    elapsed: StepTimes
    waiting: StepTimes  # the parts of them in which the thread waited for a core that other threads had


@dataclass(frozen=True)
class StepMarks:
    """The moments of a step on this rank."""

    averaged: Mark | None  # when gradients were averaged in the step before; None if that was not seen
    start: Mark  # the end of the step before, or the start of the first forward
    begun: Mark  # the start of backward
    ready: Sequence[Mark | None]  # for every parameter, when its gradient was ready; None if it got none

    def step(self, clock: Clock) -> WatchedStep:
        """The times between them. On a GPU the host waits until all are reached."""
        return WatchedStep(self._times(clock.seconds), self._times(clock.waiting_s))

    def _times(self, seconds: Callable[[Mark, Mark], float]) -> StepTimes:
        has_before = self.averaged is not None and self.averaged is not self.start
        return StepTimes(
            seconds(self.start, self.begun),
            [NOT_READY if mark is None else seconds(self.begun, mark) for mark in self.ready],
            seconds(self.averaged, self.start) if has_before and self.averaged is not None else None,
        )


class ModelWatch:
    """The hooks on a model. They only look: the step goes on whatever they have seen.

    Args:
        model: a module, or a DDP model.
        parameters: the parameters to watch.
        clock: marks moments.
        ended: called when a backward has ended that has given a parameter its gradient; ``None`` if somebody else knows
            when a step ends.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        parameters: Sequence[torch.nn.Parameter],
        clock: Clock,
        ended: Callable[[], None] | None = None,
    ) -> None:
        self._ddp = model if isinstance(model, DistributedDataParallel) else None
        self._clock, self._ended = clock, ended
        self._ids = {id(parameter): index for index, parameter in enumerate(parameters)}
        self._averaged: Mark | None = None  # the gradients of the step before
        self._start: Mark | None = None  # the end of the step before
        self._begun: Mark | None = None  # the start of backward, of which the end of forward is the first guess
        self._ready: list[Mark | None] = [None] * len(parameters)
        self._used = [False] * len(parameters)
        self._backward: int | None = None  # the backward that has come to an output of the last forward
        self._handles = [
            model.register_forward_pre_hook(ModelHook(self._before_forward)),
            model.register_forward_hook(ModelHook(self._after_forward)),
            _hook_on_optimizers(self),
            *(on_accumulated(parameter, _of_parameter(self, index)) for index, parameter in enumerate(parameters)),
        ]

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def is_used(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter has had a gradient on this rank since the last step ended."""
        index = self._ids.get(id(parameter))
        return index is not None and self._used[index]

    @property
    def marks(self) -> StepMarks | None:
        """The moments of the step that ends now; ``None`` if not all of them have been seen."""
        if self._start is None or self._begun is None or not self._has_gradients:
            return None
        return StepMarks(self._averaged, self._start, self._begun, self._ready)

    @property
    def _has_gradients(self) -> bool:
        return any(mark is not None for mark in self._ready)

    def end_step(self) -> None:
        """Let the next step begin now, when gradients have been averaged."""
        self._start = self._averaged = self._clock.mark()
        self._begun, self._backward = None, None
        self._ready, self._used = [None] * len(self._ready), [False] * len(self._used)

    # ---------------------------------------------------------------- hooks, in the order of a step

    def _before_forward(self, model: torch.nn.Module, arguments: Any) -> None:
        if self._start is None and torch.is_grad_enabled():
            self._start = self._clock.mark()

    def _after_forward(self, model: torch.nn.Module, arguments: Any, output: Any) -> None:
        if not torch.is_grad_enabled() or (self._ddp is not None and not self._ddp.require_backward_grad_sync):
            return
        self._backward = None
        self._begin()
        hook_gradients(output, self._on_output_gradient)

    def _on_output_gradient(self, gradient: torch.Tensor) -> None:
        if self._handles and (running := torch._C._current_graph_task_id()) != self._backward:
            self._begin()
            self._follow(running)

    def _begin(self) -> None:
        """Mark the start of backward, unless another backward has begun with the gradients of this step."""
        if self._ddp is None or not misses_gradients(self._ddp):
            self._begun, self._ready = self._clock.mark(), [None] * len(self._ready)

    def _follow(self, backward: int) -> None:
        self._backward = backward
        if self._ended is not None:
            Variable._execution_engine.queue_callback(self._after_backward)

    def on_gradient(self, index: int) -> None:
        """Mark the time at which a parameter's gradient is ready."""
        if self._backward is None:  # the output has no tensors that hooks could be on
            self._follow(torch._C._current_graph_task_id())
        self._used[index], self._ready[index] = True, self._clock.mark()

    def _after_backward(self) -> None:
        self._backward = None
        if self._ended is not None and self._has_gradients:  # torch.autograd.grad gives no parameter its gradient
            self._ended()

    def after_optimizer(self, optimizer: Optimizer) -> None:
        """Mark the end of a step, if the optimizer has one of the parameters."""
        groups = optimizer.param_groups
        if self._averaged is not None and any(id(each) in self._ids for group in groups for each in group["params"]):
            self._start = self._clock.mark()


# Neither hook keeps the watch, and so the model, alive. The hooks of the model do that.


def _of_parameter(watch: ModelWatch, index: int) -> Callable[[torch.Tensor], None]:
    """A hook of a parameter. The garbage collector does not look into these."""
    reference = weakref.ref(watch)

    def hook(parameter: torch.Tensor) -> None:
        if (watch := reference()) is not None:
            watch.on_gradient(index)

    return hook


def _hook_on_optimizers(watch: ModelWatch) -> RemovableHandle:
    """A hook on all optimizers of this process, until the watch is gone."""
    reference = weakref.ref(watch)

    def hook(optimizer: Optimizer, *_: Any) -> None:
        if (watch := reference()) is not None:
            watch.after_optimizer(optimizer)

    handle = register_optimizer_step_post_hook(hook)
    weakref.finalize(watch, handle.remove).atexit = False
    return handle
