"""The stand-ins for FSDP2's collectives of one group of parameters, and for its process group of replicas."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

Room = Callable[[int, torch.dtype], torch.Tensor | None]
"""A function that returns memory for a collective, ``[numel]`` of a dtype; ``None`` for that of FSDP."""
Average = Callable[[torch.Tensor, Any], bool | None]
"""A function that gives a vector the reduction of those of all replicas; or returns ``False`` or ``None``, and leaves
it alone."""


class ShardComm:
    """A stand-in for a collective of FSDP, with FSDP's protocol (``torch.distributed.fsdp._fully_shard._fsdp_api``).

    Args:
        inner: FSDP's own.
        around: called for each collective, with a function that lets ``inner`` do it, and with the arguments by name:
            ``output_tensor``, ``input_tensor``, ``group``, and ``op`` for reductions. It returns the work for which
            FSDP waits, or ``None``.
        room: returns the memory of the collective.
    """

    def __init__(
        self,
        inner: Any,
        around: Callable[[Callable[[], Any], Mapping[str, Any]], Any],
        room: Room = lambda numel, dtype: None,
    ) -> None:
        self.inner, self._around, self._room = inner, around, room

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        (numel,) = size
        if (room := self._room(numel, dtype)) is None:
            room = self.inner.allocate(size, dtype=dtype, device=device)
        assert room is not None
        return room

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, **options: Any
    ) -> Any:
        given = {"output_tensor": output_tensor, "input_tensor": input_tensor, "group": group, **options}
        return self._around(lambda: self.inner(**given), given)


class ReplicaGroup(dist.ProcessGroup):
    """A process group whose all-reduce is a function. All other attributes are those of the group it replaces.

    Args:
        inner: the group it replaces.
        average: takes the vector and the operation of each all-reduce. If it returns ``False`` or ``None``, ``inner``
            reduces.
    """

    def __init__(self, inner: dist.ProcessGroup, average: Average) -> None:
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg]
        self.inner, self._average = inner, average

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:  # type: ignore[override]
        operation = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        operation = getattr(operation, "op", operation)  # its kind, without the factor that some have
        try:
            is_averaged = self._average(tensors[0], operation)
        except BaseException:
            # torch's log of an error tells the backend and the rank, and fails itself for a group that it does not know
            _world.pg_map[self] = _world.pg_map[self.inner]
            _world.pg_group_ranks[self] = _world.pg_group_ranks[self.inner]
            raise
        if not is_averaged:
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


def factor_of(operation: Any, ranks: int) -> float:
    """The factor by which the mean of all ranks becomes the result of a reduction."""
    kind = getattr(operation, "op", operation)  # without the factor that some have
    if kind == dist.ReduceOp.AVG:
        return 1.0
    return float(ranks) if kind == dist.ReduceOp.SUM else float(operation.__getstate__()[1]) * ranks
