"""Gathers of parameters that run beside the computation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Work
from torch.futures import Future

from ...communication.communicators import Communicators
from ...engine.engine import Engine
from ...engine.failures import Failures
from ...messages.gathers import GatheredParameter, GatherMessage
from ...programs.rules import Site
from ...programs.steps import Level, Place
from ...programs.topology import Topology
from ...resources.lanes import DeviceLanes
from ...resources.memory_spaces import Allocate, BufferArena, Places
from .shard_buffers import RowBuffer

_NO_BACKWARD = -1  # autograd's number of no backward


class Gathered(Work):
    """A gather on its way. FSDP waits for it when it needs the parameters.

    Args:
        future: gets ``None`` when the parameters are there, or an error.
        waited: called when somebody has waited.
        failures: knows what has happened.
    """

    def __init__(self, future: Future[BaseException | None], waited: Callable[[], None], failures: Failures) -> None:
        super().__init__()
        self._future, self._waited, self._failures = future, waited, failures

    def wait(self, timeout: timedelta | None = None) -> bool:
        error = self._future.wait()
        self._waited()
        if error is not None:
            raise self._failures.raised(error, "parameters could not be gathered")
        return True


class GatherBuffer(RowBuffer):
    """Memory for the parameters of one group, and then for those of others.

    Args:
        numel: the elements of all rows of the largest group.
        device: the device of the parameters.
    """

    def __init__(self, numel: int, device: torch.device) -> None:
        super().__init__(numel, device)
        self.forget()
        self.is_free = True
        self.future: Future[BaseException | None] | None = None  # set by the last gather

    @property
    def has_arrived(self) -> bool:
        """Whether nothing is on its way into the memory."""
        return self.future is None or self.future.done()

    def forget(self) -> None:
        """Drop all messages, and the memory of their payloads."""
        self._arena, self._version = BufferArena(Places.of(self._device)), 0
        self._messages: dict[tuple[int, torch.dtype, bool], GatherMessage] = {}

    def message(self, key: tuple[int, torch.dtype, bool], make: Callable[[Allocate], GatherMessage]) -> GatherMessage:
        """The message with a key, which ``make`` builds if there is none."""
        if self._version != self._arena.version:
            self._messages = {}
        if key not in self._messages:
            self._messages[key] = self._arena.build(functools.partial(make, self._arena.take))
            self._version = self._arena.version
        return self._messages[key]

    def free(self) -> None:
        """Let other parameters come into the memory. FSDP copies these out before it gathers more."""
        self.is_free = True


class Gathers:
    """The gathers of the parameters of a model. Construction is collective.

    Args:
        group: the ranks that have the shards of the model together.
        device: the device of the parameters.
        row_numels: the elements of a row of each group of parameters.
        names: the names of the parameters of each group, for errors.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        row_numels: Sequence[int],
        names: Sequence[Sequence[str]] = (),
    ) -> None:
        self._device, self._row_numels, self._names = device, row_numels, names
        self._buffers: list[GatherBuffer] = []
        self.encode([()] * len(row_numels))
        self._ranks, self._members = group.size(), dist.get_process_group_ranks(group)
        site = Site(0, Level.FLAT, Place.DEVICE, exchanges=True)
        self._communicators = Communicators(group, Places.of(device), Topology(self._ranks), [site])
        try:
            self._engine = Engine(DeviceLanes(device), phases=1, communicators=self._communicators)
        except BaseException:
            self._communicators.close()
            raise
        self._calls, self._sent_nbytes = 0, 0.0

    def encode(self, parameters: Sequence[Sequence[GatheredParameter]], keeps_copy: bool = False) -> None:
        """Encode parameters from the next gather on. All ranks call it between the same two gathers.

        Args:
            parameters: the encoded parameters of each group; none for a group that is sent as it is.
            keeps_copy: whether differences to a copy of all parameters are sent. They are sent when FSDP gathers a
                group in forward, and the first time the parameters are sent exactly; in backward the copy is what was
                gathered.
        """
        self._parameters, self._keeps_copy = parameters, keeps_copy
        self._copies: list[torch.Tensor | None] = [None for _ in parameters]
        self.forget()
        for buffer in self._buffers:
            buffer.forget()

    def room(self, index: int, numel: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Memory for the parameters of a group, ``[numel]``; ``None`` if these are others."""
        if numel != self._ranks * self._row_numels[index] or not dtype.is_floating_point:
            return None
        found = next((each for each in self._buffers if each.is_free), None)
        if found is None:
            found = GatherBuffer(max(self._row_numels) * self._ranks, self._device)
            self._buffers.append(found)
        found.is_free = False
        return found.rows(numel, dtype)

    def gather(self, index: int, output: torch.Tensor, group: dist.ProcessGroup) -> Work | None:
        """Begin to bring the parameters of a group, of which the own row of ``output`` holds the shards of this rank.

        Returns:
            A work to wait for; ``None`` if FSDP shall gather them itself, because they are others, or have only been
            resharded to some of the ranks.
        """
        buffer = next((each for each in self._buffers if each.holds(output)), None)
        if buffer is None or dist.get_process_group_ranks(group) != self._members:
            if buffer is not None:
                buffer.free()
            return None
        lanes = self._engine.lanes
        if (error := lanes.error) is not None:
            raise self._engine.failures.raised(error, "a gather failed before")
        future: Future[BaseException | None] = Future(devices=[self._device] if self._device.type == "cuda" else None)
        rows, is_known = output.view(self._ranks, -1), self._is_known[index]
        copy = self._copy(index, rows) if self._keeps_copy else None
        if copy is not None and is_known and torch._C._current_graph_task_id() != _NO_BACKWARD:
            rows.copy_(copy)
            future.set_result(None)
            return Gathered(future, buffer.free, self._engine.failures)

        def make(allocate: Allocate) -> GatherMessage:
            encoded = self._parameters[index] if copy is None or is_known else ()
            return GatherMessage(encoded, rows, self._communicators, copy, allocate)

        message = buffer.message((index, output.dtype, is_known), make)
        if self._names:
            message.keys = self._names[index]
        self._is_known[index] = copy is not None
        self._calls += 1
        self._sent_nbytes += message.sent_nbytes
        token = self._engine.submit(message, self._calls, (lanes.here(),))
        self._engine.failures.step = None  # this is the number of the call
        self._engine.finish([token], lambda: future.set_result(None), future.set_result)
        buffer.future = future
        return Gathered(future, buffer.free, self._engine.failures)

    def _copy(self, index: int, rows: torch.Tensor) -> torch.Tensor:
        """The copy of the parameters of a group, ``fp32 [ranks, numel]``."""
        copy = self._copies[index]
        if copy is None:
            copy = self._copies[index] = torch.zeros(rows.shape, dtype=torch.float32, device=rows.device)
        return copy

    def forget(self) -> None:
        """Send all parameters exactly the next time, because others have been loaded. All ranks call it together."""
        self._is_known = [False for _ in self._row_numels]  # whether a copy is that of all ranks

    def copied_nbytes(self) -> int:
        """The bytes of the copy of all parameters."""
        return sum(copy.nbytes for copy in self._copies if copy is not None)

    def end_step(self) -> float:
        """The bytes that this rank has sent since the last call, at the end of a backward, when nobody waits for
        parameters any more."""
        for buffer in self._buffers:
            buffer.is_free = buffer.is_free or buffer.has_arrived
        sent_nbytes, self._sent_nbytes = self._sent_nbytes, 0.0
        return sent_nbytes

    def close(self) -> None:
        """End the lanes and the process groups; further calls do nothing."""
        self._engine.lanes.close()
        self._communicators.close()
