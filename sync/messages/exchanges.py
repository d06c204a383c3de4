"""Exchanges on Gloo that use both directions of a link at the same time, in trains as well as alone.

Every rank sends rows to the others and receives rows from them over a
:class:`~gckernels.sync.communication.links.RankConnections`.
An exchange posts all receives before it sends anything, so that no sender waits for a receiver. There are two ways:

- *at once*: every rank sends to all others at the same time. Rows take one hop, but ``ranks - 1`` senders meet at every
  receiver.
- *around*: rows go around a ring; every rank passes on what has arrived from the previous rank. Every receiver has one
  sender, and rows take up to ``ranks - 1`` hops. It is for all-gathers.

:func:`bind_all_gather` chooses by the number of ranks and the bytes of a row. The rule comes from measurements on links
from 100 Mbit/s to loopback (``docs/decisions/0010-one-rule-for-exchanges.md``).

An exchange is issued in one call and waited for in another, so the next one of the same link can be on its way when an
exchange ends. Two may be: :data:`~gckernels.sync.programs.lanes.IN_FLIGHT`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist

from ..communication.links import RankConnections, Transfer
from ..resources.stage import Issue, Wait

AROUND_NBYTES = 1 << 15
"""The bytes of a row from which an all-gather of more than two ranks goes around."""


def bind_all_gather(link: RankConnections, row: torch.Tensor, received: torch.Tensor) -> Issue:
    """The exchange that sends ``row`` to all ranks.

    Args:
        link: the connections, with both directions.
        row: ``[n]``, contiguous.
        received: ``[ranks, n]``, contiguous, for the rows of all ranks.
    """
    rows = list(received)
    if link.ranks > 2 and row.nbytes >= AROUND_NBYTES:
        exchange = partial(send_around, link, [row if index == link.index else each for index, each in enumerate(rows)])
    else:
        exchange = partial(send_at_once, link, [row] * link.ranks, rows)
    return partial(_issue, exchange, row, rows[link.index])


def bind_all_to_all(link: RankConnections, sent: torch.Tensor, received: torch.Tensor) -> Issue:
    """The exchange that sends row ``r`` of ``sent`` to rank ``r``.

    Args:
        link: the connections, with both directions.
        sent: ``[ranks, n]``, contiguous.
        received: room for a row from each rank, ``[ranks, n]``.
    """
    exchange = partial(send_at_once, link, list(sent), list(received))
    return partial(_issue, exchange, sent[link.index], received[link.index])


def bind_hop(link: RankConnections, sent: torch.Tensor, received: torch.Tensor) -> Issue:
    """The exchange that sends a tensor to the next rank and receives one from the previous rank."""
    following, previous = (link.index + 1) % link.ranks, (link.index - 1) % link.ranks

    def issue() -> Wait:
        turn = link.turn()
        return partial(wait_for, [link.receive(received, previous, turn), link.send(sent, following, turn)])

    return issue


def wait_for(works: Sequence[dist.Work | Transfer]) -> None:
    """Wait for the end of all ``works``."""
    for work in works:
        work.wait()


def _issue(exchange: Issue, own: torch.Tensor, room: torch.Tensor) -> Wait:
    """Issue an exchange, and copy this rank's own row meanwhile."""
    wait = exchange()
    room.copy_(own)
    return wait


# -------------------------------------------------------------------- ways


def send_at_once(link: RankConnections, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor]) -> Wait:
    """Send to all ranks at the same time.

    Args:
        outgoing: the row for each rank.
        incoming: room for a row from each rank. The rows of this rank itself are left alone.
    """
    ranks, index, turn = link.ranks, link.index, link.turn()
    works = [link.receive(incoming[(index - each) % ranks], (index - each) % ranks, turn) for each in range(1, ranks)]
    works += [link.send(outgoing[(index + each) % ranks], (index + each) % ranks, turn) for each in range(1, ranks)]
    return partial(wait_for, works)


def send_around(link: RankConnections, rows: Sequence[torch.Tensor]) -> Wait:
    """Gather all rows around a ring.

    Args:
        rows: the row of this rank, and room for those of the others.
    """
    ranks, index, turn = link.ranks, link.index, link.turn()
    following, previous = (index + 1) % ranks, (index - 1) % ranks
    own, *passing = (rows[(index - hop) % ranks] for hop in range(ranks))
    arrivals = [link.receive(row, previous, turn) for row in passing]
    departures = [link.send(own, following, turn)]

    def wait() -> None:
        for arrival, row in zip(arrivals[:-1], passing, strict=False):
            arrival.wait()
            departures.append(link.send(row, following, turn))
        wait_for([arrivals[-1], *departures])

    return wait
