"""The stand-in for FSDP2's reduce-scatter of one group of parameters, and the memory in which gradients travel."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

from ...engine.failures import FailedBucket, Outcome

BUFFERS = 2
"""The groups whose gradients can be on their way at the same time: one is sent while the next is encoded."""


class RowsBuffer:
    """Memory for the gradients of one group, and then for those of others.

    Args:
        numel: the elements of the largest group.
        device: the device of the gradients.
    """

    def __init__(self, numel: int, device: torch.device) -> None:
        self._numel, self._device = numel, device
        self._memory: dict[torch.dtype, torch.Tensor] = {}
        self._sent: Future[Outcome] | None = None
        self._finish: Callable[[], object] | None = None
        self._room = torch.zeros(0, dtype=torch.uint8, device=device)
        self._free: torch.cuda.Event | None = None
        self._filled: torch.cuda.Stream | None = None

    def room(self, nbytes: int) -> torch.Tensor:
        """Memory for payloads, ``uint8`` of at least ``nbytes``."""
        if self._room.numel() < nbytes:
            self._room = torch.zeros(nbytes, dtype=torch.uint8, device=self._device)
        return self._room

    def rows(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The memory for gradients, ``[numel]``, when what was in it has arrived."""
        self.settle()
        if self._device.type == "cuda":
            self._filled = torch.cuda.current_stream(self._device)
        if self._free is not None:
            self._free.wait()
        if dtype not in self._memory:
            self._memory[dtype] = torch.zeros(self._numel, dtype=dtype, device=self._device)
        return self._memory[dtype][:numel]

    def holds(self, vector: torch.Tensor) -> bool:
        """Whether a vector is this memory."""
        memory = self._memory.get(vector.dtype)
        return memory is not None and memory.data_ptr() == vector.data_ptr()

    def filled(self) -> AbstractContextManager[object]:
        """A context of the stream that copies gradients into the memory, for what waits for them. FSDP's own stream,
        in which it asks for the reduction, waits for earlier results as well."""
        divides = torch.float16 in self._memory  # FSDP divides such gradients in its own stream
        return contextlib.nullcontext() if self._filled is None or divides else torch.cuda.stream(self._filled)

    def send(self, sent: Future[Outcome], finish: Callable[[], object]) -> None:
        """Note that the memory is in use.

        Args:
            sent: its messages.
            finish: takes the result out of it.
        """
        self._sent, self._finish = sent, finish

    def settle(self) -> None:
        """Wait for what is in the memory, and take the result out of it.

        Raises:
            RuntimeError: it could not be sent.
        """
        sent, finish = self._sent, self._finish
        self._sent = self._finish = None
        if sent is None or finish is None:
            return
        if isinstance(outcome := sent.wait(), FailedBucket):
            raise outcome.error
        finish()
        if self._device.type == "cuda":
            self._free = torch.cuda.current_stream(self._device).record_event()


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
