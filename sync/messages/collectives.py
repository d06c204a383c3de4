"""Collectives bound to their buffers.

Payloads of several units travel side by side in one buffer, ``uint8 [sources, chunks, nbytes]``; raw data travels in
one vector. The functions here allocate the buffer to receive into, and return it with a function that issues the
collective and returns one that waits for its end.
Exchanges over a link with connections for both directions are those of :mod:`~gckernels.sync.messages.exchanges`;
everything else is a collective of ``torch.distributed``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, assert_never

import torch
import torch.distributed as dist

from ..communication.collectives import all_gather, reduce_scatter
from ..communication.links import RankConnections
from ..programs.steps import AllGather, AllReduce, AllToAll, Broadcast, Collective, Gather, Hop, Reduce, ReduceScatter
from ..resources.stage import Issue, Wait
from . import exchanges


def bind_payload_collective(
    step: Collective, buffer: torch.Tensor, link: RankConnections, root: int, closes: bool, dtype: torch.dtype
) -> tuple[torch.Tensor, Issue]:
    """A collective of payloads.

    Args:
        step: the collective.
        buffer: ``uint8 [sources, chunks, nbytes]``, contiguous: the payloads to send, or those to receive in a
            broadcast.
        link: the connections to the other ranks of its level.
        root: rank of the root of a gather or broadcast in the level.
        closes: whether an all-gather concatenates shards, instead of payloads for the same elements.
        dtype: dtype of the numbers in payloads that are added.

    Returns:
        The buffer with the received payloads, ``[sources', chunks', nbytes]`` (after a gather, only at the root), and
        the function that issues the collective.
    """
    sources, chunks, nbytes = buffer.shape
    ranks, group = link.ranks, link.group
    match step:
        case AllReduce():
            numbers = buffer.view(dtype)
            return buffer, _issuing(lambda: dist.all_reduce(numbers, group=group, async_op=True))
        case Broadcast():
            return buffer, _issuing(lambda: dist.broadcast(buffer, group_src=root, group=group, async_op=True))
        case Gather() if link.index != root:
            return buffer, _issuing(lambda: dist.gather(buffer, None, group_dst=root, group=group, async_op=True))
        case Gather():
            received = _zeros_like(buffer, ranks * sources, chunks, nbytes)
            parts = list(torch.split(received, sources))
            return received, _issuing(lambda: dist.gather(buffer, parts, group_dst=root, group=group, async_op=True))
        case AllToAll():
            received = _zeros_like(buffer, ranks * sources, chunks // ranks, nbytes)
            if sources == 1:
                return received, _bind_all_to_all(link, buffer.view(received.shape), received)
            order = buffer.view(sources, ranks, chunks // ranks, nbytes).transpose(0, 1)
            sent = torch.zeros_like(received)
            exchange = _bind_all_to_all(link, sent, received)

            def reorder_and_exchange() -> Wait:
                sent.view(order.shape).copy_(order)
                return exchange()

            return received, reorder_and_exchange
        case AllGather() if closes and sources > 1:
            gathered = _zeros_like(buffer, ranks, sources, chunks, nbytes)
            received = _zeros_like(buffer, sources, ranks * chunks, nbytes)
            gather = _bind_all_gather(link, buffer, gathered)

            def gather_and_concatenate() -> Wait:
                wait = gather()

                def wait_and_concatenate() -> None:
                    wait()
                    received.view(sources, ranks, chunks, nbytes).copy_(gathered.transpose(0, 1))

                return wait_and_concatenate

            return received, gather_and_concatenate
        case AllGather():
            shape = (sources, ranks * chunks) if closes else (ranks * sources, chunks)
            received = _zeros_like(buffer, *shape, nbytes)
            return received, _bind_all_gather(link, buffer, received)
        case Reduce() | ReduceScatter() | Hop():
            raise AssertionError(f"no collective of payloads: {step}")
        case _:
            assert_never(step)


def _bind_all_gather(link: RankConnections, row: torch.Tensor, received: torch.Tensor) -> Issue:
    """The call that gathers the rows of all ranks, one after the other, in ``received``."""
    row, received = row.view(-1), received.view(-1)
    if link.has_both_directions:
        return exchanges.bind_all_gather(link, row, received.view(link.ranks, row.numel()))
    return _issuing(lambda: all_gather(received, row, group=link.group, async_op=True))


def _bind_all_to_all(link: RankConnections, sent: torch.Tensor, received: torch.Tensor) -> Issue:
    """The call that sends each rank its row of ``sent``, ``ranks`` rows one after the other."""
    if link.has_both_directions:
        shape = link.ranks, sent.numel() // link.ranks
        return exchanges.bind_all_to_all(link, sent.view(shape), received.view(shape))
    return _issuing(lambda: dist.all_to_all_single(received, sent, group=link.group, async_op=True))


def issue_all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> Wait:
    """Issue an all-reduce; returns a function that waits for its end."""
    return _issuing(lambda: dist.all_reduce(tensor, group=group, async_op=True))()


def _issuing(collective: Callable[[], Any]) -> Issue:
    """The function that issues a collective of ``torch.distributed``.

    Args:
        collective: calls it with ``async_op=True``.
    """

    def issue() -> Wait:
        work: dist.Work = collective()
        return work.wait

    return issue


def _zeros_like(buffer: torch.Tensor, *shape: int) -> torch.Tensor:
    """Zeros of another shape on the same device, pinned if ``buffer`` is."""
    return buffer.new_zeros(shape, pin_memory=buffer.is_pinned())


def bind_hop(buffer: torch.Tensor, link: RankConnections) -> tuple[torch.Tensor, Issue]:
    """One hop around a ring: every rank sends ``buffer`` to the next rank.

    Returns:
        The buffer for the data from the previous rank, and the function that issues the collective.
    """
    received = torch.zeros_like(buffer)
    if link.has_both_directions:
        return received, exchanges.bind_hop(link, buffer, received)

    def pass_on() -> Wait:
        calls = [
            dist.P2POp(dist.isend, buffer, group=link.group, group_peer=(link.index + 1) % link.ranks),
            dist.P2POp(dist.irecv, received, group=link.group, group_peer=(link.index - 1) % link.ranks),
        ]
        return partial(exchanges.wait_for, dist.batch_isend_irecv(calls))

    return received, pass_on


def bind_raw_collective(
    step: Collective, vector: torch.Tensor, link: RankConnections, root: int
) -> tuple[torch.Tensor, Issue]:
    """A collective of raw data. It adds; for a mean, every rank must have divided its data by the number of ranks.

    Args:
        step: the collective.
        vector: ``[numel]``, for a reduce-scatter ``[ranks, numel]``: the data to send, or that to receive in a
            broadcast.
        link: the connections to the other ranks of its level.
        root: rank of the root of a reduce or broadcast in the level.

    Returns:
        The vector with the received data, ``[numel]``, after an all-gather ``[ranks, numel]``; and the
        function that issues the collective.
    """
    group = link.group
    match step:
        case AllReduce():
            return vector, _issuing(lambda: dist.all_reduce(vector, group=group, async_op=True))
        case Reduce():
            return vector, _issuing(lambda: dist.reduce(vector, group_dst=root, group=group, async_op=True))
        case Broadcast():
            return vector, _issuing(lambda: dist.broadcast(vector, group_src=root, group=group, async_op=True))
        case ReduceScatter():
            received = torch.zeros_like(vector[0])
            return received, _issuing(lambda: reduce_scatter(received, vector.view(-1), group=group, async_op=True))
        case AllGather():
            received = vector.new_zeros(link.ranks, vector.numel())
            return received, _bind_all_gather(link, vector, received)
        case AllToAll() | Gather() | Hop():
            raise AssertionError(f"no collective of raw data: {step}")
        case _:
            assert_never(step)
