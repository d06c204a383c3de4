"""The connections between the ranks of a level.

In Gloo a receiver announces that it is ready on the connection on which it also sends. So the announcement waits behind
its own data. When exchanges follow each other over one connection, the two
directions take turns, and a train of exchanges takes up to twice the time that the link needs. A
:class:`RankConnections` has two Gloo groups, whatever the number of ranks: on one, the connection of each pair of ranks
carries data only from the lower to the higher rank, on the other only back. Small tensors go over the first in both
directions.
"""

from __future__ import annotations

import itertools
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from ..programs.lanes import IN_FLIGHT

ONE_WAY_NBYTES = 1 << 14
"""The bytes of a tensor from which directions have separate groups. Smaller ones delay nothing that comes behind them,
and TCP is slower on connections that carry little data and that one way."""
_NO_TAG = 1 << 16  # no exchange has it

PEER = "gckernels_peer"
"""The attribute of an error that has the rank for which was waited, numbered as in the job."""


class Transfer(NamedTuple):
    """A tensor on its way between this rank and another one, whose errors name that rank."""

    work: dist.Work  # the work of torch.distributed
    peer: int  # the other rank in group
    group: dist.ProcessGroup

    def wait(self) -> None:
        """Wait until the tensor has been sent or received."""
        try:
            self.work.wait()
        except RuntimeError as error:
            setattr(error, PEER, dist.get_global_rank(self.group, self.peer))
            raise


@dataclass(frozen=True)
class RankConnections:
    """The connections of this rank to the other ranks of a level, for one phase, place and channel."""

    ranks: int  # number of ranks
    index: int  # this rank among them
    groups: list[dist.ProcessGroup] = field(default_factory=list)
    """The process group for collectives, which on Gloo also carries data from lower to higher ranks. Where there are
    exchanges, a second one, for data from higher to lower ranks. None if nothing will be sent."""
    _turns: itertools.count[int] = field(default_factory=itertools.count, compare=False)

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group for collectives."""
        if not self.groups:
            raise RuntimeError("gckernels: these connections have been closed")
        return self.groups[0]

    @property
    def has_both_directions(self) -> bool:
        """Whether :meth:`send` and :meth:`receive` can be called."""
        return len(self.groups) == 2

    def hang_up(self) -> None:
        """Close the connections, so that ranks that wait for this one fail, and what this rank has begun ends."""
        for group in filter(_exists, self.groups):
            _hang_up(group)

    def close(self) -> None:
        """Destroy the groups; further calls do nothing. Their threads end here, as nothing else refers to them."""
        while self.groups:
            group = self.groups.pop()
            if _exists(group):
                dist.destroy_process_group(group)

    def turn(self) -> int:
        """The number of the next exchange, which its sends and receives are given.

        It separates an exchange from the others on their way, of which each may still have something to send. All ranks
        issue the exchanges of a link in the same order, so they agree on the number.
        """
        return next(self._turns) % IN_FLIGHT

    def send(self, tensor: torch.Tensor, to: int, turn: int) -> Transfer:
        """Begin to send ``tensor``, contiguous and on the CPU, to a rank of the level, in an exchange."""
        group = self._group(self.index, to, tensor)
        work = dist.isend(tensor, group=group, group_dst=to, tag=turn)
        assert work is not None
        return Transfer(work, to, group)

    def receive(self, tensor: torch.Tensor, sender: int, turn: int) -> Transfer:
        """Begin to receive ``tensor``, contiguous and on the CPU, from a rank of the level, in an exchange.

        Two ranks match what they send and receive in an exchange in the order of their calls.
        """
        group = self._group(sender, self.index, tensor)
        work = dist.irecv(tensor, group=group, group_src=sender, tag=turn)
        assert work is not None
        return Transfer(work, sender, group)

    def _group(self, sender: int, receiver: int, tensor: torch.Tensor) -> dist.ProcessGroup:
        """The group that carries ``tensor``, which has the same size on both ranks."""
        return self.group if sender < receiver or tensor.nbytes < ONE_WAY_NBYTES else self.groups[1]


def _exists(group: dist.ProcessGroup) -> bool:
    """Whether a group has not been destroyed, alone or with all others."""
    return group in dist.distributed_c10d._world.pg_map


def _hang_up(group: dist.ProcessGroup) -> None:
    """Close the connections of this rank in a group of Gloo, so that ranks that wait for it there fail.

    A group that is destroyed keeps its connections as long as anything refers to its operations, as the traceback of an
    error does. Gloo itself closes all of them when a receive times out.
    """
    if dist.get_backend(group) != dist.Backend.GLOO:
        return
    for other in range(group.size()):
        if other != group.rank():
            with suppress(RuntimeError):
                received = torch.empty(1, dtype=torch.uint8, device="cpu")
                work = dist.irecv(received, group=group, group_src=other, tag=_NO_TAG)
                assert work is not None
                work.wait(timedelta(milliseconds=1))
