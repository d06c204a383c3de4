"""Collectives bound to their buffers.

:func:`bind_collective` takes a buffer to receive into, and returns it with a function that issues the collective
and returns one that waits for its end. Payloads of several units travel side by side in one buffer, ``uint8 [sources,
chunks, nbytes]``; raw data travels in one vector for each chunk.
Exchanges over a link with connections for both directions are those of :mod:`~gckernels.sync.messages.exchanges`;
everything else is a collective of ``torch.distributed``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, assert_never

import torch
import torch.distributed as dist

from ..communication.collectives import all_gather, reduce_scatter
from ..communication.links import RankConnections
from ..programs.steps import AllGather, AllReduce, AllToAll, Broadcast, Collective, Gather, Hop, Reduce, ReduceScatter
from ..resources.stage import Issue, Wait
from . import exchanges

New = Callable[[Sequence[int]], torch.Tensor]
"""A function that returns a buffer with a shape, of the dtype of the data to send and in the same memory."""


def bind_collective(
    step: Collective, sent: torch.Tensor, link: RankConnections, root: int, closes: bool, dtype: torch.dtype, new: New
) -> tuple[torch.Tensor, Issue]:
    """A collective. It adds raw data; for a mean, every rank must have divided its data by the number of ranks.

    Args:
        sent: ``[sources, chunks, n]``, contiguous: the data to send, or that to receive in a broadcast. Raw data is one
            source and, unless a reduce-scatter splits it, one chunk.
        link: the connections to the other ranks of its level.
        root: rank of the root of a reduce, gather or broadcast in the level.
        closes: whether an all-gather concatenates shards, instead of payloads for the same elements.
        dtype: dtype of the numbers that an all-reduce adds.
        new: makes the buffers.

    Returns:
        The received data, ``[sources', chunks', n]`` (after a reduce or gather, only at the root), and the function
        that issues the collective.
    """
    sources, chunks, n = sent.shape
    ranks = link.ranks
    match step:
        case AllReduce():
            numbers = sent.view(dtype)
            return sent, _issuing(lambda: dist.all_reduce(numbers, group=link.group, async_op=True))
        case Reduce():
            return sent, _issuing(lambda: dist.reduce(sent, group_dst=root, group=link.group, async_op=True))
        case Broadcast():
            return sent, _issuing(lambda: dist.broadcast(sent, group_src=root, group=link.group, async_op=True))
        case ReduceScatter():
            received = new((sources, chunks // ranks, n))
            whole, shard = sent.view(-1), received.view(-1)
            return received, _issuing(lambda: reduce_scatter(shard, whole, group=link.group, async_op=True))
        case Gather() if link.index != root:
            return sent, _issuing(lambda: dist.gather(sent, None, group_dst=root, group=link.group, async_op=True))
        case Gather():
            received = new((ranks * sources, chunks, n))
            parts = list(torch.split(received, sources))
            return received, _issuing(lambda: dist.gather(sent, parts, group_dst=root, group=link.group, async_op=True))
        case AllToAll():
            received = new((ranks * sources, chunks // ranks, n))
            if sources == 1:
                return received, bind_all_to_all(link, sent.view(received.shape), received)
            order = sent.view(sources, ranks, chunks // ranks, n).transpose(0, 1)
            ordered = new(received.shape)
            exchange = bind_all_to_all(link, ordered, received)

            def reorder_and_exchange() -> Wait:
                ordered.view(order.shape).copy_(order)
                return exchange()

            return received, reorder_and_exchange
        case AllGather() if closes and sources > 1:
            gathered = new((ranks, sources, chunks, n))
            received = new((sources, ranks * chunks, n))
            gather = bind_all_gather(link, sent, gathered)

            def gather_and_concatenate() -> Wait:
                wait = gather()

                def wait_and_concatenate() -> None:
                    wait()
                    received.view(sources, ranks, chunks, n).copy_(gathered.transpose(0, 1))

                return wait_and_concatenate

            return received, gather_and_concatenate
        case AllGather():
            shape = (sources, ranks * chunks) if closes else (ranks * sources, chunks)
            received = new((*shape, n))
            return received, bind_all_gather(link, sent, received)
        case Hop():
            received = new(sent.shape)
            return received, _bind_hop(link, sent, received)
        case _:
            assert_never(step)


def bind_all_gather(link: RankConnections, row: torch.Tensor, received: torch.Tensor) -> Issue:
    """The call that gathers the rows of all ranks, one after the other, in ``received``."""
    row, received = row.view(-1), received.view(-1)
    if link.has_both_directions:
        return exchanges.bind_all_gather(link, row, received.view(link.ranks, row.numel()))
    return _issuing(lambda: all_gather(received, row, group=link.group, async_op=True))


def bind_all_to_all(link: RankConnections, sent: torch.Tensor, received: torch.Tensor) -> Issue:
    """The call that sends each rank its row of ``sent``, ``ranks`` rows one after the other."""
    if link.has_both_directions:
        shape = link.ranks, sent.numel() // link.ranks
        return exchanges.bind_all_to_all(link, sent.view(shape), received.view(shape))
    return _issuing(lambda: dist.all_to_all_single(received, sent, group=link.group, async_op=True))


def _issuing(collective: Callable[[], Any]) -> Issue:
    """The function that issues a collective of ``torch.distributed``.

    Args:
        collective: calls it with ``async_op=True``.
    """

    def issue() -> Wait:
        work: dist.Work = collective()
        return work.wait

    return issue


def _bind_hop(link: RankConnections, sent: torch.Tensor, received: torch.Tensor) -> Issue:
    """The call that sends a tensor to the next rank of a ring, and receives one from the previous rank."""
    if link.has_both_directions:
        return exchanges.bind_hop(link, sent, received)

    def pass_on() -> Wait:
        calls = [
            dist.P2POp(dist.isend, sent, group=link.group, group_peer=(link.index + 1) % link.ranks),
            dist.P2POp(dist.irecv, received, group=link.group, group_peer=(link.index - 1) % link.ranks),
        ]
        return partial(exchanges.wait_for, dist.batch_isend_irecv(calls))

    return pass_on
