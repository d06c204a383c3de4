"""Collectives bound to their buffers: what a rank has before, what it has afterwards, and the call that does it.

Payloads of several units travel side by side in one buffer, ``uint8 [sources, chunks, nbytes]``; raw data in one
vector, every unit laid out for a full shard. The functions here allocate what is received and return it with the
call. They are given what is local, so a test can run them with any group.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from ..programs.steps import AllGather, AllReduce, AllToAll, Broadcast, Collective, Gather, Reduce, ReduceScatter
from ..resources.communicators import all_gather, reduce_scatter

Call = Callable[[], object]


def of_payloads(
    step: Collective,
    buffer: torch.Tensor,
    group: dist.ProcessGroup,
    ranks: int,
    index: int,
    root: int,
    closes: bool,
    number: torch.dtype,
) -> tuple[torch.Tensor, Call]:
    """A collective of payloads.

    Args:
        step: which one.
        buffer: ``uint8 [sources, chunks, nbytes]``, contiguous; what the root has, or where it will be, of a broadcast.
        group: of ``ranks`` ranks, in which the root is ``root``.
        ranks: how many there are.
        index: which of them this is.
        root: of gather and broadcast.
        closes: an all-gather puts shards together, other than payloads of the same elements.
        number: what payloads are made of where they are added up.

    Returns:
        What is received, ``[sources', chunks', nbytes]``, at the root alone if it is the one that receives, and the
        call.
    """
    sources, chunks, nbytes = buffer.shape
    match step:
        case AllReduce():
            numbers = buffer.view(number)
            return buffer, lambda: dist.all_reduce(numbers, group=group)
        case Broadcast():
            return buffer, lambda: dist.broadcast(buffer, group_src=root, group=group)
        case Gather() if index != root:
            return buffer, lambda: dist.gather(buffer, None, group_dst=root, group=group)
        case Gather():
            received = _zeros_like(buffer, ranks * sources, chunks, nbytes)
            parts = list(torch.split(received, sources))
            return received, lambda: dist.gather(buffer, parts, group_dst=root, group=group)
        case AllToAll():
            received = _zeros_like(buffer, ranks * sources, chunks // ranks, nbytes)
            if sources == 1:
                sent = buffer.view(received.shape)
                return received, lambda: dist.all_to_all_single(received, sent, group=group)
            order = buffer.view(sources, ranks, chunks // ranks, nbytes).transpose(0, 1)
            sent = torch.zeros_like(received)

            def exchange() -> None:
                sent.view(order.shape).copy_(order)
                dist.all_to_all_single(received, sent, group=group)

            return received, exchange
        case AllGather() if closes and sources > 1:
            gathered = _zeros_like(buffer, ranks, sources, chunks, nbytes)
            received = _zeros_like(buffer, sources, ranks * chunks, nbytes)

            def put_together() -> None:
                all_gather(gathered.view(-1), buffer.view(-1), group=group)
                received.view(sources, ranks, chunks, nbytes).copy_(gathered.transpose(0, 1))

            return received, put_together
        case AllGather():
            shape = (sources, ranks * chunks) if closes else (ranks * sources, chunks)
            received = _zeros_like(buffer, *shape, nbytes)
            return received, lambda: all_gather(received.view(-1), buffer.view(-1), group=group)
    raise AssertionError(f"no collective of payloads: {step}")


def _zeros_like(buffer: torch.Tensor, *shape: int) -> torch.Tensor:
    """Of another shape, in the same memory; its pages are locked if those are."""
    return buffer.new_zeros(shape, pin_memory=buffer.is_pinned())


def hop(buffer: torch.Tensor, group: dist.ProcessGroup, ranks: int, index: int) -> tuple[torch.Tensor, Call]:
    """Send ``buffer`` from rank ``index`` to the next one of a ring; what comes from the one before, and the call."""
    received = torch.zeros_like(buffer)

    def pass_on() -> None:
        calls = [
            dist.P2POp(dist.isend, buffer, group=group, group_peer=(index + 1) % ranks),
            dist.P2POp(dist.irecv, received, group=group, group_peer=(index - 1) % ranks),
        ]
        for work in dist.batch_isend_irecv(calls):
            work.wait()

    return received, pass_on


def of_raw(
    step: Collective, vector: torch.Tensor, group: dist.ProcessGroup, ranks: int, root: int
) -> tuple[torch.Tensor, Call]:
    """A collective of raw data; sums are means when every rank has divided its own by ``ranks``.

    Args:
        step: which one.
        vector: ``[numel]``; for a reduce-scatter ``[ranks, numel]``; what the root has, or where it will be, of a
            broadcast.
        group: of ``ranks`` ranks, in which the root is ``root``.
        ranks: how many there are.
        root: of reduce and broadcast.

    Returns:
        What is received, ``[numel]``, of an all-gather ``[ranks, numel]``, and the call.
    """
    match step:
        case AllReduce():
            return vector, lambda: dist.all_reduce(vector, group=group)
        case Reduce():
            return vector, lambda: dist.reduce(vector, group_dst=root, group=group)
        case Broadcast():
            return vector, lambda: dist.broadcast(vector, group_src=root, group=group)
        case ReduceScatter():
            received = torch.zeros_like(vector[0])
            return received, lambda: reduce_scatter(received, vector.view(-1), group=group)
        case AllGather():
            received = vector.new_zeros(ranks, vector.numel())
            return received, lambda: all_gather(received.view(-1), vector, group=group)
    raise AssertionError(f"no collective of raw data: {step}")
