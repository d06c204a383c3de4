"""A DDP model that averages nothing, because its updates are averaged in place of its gradients."""

from __future__ import annotations

import weakref
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from ...engine.failures import Outcome, failed_future
from ..checks.models import ddp_parameters
from ..ownership import attached
from .ddp_checks import refuse_foreign_hook
from .reducer import release_comm_hook, use_comm_hook

_AVERAGES = (
    "gckernels: DistributedDataParallel was about to average gradients, and their updates are averaged in their place "
    "(sync.Updates); something has set its require_backward_grad_sync, which is False as long as there is the "
    "attachment, or a no_sync() that began before sync.attach has ended behind it"
)


class SilentDdp:
    """The silence of a DDP model, which is not kept.

    The model is in the state of its own ``no_sync`` from :meth:`begin` to :meth:`end`: its backward communicates
    nothing, nor does its forward. A ``no_sync`` of the training inside changes nothing. If something ends that state,
    backward raises a RuntimeError on the ranks where that happens, by the communication hook of the model.
    """

    def __init__(self, ddp_model: DistributedDataParallel) -> None:
        self._model = weakref.ref(ddp_model)
        self.group: dist.ProcessGroup = ddp_model.process_group

    @property
    def averages(self) -> DistributedDataParallel | None:
        return self._model()

    def check(self, caller: str) -> None:
        ddp_model: Any = self._model()
        refuse_foreign_hook(caller, ddp_model)
        if ddp_model.static_graph:
            raise ValueError(
                f"{caller}: model averages its first gradients in any case (static_graph=True), and updates are "
                "averaged in their place; wrap the module without static_graph, or give it without its wrapper"
            )

    def begin(self) -> None:
        self._set(averages=False)
        if (ddp_model := self._model()) is not None:
            use_comm_hook(ddp_model, [*ddp_parameters(ddp_model).values()], self)
            attached.add(ddp_model)

    def end(self) -> None:
        self._set(averages=True)
        if (ddp_model := self._model()) is not None:
            release_comm_hook(ddp_model)
            attached.discard(ddp_model)

    def _set(self, averages: bool) -> None:
        ddp_model: Any = self._model()
        if ddp_model is not None:
            ddp_model.require_backward_grad_sync = ddp_model.require_forward_param_sync = averages

    # ---------------------------------------------------------------- the hook, which nobody calls

    def synchronise(self, bucket: GradBucket, first: bool) -> Future[Outcome]:
        return failed_future(RuntimeError(_AVERAGES))

    def follow(self, bucket: GradBucket, first: bool, last: bool) -> Future[Outcome]:
        return failed_future(RuntimeError(_AVERAGES))

    def before_waiting(self) -> None:
        pass

    def ended(self) -> None:
        pass
