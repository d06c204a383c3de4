"""Agreement between ranks while they measure: the values of the first rank, and the slowest one's times."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist


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
