"""Gathers of parameters that run beside the computation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Work
from torch.futures import Future

from gckernels.devices import current_stream, future_on, is_accelerator

from ...communication.communicators import Communicators
from ...engine.engine import Engine
from ...engine.failures import FailedBucket, Outcome, wait_for
from ...messages.gathers import GatheredParameter, GatherMessage
from ...programs.rules import Site
from ...programs.steps import Level, Place
from ...programs.topology import Topology
from ...resources.lanes import DeviceLanes
from ...resources.memory_spaces import Allocate, BufferArena, Places
from .shard_buffers import RowBuffer
from .shard_groups import ShardGroup

_NO_BACKWARD = -1  # autograd's number of no backward


class Gathered(Work):
    """A gather on its way. FSDP waits for it when it needs the parameters.

    Args:
        future: gets the parameters when they are there, or the failure of the gather. As the tensor is in the value, a
            stream of a device that waits for the future waits for what is done to the tensor, too.
        buffer: the memory of the parameters.
        check: called before they are awaited. It raises if they will never arrive.
    """

    def __init__(self, future: Future[Outcome], buffer: GatherBuffer, check: Callable[[], object]) -> None:
        super().__init__()
        self._future, self._buffer, self._check = future, buffer, check

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._check()
        self._buffer.note_reader()
        wait_for([self._future])
        return True


class GatherBuffer(RowBuffer):
    """Memory for the parameters of one group, and then for those of others.

    FSDP keeps what it has gathered until it copies that out, which may be at once, in the next step, or never. So FSDP
    is asked what it keeps.

    Args:
        numel: the elements of all rows of the largest group.
        device: the device of the parameters.
    """

    def __init__(self, numel: int, device: torch.device) -> None:
        super().__init__(numel, device)
        self.forget()
        self.future: Future[Outcome] | None = None  # the last gather's
        self._borrower: ShardGroup | None = None
        self._filled: torch.Stream | None = None  # where the shards of this rank were copied into it
        self._read: torch.Stream | None = None  # where the parameters were copied out of it

    @property
    def is_free(self) -> bool:
        """Whether FSDP has no more use for what was gathered into it, and nothing is on its way into it."""
        kept = None if self._borrower is None else self._borrower.gathered
        has_arrived = self.future is None or self.future.done()
        return has_arrived and (kept is None or not self.holds(kept))

    def lend(self, borrower: ShardGroup, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The memory, ``[numel]``, for the parameters of a group."""
        if is_accelerator(self._device):
            here = current_stream(self._device)
            # FSDP itself lets a stream into which it gathers again wait for what it has copied out
            if self._read is not None and here not in (self._read, self._filled):
                here.wait_stream(self._read)
            self._filled = here
        self._borrower = borrower
        return self.rows(numel, dtype)

    def note_reader(self) -> None:
        """Note that parameters are copied out in the current stream."""
        if is_accelerator(self._device):
            self._read = current_stream(self._device)

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


class Gathers:
    """The gathers of the parameters of a model. Construction is collective.

    Args:
        group: the ranks that have the shards of the model together.
        device: the device of the parameters.
        groups: the groups of parameters.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, groups: Sequence[ShardGroup]) -> None:
        self._device, self._groups = device, groups
        self._row_numels = [sum(each.rows()) for each in groups]
        self._buffers: list[GatherBuffer] = []
        self._turn, self._has_ended = 0, False  # forwards, one or more, and then backwards
        self.encode([()] * len(groups))
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
                gathered in the forward before, if FSDP gathered the group there.
        """
        self._parameters, self._keeps_copy = parameters, keeps_copy
        self._copies: list[torch.Tensor | None] = [None for _ in parameters]
        self._copied: list[int | None] = [None for _ in parameters]  # the turn in which each copy was gathered
        self.forget()
        for buffer in self._buffers:
            buffer.forget()

    def room(self, index: int, numel: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Memory for the parameters of a group, ``[numel]``; ``None`` if FSDP shall gather them itself, because they
        are others, or have been resharded to some of the ranks."""
        if numel != self._ranks * self._row_numels[index] or not dtype.is_floating_point:
            return None
        if dist.get_process_group_ranks(self._groups[index].gathering) != self._members:
            return None
        found = next((each for each in self._buffers if each.is_free), None)
        if found is None:
            found = GatherBuffer(max(self._row_numels) * self._ranks, self._device)
            self._buffers.append(found)
        return found.lend(self._groups[index], numel, dtype)

    def gather(self, index: int, output: torch.Tensor, check: Callable[[], object] = lambda: None) -> Work | None:
        """Begin to bring the parameters of a group, of which the own row of ``output`` holds the shards of this rank.

        Args:
            index: the number of the group.
            output: memory that :meth:`room` has returned, ``[numel]``.
            check: called before the parameters are awaited. It raises if they will never arrive.

        Returns:
            A work to wait for; ``None`` if FSDP shall gather them itself, into memory of its own.
        """
        buffer = next((each for each in self._buffers if each.holds(output)), None)
        if buffer is None:
            return None
        lanes = self._engine.lanes
        if (error := lanes.error) is not None:
            raise self._engine.failures.raised(error, "a gather failed before")
        future: Future[Outcome] = future_on(self._device)
        buffer.future = future
        rows, is_known = output.view(self._ranks, -1), self._is_known[index]
        copy = self._copy(index, rows) if self._keeps_copy and self._parameters[index] else None
        is_forward = torch._C._current_graph_task_id() == _NO_BACKWARD
        if is_forward and self._has_ended:
            self._turn, self._has_ended = self._turn + 1, False
        # FSDP itself has waited for what it has gathered in forward before it gathers the same in backward
        if copy is not None and is_known and not is_forward and self._copied[index] == self._turn:
            rows.copy_(copy)
            future.set_result(output)
            return Gathered(future, buffer, check)

        def make(allocate: Allocate) -> GatherMessage:
            encoded = self._parameters[index] if copy is None or is_known else ()
            return GatherMessage(encoded, rows, self._communicators, copy, allocate)

        def failed(error: BaseException) -> FailedBucket:
            return FailedBucket(lambda: self._engine.failures.raised(error, "parameters could not be gathered"))

        message = buffer.message((index, output.dtype, is_known), make)
        message.keys = tuple(self._groups[index].names)
        self._is_known[index], self._copied[index] = copy is not None, self._turn
        self._calls += 1
        self._sent_nbytes += message.sent_nbytes
        token = self._engine.submit(message, self._calls, (lanes.here(),))
        self._engine.failures.step = None  # this is the number of the call
        self._engine.finish([token], lambda: future.set_result(output), lambda error: future.set_result(failed(error)))
        return Gathered(future, buffer, check)

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
        """The bytes that this rank has sent since the last call, at the end of a backward."""
        self._has_ended = True
        sent_nbytes, self._sent_nbytes = self._sent_nbytes, 0.0
        return sent_nbytes

    def fail(self, error: BaseException) -> None:
        """Let nothing be gathered any more because of an error."""
        self._engine.lanes.failure.explain(error)

    def close(self) -> None:
        """End the lanes and the process groups; further calls do nothing. After a failure, ranks that wait for this one
        fail as well."""
        if self._engine.lanes.error is not None:
            self._communicators.hang_up()
        self._engine.lanes.close()
        self._communicators.close()
