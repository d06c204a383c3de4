"""Hooks that watch the steps of a training: forward, every gradient, the end of backward, the optimizer's step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Protocol

import torch
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from ..attach.model_hooks import ModelHook
from ..attach.reducer import rebuild
from ..attach.step_ends import call_after_backward, hook_gradients, misses_gradients
from .averaging import LateAveraging
from .clocks import Clock, Mark

NOT_READY = -1.0
"""The ready time of a tensor that a step has given no gradient."""


@dataclass(frozen=True)
class StepTimes:
    """The times of a step on this rank, in seconds.

    Attributes:
        forward_s: from the end of the step before, or from the start of the first forward, to the start of backward.
        ready_s: for every parameter, from the start of backward until its gradient is ready.
        before_s: from the averaged gradients of the step before to the end of its optimizer; ``None`` if unknown.
    """

    forward_s: float
    ready_s: Sequence[float]
    before_s: float | None


@dataclass(frozen=True)
class WatchedStep:
    """A step on this rank.

    Attributes:
        elapsed: its times.
        waiting: the parts of them in which the thread waited for a core that other threads had.
    """

    elapsed: StepTimes
    waiting: StepTimes


class Listener(Protocol):
    """Receives what a watch sees."""

    def on_forward(self) -> bool:
        """Called before a forward that a synchronising backward may follow. Returns whether the step is measured: then
        DDP does not synchronise it."""

    def on_backward(self, step: WatchedStep | None) -> None:
        """Called when the backward of a synchronising step ends, before its gradients are averaged if it is measured.
        A step of a DDP model that is not measured has no times."""


class _State(Enum):
    IDLE = auto()
    FORWARD = auto()
    EXPECTS_BACKWARD = auto()
    BACKWARD = auto()


class Watch:
    """The hooks on a model.

    Args:
        model: a module, or a DDP model.
        parameters: the parameters to watch, by name.
        clock: measures.
        listener: receives the steps.

    Attributes:
        averaging: DDP's buckets; ``None`` before the first measured step, and without DDP.
        has_parts: whether a step that was not measured has been averaged by DDP in several backwards of one forward.
    """

    def __init__(
        self, model: torch.nn.Module, parameters: Mapping[str, torch.nn.Parameter], clock: Clock, listener: Listener
    ) -> None:
        self.averaging: LateAveraging | None = None
        self.has_parts = False
        self._model, self._parameters, self._clock, self._listener = model, parameters, clock, listener
        self._ddp = model if isinstance(model, DistributedDataParallel) else None
        self._ids = {id(parameter) for parameter in parameters.values()}
        self._state, self._is_measured, self._is_ending = _State.IDLE, False, False
        self._notes_used = False  # DDP's reducer has noted parameters as used in steps that it has not averaged
        self._from: Mark | None = None  # the end of the step before
        self._averaged: Mark | None = None  # the end of the backward before, if that did not communicate
        self._begun: Mark | None = None
        self._ready: list[Mark | None] = [None] * len(parameters)
        self._used: set[int] = set()
        self._handles: list[RemovableHandle] = [
            model.register_forward_pre_hook(ModelHook(self._before_forward)),
            # first, so that others see again that gradients are averaged when backward ends
            model.register_forward_hook(ModelHook(self._after_forward), always_call=True, prepend=True),
            _hook_on_optimizers(self),
        ]
        for index, parameter in enumerate(parameters.values()):
            if parameter.requires_grad:
                hook = _of_parameter(self, index)
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    @property
    def is_active(self) -> bool:
        """Whether there are hooks."""
        return bool(self._handles)

    def end(self) -> None:
        """Remove the hooks. If the backward of a measured step is still to come, they stay until it has ended, because
        its gradients must be averaged, or until another forward begins."""
        if (self._is_measured or self._notes_used) and self._state is not _State.IDLE:
            self._is_ending = True
            return
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.averaging = None
        if self._notes_used:
            self._notes_used = False
            if self._ddp is not None and not self._ddp._comm_hooks:  # somebody else's hook would be gone
                rebuild(self._ddp, self._ids)

    def mark_averaged(self) -> None:
        """Let the next step begin now, if gradients have been averaged by somebody else since backward ended."""
        if self._from is not None:
            self._from = self._clock.mark()
            self._averaged = self._from if self._averaged is not None else None

    # ---------------------------------------------------------------- hooks, in the order of a step

    def _before_forward(self, model: torch.nn.Module, arguments: Any) -> None:
        if not torch.is_grad_enabled():
            return
        self._state, self._is_measured = _State.IDLE, False  # the backward before may have failed
        if self._is_ending:
            self.end()
            return
        if self._ddp is not None and not self._ddp.require_backward_grad_sync:
            return  # in no_sync
        is_measured = self._listener.on_forward()
        if self._from is None:
            self._from = self._clock.mark()
        self._state, self._is_measured = _State.FORWARD, is_measured
        if self._ddp is not None and is_measured:
            self._ddp.require_backward_grad_sync = False
            # as in no_sync, after which it would take them for used in the next step, too
            self._notes_used = self._ddp.find_unused_parameters and not self._ddp.static_graph

    def _after_forward(self, model: torch.nn.Module, arguments: Any, output: Any) -> None:
        if self._state is not _State.FORWARD:
            return
        if self._ddp is not None and self._is_measured:
            self._ddp.require_backward_grad_sync = True
            self._ddp.require_forward_param_sync = True  # as after a forward that synchronises
            if self.averaging is None:
                self.averaging = LateAveraging(self._ddp, self._parameters)
        self._state, self._begun = _State.EXPECTS_BACKWARD, self._clock.mark()
        hook_gradients(output, self._on_output_gradient)

    def _on_output_gradient(self, gradient: torch.Tensor) -> None:
        if self._state is _State.EXPECTS_BACKWARD:
            self._begun = self._clock.mark()
            self._begin_backward()

    def _begin_backward(self) -> None:
        self._state = _State.BACKWARD
        self._ready = [None] * len(self._parameters)
        Variable._execution_engine.queue_callback(self._after_backward)
        if self._ddp is not None and not self._is_measured and not self.has_parts:
            call_after_backward(self._look_for_parts)

    def _look_for_parts(self) -> None:
        if self._ddp is not None:
            self.has_parts = misses_gradients(self._ddp)

    def on_gradient(self, index: int, parameter: torch.nn.Parameter) -> None:
        """Mark the time at which a parameter's gradient is ready."""
        self._used.add(id(parameter))
        if self._state is _State.EXPECTS_BACKWARD:  # the output has no tensors that hooks could be on
            self._begin_backward()
        if self._state is _State.BACKWARD:
            if self._is_measured and self.averaging is not None:
                self.averaging.collect(parameter)
            self._ready[index] = self._clock.mark()

    def _after_backward(self) -> None:
        if self._state is not _State.BACKWARD:
            return
        if all(mark is None for mark in self._ready):  # torch.autograd.grad gives no parameter its gradient
            self._state = _State.EXPECTS_BACKWARD
            return
        self._state = _State.IDLE
        used, self._used = self._used, set()
        averaging = self.averaging if self._is_measured else None  # the listener may end the watch
        try:
            if self._is_measured or self._ddp is None:
                self._listener.on_backward(self._watched_step())
            else:
                self._listener.on_backward(None)
        finally:
            if averaging is not None:
                averaging.average(used)
        knows_average = self._is_measured or self._ddp is None
        self._from = self._clock.mark()
        self._averaged = self._from if knows_average else None
        if self._is_ending:
            self.end()

    def after_optimizer(self, optimizer: Optimizer) -> None:
        """Mark the end of a step, if the optimizer has one of the parameters."""
        groups = optimizer.param_groups
        if self._from is not None and any(id(each) in self._ids for group in groups for each in group["params"]):
            self._from = self._clock.mark()

    def _watched_step(self) -> WatchedStep:
        return WatchedStep(self._times(self._clock.seconds), self._times(self._clock.waiting_s))

    def _times(self, seconds: Callable[[Mark, Mark], float]) -> StepTimes:
        begun, start = self._begun, self._from
        assert begun is not None and start is not None
        has_before = self._averaged is not None and self._averaged is not start
        return StepTimes(
            seconds(start, begun),
            [NOT_READY if mark is None else seconds(begun, mark) for mark in self._ready],
            seconds(self._averaged, start) if has_before and self._averaged is not None else None,
        )


# Neither hook keeps the watch, and so the model, alive. The hooks of the model do that.


def _of_parameter(watch: Watch, index: int) -> Callable[[torch.nn.Parameter], None]:
    """A hook of a parameter. The garbage collector does not look into these."""
    reference = weakref.ref(watch)

    def hook(parameter: torch.nn.Parameter) -> None:
        if (watch := reference()) is not None:
            watch.on_gradient(index, parameter)

    return hook


def _hook_on_optimizers(watch: Watch) -> RemovableHandle:
    """A hook on all optimizers of this process, until the watch is gone."""
    reference = weakref.ref(watch)

    def hook(optimizer: Optimizer, *_: Any) -> None:
        if (watch := reference()) is not None:
            watch.after_optimizer(optimizer)

    handle = register_optimizer_step_post_hook(hook)
    weakref.finalize(watch, handle.remove).atexit = False
    return handle
