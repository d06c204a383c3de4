"""The communication hook of a DDP model, and its way back to plain DDP.

DDP takes one hook for the life of its reducer and never takes it off. So a model has one :class:`CommHook`, which
attachments use one after the other. When the last one is closed, the reducer is rebuilt in the next forward that
synchronises. Only then is no backward of an earlier forward expected, so no gradient can miss its average in silence.

A step begins with the first bucket since the last end, and ends when DDP has averaged all gradients. The numbers of
buckets say neither: DDP can leave any of them out, and in the first step of a static graph it gives all the same one.
"""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from ..engine.failures import Outcome, failed_future
from .step_ends import call_after_backward, in_backward, in_join, misses_gradients

_CLOSED = "gckernels: the attachment of this model was closed between forward and backward; run forward again"
_CLOSED_FOR_EVER = (
    "gckernels: the attachment of this model is closed, and this release of torch does not give plain DDP back; attach "
    "again, or wrap the module in a new DistributedDataParallel"
)
# the way by which DDP builds its reducer when a model is unpickled, as it is in torch 2.11 to 2.14
_BUILD = ("_build_params_for_reducer", "_build_debug_param_to_name_mapping", "_ddp_init_helper")
_BUILD_PARAMETERS = ("parameters", "expect_sparse_gradient", "param_to_name_mapping", "static_graph")


@dataclass(frozen=True)
class Handler:
    """The functions that handle the steps of a model with a communication hook.

    Attributes:
        synchronise: returns the future of a bucket. It is told whether the bucket is the first one of its step.
        before_waiting: called when DDP will wait for the futures of the step; perhaps also before.
        ended: called when DDP has averaged all gradients. All ranks are here together.
        follow: returns the future of a bucket that takes part in a step of the other ranks, because this rank has no
            inputs left in DDP's ``join()``. It is told whether the bucket is the first and the last one of that step,
            after which no other function is called.
    """

    synchronise: Callable[[GradBucket, bool], Future[Outcome]]
    before_waiting: Callable[[], None]
    ended: Callable[[], None]
    follow: Callable[[GradBucket, bool, bool], Future[Outcome]]


class CommHook:
    """The communication hook of a DDP model.

    Args:
        ddp_model: the model.
        parameters: the parameters that it averages.

    Attributes:
        handler: handles the steps; ``None`` while no attachment is open.
    """

    def __init__(self, ddp_model: DistributedDataParallel, parameters: Collection[torch.nn.Parameter]) -> None:
        self.handler: Handler | None = None
        self._model = weakref.ref(ddp_model)
        self._parameters = [weakref.ref(parameter) for parameter in parameters]
        self._has_begun = False  # a step
        self._restore: Any = None  # the handle of a forward hook

    # without annotations, because DDP refuses postponed ones, which are text
    def run(self, _, bucket):  # type: ignore[no-untyped-def]
        """Synchronise a bucket. DDP calls this."""
        handler = self.handler
        if handler is None:
            return failed_future(RuntimeError(_CLOSED_FOR_EVER if self._restore is None else _CLOSED))
        is_first, self._has_begun = not self._has_begun, True
        ddp_model = self._model()
        if ddp_model is not None and in_join(ddp_model) and not in_backward():
            self._has_begun = not bucket.is_last()  # a rank without inputs hands over all buckets in order
            return handler.follow(bucket, is_first, bucket.is_last())
        # DDP queues its own callback behind this one, in the backward that has made the last gradient
        call_after_backward(self._look_for_end, first=handler.before_waiting)
        return handler.synchronise(bucket, is_first)

    def _look_for_end(self) -> None:
        """End the step if DDP has: there are several backwards in a step if checkpoints recompute activations in a
        backward inside of it, or if the gradients of one forward come in parts."""
        ddp_model = self._model()
        if self._has_begun and self.handler is not None and ddp_model is not None and not misses_gradients(ddp_model):
            self._has_begun = False
            self.handler.ended()

    def take(self, handler: Handler) -> None:
        """Let ``handler`` handle the steps from now on."""
        self.handler, self._has_begun = handler, False
        if self._restore is not None:
            self._restore.remove()
            self._restore = None

    def release(self, ddp_model: DistributedDataParallel) -> None:
        """Let nobody handle the steps."""
        self.handler = None
        if can_rebuild(ddp_model):
            # a compiled model must not trace it; DDP has imported the compiler already
            restore = torch.compiler.disable(self._before_forward)  # type: ignore[no-untyped-call]
            self._restore = ddp_model.register_forward_pre_hook(restore)

    def _before_forward(self, ddp_model: Any, arguments: Any) -> None:
        if torch.is_grad_enabled() and ddp_model.require_backward_grad_sync:
            self._restore.remove()
            del _hooks[ddp_model]
            ddp_model._comm_hooks = [each for each in ddp_model._comm_hooks if each[0] != self.run]
            averaged = {id(parameter) for reference in self._parameters if (parameter := reference()) is not None}
            rebuild(ddp_model, averaged)


