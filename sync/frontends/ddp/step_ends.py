"""The ends of training steps under DDP, after gradients have been averaged.

With ``require_manual_backward_finalization``, which torch has from 2.15 on, DDP waits for its buckets only when the
training calls ``finalize_backward()``: after backward, or in one of its hooks. DDP has no hook for that, so the
function is replaced by one that does the same and calls those who follow a model.
"""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from ..checks.hooks import ModelHook, weakly
from ..checks.models import on_accumulated

_IS_FINALIZED = "_check_reducer_finalized"
"""A private function of DDP's reducer, which raises while gradients are missing. It was seen in torch 2.13."""
_WILL_RUN = getattr(torch._C, "_will_engine_execute_node", lambda node: False)
"""A function that tells whether the running backward comes to a node; checkpoints of torch call it, too."""

_NAME, _REQUIRED = "finalize_backward", "require_manual_backward_finalization"
_Functions: TypeAlias = "tuple[Callable[[], None], Callable[[], None]]"
_followers: weakref.WeakKeyDictionary[Any, OrderedDict[int, _Functions]] = weakref.WeakKeyDictionary()
_Gradient: TypeAlias = "tuple[torch.Tensor | None, int]"
"""The gradient of a parameter and its version."""


def call_after_backward(function: Callable[[], None], first: Callable[[], None] | None = None) -> None:
    """Call ``function`` when the running backward has ended, after everything that DDP does then.

    Args:
        function: the function.
        first: a function to call before that, if DDP has not yet queued what it does.
    """
    queue = Variable._execution_engine.queue_callback

    def ended() -> None:
        if first is not None:
            first()
        queue(function)  # DDP may queue its own callback later than the outer one

    queue(ended)


def in_backward() -> bool:
    """Whether a backward runs in the calling thread."""
    try:
        Variable._execution_engine.queue_callback(lambda: None)
    except RuntimeError:
        return False
    return True


def in_join(ddp_model: DistributedDataParallel) -> bool:
    """Whether the model is in DDP's ``join()``, or has been: there a rank may have no inputs for a step."""
    return bool(ddp_model._join_config.enable)


def join_of(ddp_model: DistributedDataParallel) -> object:
    """An object that stays the same until the model comes into another ``join()``."""
    return ddp_model._join_config


def follow_finalization(
    ddp_model: DistributedDataParallel, before: Callable[[], None], after: Callable[[], None]
) -> RemovableHandle:
    """Call functions around each ``finalize_backward()`` of a model; without effect in releases that lack it.

    Args:
        ddp_model: the model.
        before: called before DDP waits for its buckets.
        after: called when DDP has averaged all gradients.

    Returns:
        A handle whose ``remove`` ends that.
    """
    _replace()
    functions = _followers.setdefault(ddp_model, OrderedDict())
    handle = RemovableHandle(functions)
    functions[handle.id] = before, after
    return handle


@functools.cache
def _replace() -> None:
    original = getattr(DistributedDataParallel, _NAME, None)
    if original is None:
        return

    @functools.wraps(original)
    def finalize_backward(ddp_model: DistributedDataParallel) -> None:
        functions = list(_followers.get(ddp_model, {}).values())
        for before, _ in functions:
            before()
        original(ddp_model)
        for _, after in functions:
            after()

    setattr(DistributedDataParallel, _NAME, finalize_backward)


def keep_manual(ddp_model: Any) -> None:
    """Tell the new reducer of a model whether the training declares the ends of backwards."""
    if getattr(ddp_model, _REQUIRED, False):
        setattr(ddp_model, _REQUIRED, True)


