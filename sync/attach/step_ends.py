"""The ends of training steps under DDP, after gradients have been averaged."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

_IS_FINALIZED = "_check_reducer_finalized"
"""A private function of DDP's reducer, which raises while gradients are missing. It was seen in torch 2.13."""


def call_after_backward(function: Callable[[], None]) -> None:
    """Call ``function`` when the running backward has ended, after everything that DDP does then."""
    queue = Variable._execution_engine.queue_callback
    queue(lambda: queue(function))  # DDP may queue its own callback later than the outer one


class StepEnds:
    """Calls a function at the end of each synchronising backward of a DDP model that has no communication hook.

    DDP averages gradients in these backwards: not in those in ``no_sync``, and in none of an evaluation. If DDP
    averages the gradients of one forward in several backwards, the last of them counts. For this the reducer must say
    whether it has averaged everything. If this release of torch cannot ask it, the first backward counts.

    Args:
        ddp_model: the model.
        parameters: the parameters that it averages.
        ended: what is called.
    """

    def __init__(
        self,
        ddp_model: DistributedDataParallel,
        parameters: Iterable[torch.nn.Parameter],
        ended: Callable[[], None],
    ) -> None:
        self._ended, self._model = ended, weakref.ref(ddp_model)
        self._parameters = [weakref.ref(parameter) for parameter in parameters]
        self._is_expected = False  # DDP expects a backward
        self._watches_parameters = False
        self._handles = [ddp_model.register_forward_hook(_AfterForward(self))]

    def remove(self) -> None:
        """End the watch."""
        self._is_expected = False
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def after_forward(self, output: Any) -> None:
        """Expect a backward if DDP does."""
        ddp_model = self._model()
        if ddp_model is None or not (torch.is_grad_enabled() and ddp_model.require_backward_grad_sync):
            return
        self._is_expected = True
        tensors = tensors_in(output)
        for tensor in tensors:
            tensor.register_hook(self.on_gradient)  # type: ignore[no-untyped-call]
        if not tensors and not self._watches_parameters:  # an output of an unknown class
            self._watches_parameters = True
            for parameter in (reference() for reference in self._parameters):
                if parameter is not None and parameter.requires_grad:
                    hook = _on_parameter(weakref.ref(self))
                    self._handles.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    def on_gradient(self, gradient: torch.Tensor) -> None:
        """Wait for the end of the backward that has made a gradient, if one is expected."""
        if self._is_expected:
            self._is_expected = False
            call_after_backward(self._after_backward)

    def _after_backward(self) -> None:
        ddp_model = self._model()
        if ddp_model is None or not self._handles:
            return
        if _misses_gradients(ddp_model):
            self._is_expected = True
        else:
            self._ended()


def _misses_gradients(ddp_model: DistributedDataParallel) -> bool:
    """Whether DDP will average gradients of another backward before its next forward, as far as it can be asked."""
    check = getattr(ddp_model.reducer, _IS_FINALIZED, None)
    try:
        if check is not None:
            check()
    except RuntimeError:
        return True
    return False


class _AfterForward:
    """The forward hook of a model, which is not pickled with it."""

    def __init__(self, ends: StepEnds) -> None:
        self._after_forward = torch.compiler.disable(ends.after_forward)  # type: ignore[no-untyped-call]

    def __call__(self, module: torch.nn.Module, arguments: Any, output: Any) -> None:
        self._after_forward(output)

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return _NoHook, ()


class _NoHook:
    """A forward hook that does nothing."""

    def __call__(self, module: torch.nn.Module, arguments: Any, output: Any) -> None:
        pass


def _on_parameter(reference: weakref.ref[StepEnds]) -> Callable[[torch.Tensor], None]:
    """The hook of a parameter, into which the garbage collector does not look."""

    def hook(parameter: torch.Tensor) -> None:
        if (ends := reference()) is not None:
            ends.on_gradient(parameter)

    return hook


def tensors_in(output: object) -> list[torch.Tensor]:
    """The tensors with a gradient function in the output of a module: in lists, tuples, dicts and dataclasses."""
    if isinstance(output, torch.Tensor):
        return [output] if output.requires_grad else []
    if isinstance(output, Mapping):
        return [tensor for each in output.values() for tensor in tensors_in(each)]
    if isinstance(output, list | tuple):
        return [tensor for each in output for tensor in tensors_in(each)]
    if hasattr(output, "__dataclass_fields__"):
        return [tensor for name in output.__dataclass_fields__ for tensor in tensors_in(getattr(output, name))]
    return []
