"""The stand-in for FSDP2's reduce-scatter of one group of parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist


class ReduceScatterComm:
    """FSDP's protocol of a reduce-scatter, ``torch.distributed.fsdp._fully_shard._fsdp_api.ReduceScatter``.

    Args:
        inner: FSDP's own.
        room: returns memory for gradients, ``[numel]`` of a dtype; ``None`` for that of ``inner``.
        reduce: takes output, input and operation of each reduction. If it returns ``False`` or ``None``, ``inner``
            reduces.
    """

    def __init__(
        self,
        inner: Any,
        room: Callable[[int, torch.dtype], torch.Tensor | None],
        reduce: Callable[[torch.Tensor, torch.Tensor, Any], bool | None],
    ) -> None:
        self.inner, self._room, self._reduce = inner, room, reduce

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        (numel,) = size
        if (room := self._room(numel, dtype)) is None:
            room = self.inner.allocate(size, dtype=dtype, device=device)
        assert room is not None
        return room

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        if self._reduce(output_tensor, input_tensor, op):
            return None
        return self.inner(output_tensor=output_tensor, input_tensor=input_tensor, group=group, op=op, async_op=async_op)


def kind_of(operation: Any) -> Any:
    """The kind of a reduction, without the factor that some have."""
    return getattr(operation, "op", operation)


def factor_of(operation: Any, ranks: int) -> float:
    """The factor by which the mean of all ranks becomes the result of a reduction."""
    kind = kind_of(operation)
    if kind == dist.ReduceOp.AVG:
        return 1.0
    return float(ranks) if kind == dist.ReduceOp.SUM else float(operation.__getstate__()[1]) * ranks
