"""The stand-in for the process group over which FSDP2 averages the shards of replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

Average = Callable[[torch.Tensor, Any], bool | None]
"""A function that gives a vector the reduction of those of all replicas; or returns ``False`` or ``None``, and leaves
it alone."""


class ReplicaGroup(dist.ProcessGroup):
    """A process group whose all-reduce is a function. Everything else is that of the group for which it stands.

    Args:
        inner: the group for which it stands.
        average: takes the vector and the operation of each all-reduce. If it returns ``False`` or ``None``, ``inner``
            reduces.
    """

    def __init__(self, inner: dist.ProcessGroup, average: Average) -> None:
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg]
        self.inner, self._average = inner, average

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:  # type: ignore[override]
        operation = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        operation = getattr(operation, "op", operation)  # its kind, without the factor that some have
        if not self._average(tensors[0], operation):
            return self.inner.allreduce(tensors) if opts is None else self.inner.allreduce(tensors, opts)
        return None

    def broadcast(self, *arguments: Any) -> Any:
        return self.inner.broadcast(*arguments)

    def allgather(self, *arguments: Any) -> Any:
        return self.inner.allgather(*arguments)

    def barrier(self, *arguments: Any) -> Any:
        return self.inner.barrier(*arguments)

    def getBackendName(self) -> str:
        return self.inner.name()

    @property
    def group_name(self) -> Any:
        return self.inner.group_name

    @property
    def group_desc(self) -> str:
        return self.inner.group_desc
