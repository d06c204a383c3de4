"""The communication hook of a DDP model, and its way back to plain DDP.

DDP takes one hook for the life of its reducer and never takes it off. So a model has one :class:`CommHook`, which
attachments use one after the other. While nobody uses it, it averages as DDP does, so no gradient can miss its average.
The reducer is rebuilt when a step has ended. Only then does it remember nothing: before, it may expect a backward, or
know of parameters that were used in ``no_sync``.

A step begins with the first bucket since the last end, and ends when DDP has averaged all gradients. The numbers of
buckets say neither: DDP can leave any of them out, and in the first step of a static graph it gives all the same one.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from .averages import Averages, Handler, will_rebuild_buckets
from .step_ends import (
    call_after_backward,
    follow_finalization,
    in_backward,
    in_join,
    keep_manual,
    misses_gradients,
)

# the way by which DDP builds its reducer when a model is unpickled, as it is in torch 2.11 to 2.15
_BUILD = ("_build_params_for_reducer", "_build_debug_param_to_name_mapping", "_ddp_init_helper")
_BUILD_PARAMETERS = ("parameters", "expect_sparse_gradient", "param_to_name_mapping", "static_graph")
_ASSIGN = "_compute_bucket_assignment_by_size"
"""A private function by which DDP assigns parameters to its first buckets."""


class CommHook:
    """The communication hook of a DDP model, which averages ``parameters``."""

    def __init__(self, ddp_model: DistributedDataParallel, parameters: Collection[torch.nn.Parameter]) -> None:
        self._model = weakref.ref(ddp_model)
        self._parameters = [weakref.ref(parameter) for parameter in parameters]
        self._handler: Handler = Averages(ddp_model)
        self._has_begun = False  # a step
        self._buckets: list[list[int]] = []  # the ids of the parameters of each bucket of DDP, in order
        self._knows_buckets = False  # they will be the same in the next step
        self._is_released = False
        self._following = follow_finalization(ddp_model, self._before_waiting, self._finalized)

    # without annotations, because DDP refuses postponed ones, which are text
    def run(self, _, bucket):  # type: ignore[no-untyped-def]
        """Synchronise a bucket. DDP calls this."""
        handler, ddp_model = self._handler, self._model()
        is_first, self._has_begun = not self._has_begun, True
        if not self._knows_buckets:
            self._buckets = [*([] if is_first else self._buckets), list(map(id, bucket.parameters()))]
        if ddp_model is not None and in_join(ddp_model) and not in_backward():
            self._has_begun = not bucket.is_last()  # a rank without inputs hands over all buckets in order
            return handler.follow(bucket, is_first, bucket.is_last())
        # DDP queues its own callback behind this one, in the backward that has made the last gradient
        call_after_backward(self._look_for_end, first=handler.before_waiting)
        return handler.synchronise(bucket, is_first)

    def _before_waiting(self) -> None:
        if self._has_begun:
            self._handler.before_waiting()

    def _look_for_end(self) -> None:
        """End the step if DDP has. There are several backwards in a step if checkpoints recompute activations in a
        backward inside of it, or if the gradients of one forward come in parts."""
        ddp_model = self._model()
        if self._has_begun and ddp_model is not None and not misses_gradients(ddp_model):
            self._end(ddp_model)
            self._give_back(ddp_model)

    def _finalized(self) -> None:
        """End the step that the training itself has declared to be over. A backward that still runs needs the reducer
        of its gradients until it has ended."""
        ddp_model = self._model()
        if self._has_begun and ddp_model is not None:
            self._end(ddp_model)
            if in_backward():
                call_after_backward(functools.partial(self._give_back, ddp_model))
            else:
                self._give_back(ddp_model)

    def _end(self, ddp_model: DistributedDataParallel) -> None:
        self._has_begun, self._knows_buckets = False, not will_rebuild_buckets(ddp_model)
        self._handler.ended()

    def _give_back(self, ddp_model: DistributedDataParallel) -> None:
        """Let DDP average by itself between two steps, if nobody uses the hook."""
        # in join() a rank without inputs has no such end, and must find the hook that the others have
        if self._is_released and not in_join(ddp_model) and can_rebuild(ddp_model):
            self._following.remove()
            del _hooks[ddp_model]
            averaged = {id(parameter) for reference in self._parameters if (parameter := reference()) is not None}
            rebuild(ddp_model, averaged, self._buckets if self._knows_buckets else [])

    def take(self, handler: Handler) -> None:
        """Let ``handler`` handle the steps from now on."""
        self._handler, self._has_begun, self._is_released = handler, False, False

    def release(self, ddp_model: DistributedDataParallel) -> None:
        """Average as DDP does from now on, and let DDP do it itself from the end of a step on."""
        self._handler, self._is_released = Averages(ddp_model), True


_hooks: weakref.WeakKeyDictionary[DistributedDataParallel, CommHook] = weakref.WeakKeyDictionary()


def comm_hook(ddp_model: DistributedDataParallel) -> CommHook | None:
    """The hook that :func:`use_comm_hook` has registered; ``None`` if the model has none."""
    return _hooks.get(ddp_model)


def use_comm_hook(
    ddp_model: DistributedDataParallel, parameters: Collection[torch.nn.Parameter], handler: Handler
) -> None:
    """Let ``handler`` handle a model's steps from now on, by the hook that it has already, or else by a new one. The
    model is between two steps, and averages ``parameters``."""
    hook = comm_hook(ddp_model)
    if hook is None:
        hook = CommHook(ddp_model, parameters)
        ddp_model.register_comm_hook(None, hook.run)
        getattr(ddp_model, "_comm_hooks", [None]).pop()  # copies of the model have no hook
        _hooks[ddp_model] = hook
    hook.take(handler)


def release_comm_hook(ddp_model: DistributedDataParallel) -> None:
    """End the use of a model's hook, which averages as DDP does from now on. If torch allows it, the model is plain DDP
    from the next end of a step outside of ``join()`` on, which may be the one that is running."""
    if (hook := comm_hook(ddp_model)) is not None:
        hook.release(ddp_model)


def can_rebuild(ddp_model: Any) -> bool:
    """Whether this release of torch has the private functions that build a reducer."""
    if not all(hasattr(ddp_model, name) for name in (*_BUILD, "_has_rebuilt_buckets", "logger")):
        return False
    if not all(hasattr(ddp_model.reducer, name) for name in ("_remove_autograd_hooks", "_set_static_graph")):
        return False
    return tuple(inspect.signature(ddp_model._ddp_init_helper).parameters) == _BUILD_PARAMETERS


def rebuild(ddp_model: Any, averaged: Collection[int], buckets: Sequence[Sequence[int]] = ()) -> None:
    """Give a DDP model a new reducer, without a hook. Not collective.

    Args:
        ddp_model: the model, between two steps.
        averaged: ids of the parameters that the reducer averages, whether they are frozen at present or not.
        buckets: ids of the parameters of each of its first buckets, if these are known.
    """
    ddp_model.reducer._remove_autograd_hooks()
    with _requiring_gradients(ddp_model.module, averaged):
        parameters, are_sparse = ddp_model._build_params_for_reducer()
        names = ddp_model._build_debug_param_to_name_mapping(parameters)
        with _making_buckets(parameters, buckets):
            ddp_model._ddp_init_helper(parameters, are_sparse, names, ddp_model.static_graph)
    keep_manual(ddp_model)
    ddp_model._has_rebuilt_buckets = False
    if ddp_model.static_graph:
        ddp_model.reducer._set_static_graph()
        ddp_model.logger._set_static_graph()
        ddp_model._static_graph_delay_allreduce_enqueued = False  # its first backward ends differently


@contextlib.contextmanager
def _making_buckets(parameters: Any, buckets: Sequence[Sequence[int]]) -> Iterator[None]:
    """A context in which DDP puts these parameters into these buckets first, if they have all of them. Otherwise its
    first step has one bucket, and adds gradients of more than two ranks in another order than later steps."""
    make, numbers = getattr(dist, _ASSIGN, None), {id(each): index for index, each in enumerate(parameters)}
    if make is None or {each for bucket in buckets for each in bucket} != numbers.keys():
        yield
        return

    def made(tensors: Any, limits: Any, *rest: Any) -> Any:
        if tensors is not parameters:
            return make(tensors, limits, *rest)
        # DDP turns both lists around
        return [[numbers[each] for each in bucket] for bucket in reversed(buckets)], [limits[-1]] * len(buckets)

    setattr(dist, _ASSIGN, made)
    try:
        yield
    finally:
        setattr(dist, _ASSIGN, make)


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
