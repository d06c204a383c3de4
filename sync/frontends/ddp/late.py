"""Averages after backward: a DDP model whose gradients are sent when nothing else is computed."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from ...engine.failures import Outcome
from ..frontend import Before
from .averages import Averages, new_future
from .reducer import Handler, use_comm_hook, will_rebuild_buckets


class LateAverages(Averages):
    """Averages the buckets of a model when its backward has ended.

    This depends on nothing that the training does. All that DDP hands over is averaged before DDP waits for it, in the
    order of DDP.

    Args:
        ddp_model: the model, which is not kept.
        before: called before buckets are averaged.
    """

    def __init__(self, ddp_model: DistributedDataParallel, before: Before) -> None:
        super().__init__(ddp_model)
        self._before = before
        self._waiting: list[tuple[GradBucket, Future[Outcome]]] = []

    def synchronise(self, bucket: GradBucket, first: bool) -> Future[Outcome]:
        buffer, ddp_model = bucket.buffer(), self._model()
        if first:
            self._begin(buffer, has_inputs=True)
        future = new_future(buffer)
        self._waiting.append((bucket, future))
        # in the first backward of a static graph DDP waits for its buckets before callbacks are called
        is_first_backward = will_rebuild_buckets(ddp_model)
        # behind its last bucket DDP sends which parameters are used; it does not say which one is the last if it leaves
        # buckets out
        is_followed = ddp_model.find_unused_parameters and bucket.is_last()
        if is_first_backward or is_followed or getattr(ddp_model, "skip_all_reduce_unused_params", False):
            self.before_waiting()
        return future

    def before_waiting(self) -> None:
        """Start to average the buckets that have come."""
        waiting, self._waiting = self._waiting, []
        try:
            if waiting:
                self._before([bucket.parameters() for bucket, _ in waiting])
        finally:  # the other ranks wait for them
            for bucket, future in waiting:
                self._start(bucket.buffer(), future)


def average_late(
    ddp_model: DistributedDataParallel,
    parameters: Collection[torch.nn.Parameter],
    before: Before,
    ended: Callable[[], None],
) -> None:
    """Let the gradients of a model be averaged when its backward has ended, until its hook is released.

    Args:
        ddp_model: the model, between two steps. It is kept by neither ``before`` nor ``ended``.
        parameters: the parameters that it averages.
        before: called before buckets are averaged.
        ended: called when DDP has averaged all gradients of a step. All ranks are here together.
    """
    late = LateAverages(ddp_model, before)
    use_comm_hook(ddp_model, parameters, Handler(late.synchronise, late.before_waiting, ended, late.follow))