_hooks: weakref.WeakKeyDictionary[DistributedDataParallel, CommHook] = weakref.WeakKeyDictionary()


def comm_hook(ddp_model: DistributedDataParallel) -> CommHook | None:
    """The hook that :func:`use_comm_hook` has registered; ``None`` if the model has none."""
    return _hooks.get(ddp_model)


def use_comm_hook(
    ddp_model: DistributedDataParallel, parameters: Collection[torch.nn.Parameter], handler: Handler
) -> None:
    """Let ``handler`` handle the model's steps, by the hook that it has already, or else by a new one.

    Args:
        ddp_model: the model, between two steps.
        parameters: the parameters that it averages.
        handler: handles the steps.
    """
    hook = comm_hook(ddp_model)
    if hook is None:
        hook = CommHook(ddp_model, parameters)
        ddp_model.register_comm_hook(None, hook.run)
        _hooks[ddp_model] = hook
    hook.take(handler)


def release_comm_hook(ddp_model: DistributedDataParallel) -> None:
    """End the use of a model's hook. If torch allows it, the model is plain DDP from its next forward on; otherwise its
    next backward raises."""
    if (hook := comm_hook(ddp_model)) is not None:
        hook.release(ddp_model)


def will_rebuild_buckets(ddp_model: Any) -> bool:
    """Whether DDP still has its first buckets, one with all gradients, and will rebuild them when a backward has shown
    their order. It is the same on all ranks, which rebuild their buckets together."""
    rebuilds = ddp_model.static_graph or not ddp_model.find_unused_parameters
    return rebuilds and not getattr(ddp_model, "_has_rebuilt_buckets", False)


def can_rebuild(ddp_model: Any) -> bool:
    """Whether this release of torch has the private functions that build a reducer."""
    if not all(hasattr(ddp_model, name) for name in (*_BUILD, "_comm_hooks", "_has_rebuilt_buckets", "logger")):
        return False
    if not all(hasattr(ddp_model.reducer, name) for name in ("_remove_autograd_hooks", "_set_static_graph")):
        return False
    return tuple(inspect.signature(ddp_model._ddp_init_helper).parameters) == _BUILD_PARAMETERS


def rebuild(ddp_model: Any, averaged: Collection[int]) -> None:
    """Give a DDP model a new reducer, without a hook. Not collective.

    Args:
        ddp_model: the model, between two steps.
        averaged: ids of the parameters that the reducer averages, whether they are frozen at present or not.
    """
    ddp_model.reducer._remove_autograd_hooks()
    with _requiring_gradients(ddp_model.module, averaged):
        parameters, are_sparse = ddp_model._build_params_for_reducer()
        names = ddp_model._build_debug_param_to_name_mapping(parameters)
        ddp_model._ddp_init_helper(parameters, are_sparse, names, ddp_model.static_graph)
    ddp_model._has_rebuilt_buckets = False
    if ddp_model.static_graph:
        ddp_model.reducer._set_static_graph()
        ddp_model.logger._set_static_graph()
        ddp_model._static_graph_delay_allreduce_enqueued = False  # its first backward ends differently


@contextlib.contextmanager
def _requiring_gradients(module: torch.nn.Module, wanted: Collection[int]) -> Iterator[None]:
    """A context in which exactly the parameters with the ids ``wanted`` require gradients."""
    changed = [parameter for parameter in module.parameters() if parameter.requires_grad != (id(parameter) in wanted)]
    for parameter in changed:
        parameter.requires_grad_(not parameter.requires_grad)
    try:
        yield
    finally:
        for parameter in changed:
            parameter.requires_grad_(not parameter.requires_grad)
