"""Announcements of ranks to each other before FSDP reduces a group of gradients, on the host.

FSDP reduces the gradients of a group that are there, and takes for granted that they are there on all ranks. Otherwise
ranks reduce different things, or some reduce and others do not, and all of them wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from ...communication.groups import Wanted, make_groups
from ...communication.links import RankConnections
from ...engine.failures import failure
from .shard_groups import ShardGroup

_HEAD_NBYTES = 4  # the number of the group


class Announcements:
    """The announcements of all ranks, in the order of their reductions. Construction is collective.

    Args:
        group: the ranks that average the gradients.
        groups: the groups of parameters.
    """

    def __init__(self, group: dist.ProcessGroup, groups: Sequence[ShardGroup]) -> None:
        host, ranks = torch.device("cpu"), dist.get_process_group_ranks(group)
        timeout = group._get_backend(host).options._timeout
        made = make_groups(group, host, [Wanted(ranks, "announcements", dist.Backend.GLOO, timeout)])
        self._link = RankConnections(len(ranks), group.rank(), made)
        self._ranks, self._groups = len(ranks), groups
        self._row_nbytes = _HEAD_NBYTES + max((len(each.names) for each in groups), default=0)
        self._last = 0
        self._waiting: deque[tuple[int, dist.Work, torch.Tensor, torch.Tensor]] = deque()

    def say(self, index: int, used: Sequence[bool]) -> int:
        """Announce that this rank reduces a group now; never blocks. All ranks do so in the same order.

        Args:
            index: the number of the group.
            used: whether each of its parameters has a gradient.

        Returns:
            The number of the announcement.
        """
        row = bytes((*index.to_bytes(_HEAD_NBYTES, "little"), *used)).ljust(self._row_nbytes, b"\0")
        sent = torch.frombuffer(bytearray(row * self._ranks), dtype=torch.uint8)
        received = torch.empty(self._ranks, self._row_nbytes, dtype=torch.uint8, device="cpu")
        work = dist.all_to_all_single(received.view(-1), sent, group=self._link.group, async_op=True)
        assert work is not None
        self._last += 1
        self._waiting.append((self._last, work, received, sent))
        return self._last

    @property
    def last(self) -> int:
        """The number of the last announcement."""
        return self._last

    def check(self, number: int) -> None:
        """Wait until all ranks have announced everything up to an announcement.

        Raises:
            RuntimeError: they have not announced the same. Every rank raises.
        """
        while self._waiting and self._waiting[0][0] <= number:
            _, work, received, _ = self._waiting.popleft()
            try:
                work.wait()
            except RuntimeError as error:
                raise failure(error, "a rank has not said which gradients it reduces") from error
            if (received != received[0]).any():
                self._waiting.clear()
                raise RuntimeError(f"gckernels: {self._problem([bytes(row.tolist()) for row in received])}")

    def _problem(self, rows: Sequence[bytes]) -> str:
        """Why the announcements of the ranks do not go together."""
        indices = [int.from_bytes(row[:_HEAD_NBYTES], "little") for row in rows]
        if len(set(indices)) > 1:
            other = next(rank for rank, index in enumerate(indices) if index != indices[0])
            first, second = (self._groups[indices[rank]].names[0] for rank in (0, other))
            return (
                f"rank 0 reduces the gradients of {first} and others, and rank {other} those of {second} and others: "
                f"one of them has used a module that the other has not; {_CURE}"
            )
        names = self._groups[indices[0]].names
        used = [[rank for rank, row in enumerate(rows) if row[_HEAD_NBYTES + place]] for place in range(len(names))]
        place = next(place for place, found in enumerate(used) if 0 < len(found) < len(rows))
        without = sorted(set(range(len(rows))) - set(used[place]))
        return (
            f"parameter {names[place]} has a gradient on {_ranks(used[place])} and none on {_ranks(without)}, and FSDP "
            f"reduces it on all ranks or on none; {_CURE}"
        )

    def close(self) -> None:
        """Destroy the process group; further calls do nothing."""
        if self._waiting:  # a group ends when all that was begun in it has ended
            self._link.hang_up()
        self._waiting.clear()
        self._link.close()


def _ranks(numbers: Sequence[int]) -> str:
    listed = ", ".join(map(str, numbers[:8])) + (", ..." if numbers[8:] else "")
    return f"rank{'s' if numbers[1:] else ''} {listed}"


_CURE = (
    "call model.set_reduce_scatter_unused_params(True) before training, which reduces zeros for it"
    if hasattr(FSDPModule, "set_reduce_scatter_unused_params")
    else "add 0 times its sum to the loss where it is not used"
)
