"""Averages of a DDP model's buckets as DDP makes them, for a model that has a communication hook."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from gckernels.devices import future_on

from ...engine.failures import FailedBucket, Outcome, failure
from ..abilities import Before
from .step_ends import in_join


class Handler(Protocol):
    """Handles the steps of a model with a communication hook."""

    def synchronise(self, bucket: GradBucket, first: bool) -> Future[Outcome]:
        """Return the future of a bucket.

        Args:
            bucket: the bucket.
            first: whether it is the first one of its step.
        """

    def follow(self, bucket: GradBucket, first: bool, last: bool) -> Future[Outcome]:
        """Return the future of a bucket that takes part in a step of the other ranks, because this rank has no inputs
        left in DDP's ``join()``.

        Args:
            bucket: the bucket.
            first: whether it is the first one of that step.
            last: whether it is the last one, after which no other function is called.
        """

    def before_waiting(self) -> None:
        """Do what is due before DDP waits for the futures of the step. It may be called earlier, too."""

    def ended(self) -> None:
        """Note that DDP has averaged all gradients. All ranks are here together."""


class Averages:
    """Averages the buckets of a model as DDP does: with the same factor and the same collectives, in the same order.

    Args:
        ddp_model: the model, which is not kept.
        before: called before buckets are averaged. If it is given, they are averaged when backward has ended, so that
            nothing is sent beside it. This depends on nothing that the training does: all that DDP hands over is
            averaged before DDP waits for it.
        ended: called when DDP has averaged all gradients of a step.
    """

    def __init__(
        self,
        ddp_model: DistributedDataParallel,
        before: Before | None = None,
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        self._model: Callable[[], Any] = weakref.ref(ddp_model)
        self._before, self.ended = before, ended
        self._share = 1.0 / dist.get_world_size(ddp_model.process_group)
        self._waiting: list[tuple[GradBucket, Future[Outcome]]] = []

    def synchronise(self, bucket: GradBucket, first: bool) -> Future[Outcome]:
        future, ddp_model = self._new_future(bucket, first, has_inputs=True), self._model()
        self._waiting.append((bucket, future))
        # in the first backward of a static graph DDP waits for its buckets before callbacks are called
        is_first_backward = will_rebuild_buckets(ddp_model)
        # behind its last bucket DDP sends which parameters are used; it does not say which one is the last if it leaves
        # buckets out
        is_followed = ddp_model.find_unused_parameters and bucket.is_last()
        leaves_out = getattr(ddp_model, "skip_all_reduce_unused_params", False)
        if self._before is None or is_first_backward or is_followed or leaves_out:
            self.before_waiting()
        return future

    def follow(self, bucket: GradBucket, first: bool, last: bool) -> Future[Outcome]:
        """Start to average a bucket of zeros, and return its future."""
        future = self._new_future(bucket, first, has_inputs=False)
        self._start(bucket.buffer(), future)
        return future

    def before_waiting(self) -> None:
        """Start to average the buckets that have come."""
        waiting, self._waiting = self._waiting, []
        try:
            if waiting and self._before is not None:
                self._before([bucket.parameters() for bucket, _ in waiting])
        finally:  # the other ranks wait for them
            for bucket, future in waiting:
                self._start(bucket.buffer(), future)

    def _new_future(self, bucket: GradBucket, first: bool, has_inputs: bool) -> Future[Outcome]:
        """A future whose value will be the buffer of a bucket. On a device, streams wait for what it holds."""
        buffer, ddp_model = bucket.buffer(), self._model()
        if first and in_join(ddp_model) and not ddp_model._divide_by_initial_world_size:
            # the factor depends on how many ranks have inputs, for which the host waits, as it does in DDP
            ranks = torch.full((1,), float(has_inputs), dtype=torch.float32, device=buffer.device)
            dist.all_reduce(ranks, group=ddp_model.process_group)
            self._share = 1.0 / max(ranks.item(), 1.0)
        return future_on(buffer.device)

    def _start(self, buffer: torch.Tensor, future: Future[Outcome]) -> None:
        with torch.no_grad():
            buffer.mul_(self._share)
            work = dist.all_reduce(buffer, group=self._model().process_group, async_op=True)
        assert work is not None
        group = self._model().process_group
        work.get_future().add_done_callback(functools.partial(_finish, group, buffer, future))


def _finish(group: dist.ProcessGroup, buffer: torch.Tensor, future: Future[Outcome], done: Future[Any]) -> None:
    try:
        done.value()
    except Exception as error:
        future.set_result(FailedBucket(functools.partial(_explained, group, error)))
    else:
        future.set_result(buffer)


def _explained(group: dist.ProcessGroup, error: Exception) -> RuntimeError:
    from ...communication import reports

    return failure(error, report=reports.explained(group, "the average of a bucket", (), None, error))


def will_rebuild_buckets(ddp_model: Any) -> bool:
    """Whether DDP still has its first buckets, one with all gradients, and will rebuild them when a backward has shown
    their order. It is the same on all ranks, which rebuild their buckets together."""
    rebuilds = ddp_model.static_graph or not ddp_model.find_unused_parameters
    return rebuilds and not getattr(ddp_model, "_has_rebuilt_buckets", False)