class StepEnds:
    """Calls a function at the end of each synchronising backward of a DDP model that has no communication hook.

    DDP averages gradients in these backwards: not in those in ``no_sync``, and in none of an evaluation. If DDP
    averages the gradients of one forward in several backwards, the last of them counts. For this the reducer must say
    whether it has averaged everything. If this release of torch cannot ask it, the first backward counts. A call of
    ``torch.autograd.grad``, as for a penalty on gradients, is no backward: no parameter gets a gradient in it.

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
        self._is_running = False  # the backward that was expected
        self._before: list[_Gradient] | None = None  # gradients before a backward that may be none
        self._node: Any = None  # a parameter with this one had a gradient in the last backward
        self._watches_parameters = False
        self._handles = [
            ddp_model.register_forward_hook(ModelHook(self._after_forward)),
            follow_finalization(ddp_model, lambda: None, self._finalized),
        ]

    def remove(self) -> None:
        """End the watch."""
        self._is_expected, self._is_running, self._node = False, False, None
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _after_forward(self, ddp_model: Any, arguments: Any, output: Any) -> None:
        """Expect a backward if DDP does."""
        if not (torch.is_grad_enabled() and ddp_model.require_backward_grad_sync):
            return
        self._is_expected = True
        if not hook_gradients(output, self.on_gradient) and not self._watches_parameters:
            self._watches_parameters = True
            for parameter in (reference() for reference in self._parameters):
                if parameter is not None:
                    self._handles.append(on_accumulated(parameter, weakly(self.on_gradient)))

    def on_gradient(self, gradient: torch.Tensor) -> None:
        """Wait for the end of the backward that has made a gradient, if one is expected."""
        if self._is_expected:
            self._is_expected, self._is_running = False, True
            self._before = None if self._comes_to_parameters() else self._gradients()
            call_after_backward(self._after_backward)

    def _comes_to_parameters(self) -> bool:
        """Whether the running backward will give a parameter its gradient. It is not seen if that happens in a backward
        inside of it, which recomputes activations."""
        if self._node is not None and _will_run(self._node):
            return True
        for reference in self._parameters:
            if (parameter := reference()) is not None and parameter.requires_grad:
                node = torch.autograd.graph.get_gradient_edge(parameter).node
                if _will_run(node):
                    self._node = node
                    return True
        return False

    def _gradients(self) -> list[_Gradient]:
        gradients = [None if (each := reference()) is None else each.grad for reference in self._parameters]
        return [(each, 0 if each is None else each._version) for each in gradients]

    def _after_backward(self) -> None:
        ddp_model, before = self._model(), self._before
        self._before = None
        if ddp_model is None or not self._is_running:
            return
        self._is_running = False
        if (before is not None and _are_same(before, self._gradients())) or misses_gradients(ddp_model):
            self._is_expected = True
        else:
            self._ended()

    def _finalized(self) -> None:
        """End the step that the training itself has declared to be over."""
        self._is_expected, self._is_running = False, False
        self._ended()


def _will_run(node: Any) -> bool:
    try:
        return bool(_WILL_RUN(node))
    except RuntimeError:  # torch.autograd.grad has been called for this parameter
        return False


def _are_same(before: Sequence[_Gradient], after: Sequence[_Gradient]) -> bool:
    return all(
        first is second and version == later for (first, version), (second, later) in zip(before, after, strict=True)
    )


def misses_gradients(ddp_model: DistributedDataParallel) -> bool:
    """Whether DDP will average gradients of another backward before its next forward, as far as it can be asked."""
    check = getattr(ddp_model.reducer, _IS_FINALIZED, None)
    try:
        if check is not None:
            check()
    except RuntimeError:
        return True
    return False


def hook_gradients(output: Any, hook: Callable[[torch.Tensor], None]) -> bool:
    """Whether there are tensors with a gradient function in the output of a module; ``hook`` will be called with their
    gradients. Parameters, which a model may return as well, are left out: they outlive the step, and so would the hook.

    Args:
        output: the output. Tensors in lists, tuples, dicts and dataclasses are found.
        hook: the hook, which each tensor has at most once.
    """
    tensors = _tensors_in(output)
    for tensor in tensors:
        if hook not in (tensor._backward_hooks or {}).values():
            tensor.register_hook(hook)  # type: ignore[no-untyped-call]
    return bool(tensors)


def _tensors_in(output: object) -> list[torch.Tensor]:
    """The tensors with a gradient function in the output of a module."""
    if isinstance(output, torch.Tensor):
        return [] if output.grad_fn is None else [output]
    if isinstance(output, Mapping):
        return [tensor for each in output.values() for tensor in _tensors_in(each)]
    if isinstance(output, list | tuple):
        return [tensor for each in output for tensor in _tensors_in(each)]
    if hasattr(output, "__dataclass_fields__"):
        return [tensor for name in output.__dataclass_fields__ for tensor in _tensors_in(getattr(output, name))]
    return []
