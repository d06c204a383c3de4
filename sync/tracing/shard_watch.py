"""Stand-ins for the collectives of a model of FSDP2 that note when FSDP asks for them, while a clock stands still.

The collectives run as ever, but one at a time: nobody computes beside them. So the times of a recording are those of
computing alone, as with DDP, whose gradients are averaged after backward.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Work

from gckernels.devices import synchronize

from ..communication.cores import Moment
from ..frontends.sharded.shard_groups import ShardGroup
from ..frontends.sharded.stand_ins import ReplicaGroup, ShardComm
from .watch import Clock, HostClock, Mark


class ComputingClock(HostClock):
    """A clock that stands still while parameters and gradients are sent.

    Args:
        device: the device of the training, whose work has ended when the clock stops.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._lost = device, (0.0, 0.0)

    def mark(self) -> Mark:
        now = Moment.now()
        return now._replace(at_s=now.at_s - self._lost[0], waited_s=now.waited_s - self._lost[1])

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """A context in which the clock stands still."""
        self._settle()
        start = Moment.now()
        try:
            yield
        finally:
            self._settle()
            now = Moment.now()
            self._lost = self._lost[0] + now.elapsed_s(start), self._lost[1] + now.waiting_s(start)

    def _settle(self) -> None:
        synchronize(self._device)


@dataclass
class MarkedGather:
    """A gather of the parameters of a group."""

    group: int  # the number of the group
    asked: Mark  # when FSDP asked for it
    needed: Mark | None = None  # when the computation needed it; None if it has not

    def times(self, clock: Clock, start: Mark) -> list[list[float]]:
        """The seconds from ``start`` until it was asked for and needed, and the parts of them in which the thread
        waited for a core that other threads had."""
        assert self.needed is not None
        return [
            [seconds(start, self.asked), seconds(start, self.needed)] for seconds in (clock.seconds, clock.waiting_s)
        ]


class _Arrived(Work):
    """A gather that has ended, for which FSDP waits when it needs the parameters."""

    def __init__(self, needed: Callable[[], None]) -> None:
        super().__init__()
        self._needed = needed

    def wait(self, *_: Any) -> bool:
        self._needed()
        return True


class ShardWatch:
    """The stand-ins of a model, until they are removed.

    Args:
        groups: the groups of parameters of the model.
        device: the device of the model.
        keep: called with the name and the gradient of each parameter on this rank, before a reduction.

    Attributes:
        clock: stands still while something is sent.
        gathers: the gathers since the last call of :meth:`end_step`.
        reduced: the numbers of the groups that were reduced since then, in order.
    """

    def __init__(
        self, groups: Sequence[ShardGroup], device: torch.device, keep: Callable[[str, torch.Tensor], None]
    ) -> None:
        self.clock, self._groups, self._keep = ComputingClock(device), groups, keep
        self.gathers: list[MarkedGather] = []
        self.reduced: list[int] = []
        for index, group in enumerate(groups):
            self._stand_in(index, group)

    def _stand_in(self, index: int, group: ShardGroup) -> None:
        group.all_gather = ShardComm(group.all_gather, lambda call, _: self._gather(index, call))
        group.reduce_scatter = ShardComm(
            group.reduce_scatter, lambda call, given: self._reduce(index, call, given["input_tensor"])
        )
        if group.is_replicated:
            group.replicas = ReplicaGroup(group.replicas, functools.partial(self._average, index, group.replicas))

    def remove(self) -> None:
        """Give FSDP its collectives back."""
        for group in self._groups:
            group.restore()

    def end_step(self) -> None:
        """Begin the next step."""
        self.gathers, self.reduced = [], []

    def _gather(self, index: int, call: Callable[[], Any]) -> Work:
        gather = MarkedGather(index, self.clock.mark())
        self.gathers.append(gather)
        with self.clock.stopped():
            _finish(call())

        def needed() -> None:
            gather.needed = self.clock.mark()

        return _Arrived(needed)

    def _reduce(self, index: int, call: Callable[[], Any], rows: torch.Tensor) -> None:
        with self.clock.stopped():
            self._keep_gradients(index, rows)
            _finish(call())
        self.reduced.append(index)

    def _keep_gradients(self, index: int, vector: torch.Tensor) -> None:
        """Keep the gradients of a group, unless some parameters have none."""
        group = self._groups[index]
        shards, row = list(group.shards()), sum(shard.row for shard in group.shards())
        if not row or vector.numel() % row:
            return
        rows, parameters = vector.view(-1, row), group.parameters()
        for shard in shards:
            parameter = parameters[shard.name]
            gradient = rows[:, shard.start : shard.start + shard.row].reshape(-1)
            if gradient.numel() >= parameter.numel():
                self._keep(shard.name, gradient[: parameter.numel()].view(parameter.shape))

    def _average(self, index: int, replicas: dist.ProcessGroup, vector: torch.Tensor, operation: Any) -> bool:
        with self.clock.stopped():
            if self._groups[index].shard_of() is None:  # FSDP reduces nothing before
                self._keep_gradients(index, vector)
                self.reduced.append(index)
            dist.all_reduce(vector, op=operation, group=replicas)
        return True


def _finish(result: Any) -> None:
    if isinstance(result, Work):
        result.wait()
