"""Agreement between ranks while they measure: whether to go on, and the slowest one's times."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

Clock = Callable[[], float]

_LATE = 1.05
"""The part of its seconds after which a measurement is cut off."""


class OutOfTime(Exception):
    """Raised on all ranks together when a measurement is cut off."""


class Ranks:
    """The ranks of a measurement. Every method is collective and returns the same on all ranks.

    Args:
        group: all ranks.
        device: a device whose tensors the group can send.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)

    def first(self, value: float) -> float:
        """The value of rank 0."""
        sent = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.broadcast(sent, group_src=0, group=self.group)
        return float(sent.item())

    def first_text(self, text: str) -> str:
        """The text of rank 0."""
        encoded = text.encode()
        room = torch.zeros(int(self.first(len(encoded))), dtype=torch.uint8, device="cpu")
        if self.rank == 0 and encoded:
            room = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
        if not room.numel():
            return ""
        sent = room.to(self.device)
        dist.broadcast(sent, group_src=0, group=self.group)
        return bytes(sent.tolist()).decode()

    def slowest(self, values: Sequence[float]) -> list[float]:
        """The largest of all ranks, of each value."""
        sent = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(sent, dist.ReduceOp.MAX, group=self.group)
        return list(map(float, sent.tolist()))

    def meet(self) -> None:
        """Return when all ranks have called this."""
        self.slowest([0.0])


class TimedRanks(Ranks):
    """Ranks whose measurement is cut off on all of them as soon as one of them says so.

    Args:
        group, device: as for :class:`Ranks`.
        is_over: whether this rank cuts it off.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, is_over: Callable[[], bool]) -> None:
        super().__init__(group, device)
        self._is_over = is_over

    def slowest(self, values: Sequence[float]) -> list[float]:
        """The largest of all ranks, of each value.

        Raises:
            OutOfTime: a rank cuts the measurement off. Every rank raises.
        """
        *found, is_over = super().slowest([*values, float(self._is_over())])
        if is_over:
            raise OutOfTime
        return found


class Budget:
    """The seconds that a measurement may take. Rank 0 decides, and all ranks stop together.

    Args:
        seconds: how long it may take.
        ranks: the ranks.
        clock: returns seconds.
    """

    def __init__(self, seconds: float, ranks: Ranks, clock: Clock = time.monotonic) -> None:
        self.seconds, self._ranks, self._clock = seconds, ranks, clock
        self._start_s = clock()

    @property
    def spent_s(self) -> float:
        """Seconds that this rank has spent."""
        return self._clock() - self._start_s

    @property
    def is_over(self) -> bool:
        """Whether this rank has spent more seconds than it may by far, so that what is in progress is cut off."""
        return self.spent_s > _LATE * self.seconds

    def left_s(self) -> float:
        """Seconds that are left on rank 0; 0 if the budget is spent. Collective."""
        return self._ranks.first(max(self.seconds - self.spent_s, 0.0))

    def allows(self, expected_s: float) -> bool:
        """Whether something that takes ``expected_s`` on rank 0 still fits. Collective."""
        return bool(self._ranks.first(float(self.spent_s + expected_s <= self.seconds)))
