"""The memory in which groups of parameters and their gradients travel."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch.futures import Future

from gckernels.devices import current_stream, event_behind, is_accelerator, on_stream

from ...engine.failures import Outcome, wait_for


class RowBuffer:
    """Memory for the rows of one group, and then for those of others, of any dtype.

    Args:
        numel: the elements of all rows of the largest group.
        device: the device of the rows.
    """

    def __init__(self, numel: int, device: torch.device) -> None:
        self._numel, self._device = numel, device
        self._memory: dict[torch.dtype, torch.Tensor] = {}

    def rows(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The memory, ``[numel]``."""
        if dtype not in self._memory:
            self._memory[dtype] = torch.zeros(self._numel, dtype=dtype, device=self._device)
        return self._memory[dtype][:numel]

    def holds(self, vector: torch.Tensor) -> bool:
        """Whether a vector is this memory."""
        memory = self._memory.get(vector.dtype)
        return memory is not None and memory.data_ptr() == vector.data_ptr()


class ShardBuffer(RowBuffer):
    """Memory for the gradients of one group, and then for those of others.

    Args:
        numel: the elements of the largest group.
        device: the device of the gradients.
    """

    def __init__(self, numel: int, device: torch.device) -> None:
        super().__init__(numel, device)
        self._sent: Future[Outcome] | None = None
        self._check: Callable[[], object] = lambda: None
        self._finish: Callable[[], object] | None = None
        self._free: torch.Event | None = None
        self._filled: torch.Stream | None = None

    def rows(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The memory for gradients, ``[numel]``, when what was in it has arrived."""
        self.settle()
        if is_accelerator(self._device):
            self._filled = current_stream(self._device)
        if self._free is not None:
            self._free.wait()
        return super().rows(numel, dtype)

    def filled(self, vector: torch.Tensor) -> AbstractContextManager[object]:
        """A context of the stream in which a vector was filled with gradients, for what waits for them.

        It is the stream in which FSDP copied them into this memory, and the current one for memory of its own. FSDP's
        own stream, in which it asks for the reduction, waits for earlier results as well.
        """
        divides = torch.float16 in self._memory  # FSDP divides such gradients in its own stream
        if self._filled is None or divides or not self.holds(vector):
            return contextlib.nullcontext()
        return on_stream(self._filled)

    def send(self, sent: Future[Outcome], check: Callable[[], object], finish: Callable[[], object]) -> None:
        """Note that the memory is in use.

        Args:
            sent: its messages.
            check: called before they are awaited. It raises if they will never arrive.
            finish: takes the result out of it.
        """
        self._sent, self._check, self._finish = sent, check, finish

    def settle(self) -> None:
        """Wait for what is in the memory, and take the result out of it.

        Raises:
            RuntimeError: it could not be sent.
        """
        sent, finish = self._sent, self._finish
        self._sent = self._finish = None
        if sent is None or finish is None:
            return
        self._check()
        wait_for([sent])
        finish()
        if is_accelerator(self._device):
            self._free = event_behind(current_stream(self._device))
