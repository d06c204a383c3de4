"""Averages of a DDP model's buckets as DDP makes them, for a model that has a communication hook."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from ...engine.failures import FailedBucket, Outcome, failure
from .step_ends import in_join


class Averages:
    """Averages the buckets of a model as DDP does: with the same factor and the same collectives, in the same order.

    Args:
        ddp_model: the model, which is not kept.
    """

    def __init__(self, ddp_model: DistributedDataParallel) -> None:
        self._model: Callable[[], Any] = weakref.ref(ddp_model)
        self._share = 1.0 / dist.get_world_size(ddp_model.process_group)

    def synchronise(self, bucket: GradBucket, first: bool) -> Future[Outcome]:
        """Start to average a bucket, and return its future.

        Args:
            bucket: the bucket.
            first: whether it is the first one of its step.
        """
        return self._averaged(bucket, first, has_inputs=True)

    def before_waiting(self) -> None:
        """Do nothing: all buckets are on their way."""

    def follow(self, bucket: GradBucket, first: bool, last: bool) -> Future[Outcome]:
        """Start to average a bucket of zeros, for a rank without inputs in ``join()``, and return its future."""
        return self._averaged(bucket, first, has_inputs=False)

    def _averaged(self, bucket: GradBucket, first: bool, has_inputs: bool) -> Future[Outcome]:
        buffer = bucket.buffer()
        if first:
            self._begin(buffer, has_inputs)
        future = new_future(buffer)
        self._start(buffer, future)
        return future

    def _begin(self, buffer: torch.Tensor, has_inputs: bool) -> None:
        """Find the factor of a step that begins. In ``join()`` it may depend on how many ranks have inputs, and then
        the host waits for that number, as it does in DDP."""
        ddp_model = self._model()
        if in_join(ddp_model) and not ddp_model._divide_by_initial_world_size:
            ranks = torch.full((1,), float(has_inputs), dtype=torch.float32, device=buffer.device)
            dist.all_reduce(ranks, group=ddp_model.process_group)
            self._share = 1.0 / max(ranks.item(), 1.0)

    def _start(self, buffer: torch.Tensor, future: Future[Outcome]) -> None:
        with torch.no_grad():
            buffer.mul_(self._share)
            work = dist.all_reduce(buffer, group=self._model().process_group, async_op=True)
        assert work is not None
        work.get_future().add_done_callback(functools.partial(_finish, buffer, future))


def new_future(buffer: torch.Tensor) -> Future[Outcome]:
    """A future whose value will be the buffer. On a device, streams wait for what it holds."""
    return Future(devices=[buffer.device] if buffer.device.type == "cuda" else None)


def _finish(buffer: torch.Tensor, future: Future[Outcome], done: Future[Any]) -> None:
    try:
        done.value()
    except Exception as error:
        future.set_result(FailedBucket(failure(error)))
    else:
        future.set_result(buffer)
