"""Collectives bound to their buffers.

Payloads of several units travel side by side in one buffer, ``uint8 [sources, chunks, nbytes]``; raw data travels in
one vector. The functions here allocate the buffer to receive into, and return it with a function that communicates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import assert_never

import torch
import torch.distributed as dist

from ..programs.steps import AllGather, AllReduce, AllToAll, Broadcast, Collective, Gather, Hop, Reduce, ReduceScatter
from ..resources.communicators import all_gather, reduce_scatter

Call = Callable[[], object]
"""Runs a collective and returns when it is done; on a CUDA device, when it is enqueued."""


def bind_payload_collective(
    step: Collective,
    buffer: torch.Tensor,
    group: dist.ProcessGroup,
    ranks: int,
    index: int,
    root: int,
    closes: bool,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, Call]:
    """A collective of payloads.

    Args:
        step: the collective.
        buffer: ``uint8 [sources, chunks, nbytes]``, contiguous: the payloads to send, or those to receive in a
            broadcast.
        group: the process group.
        ranks: number of its ranks.
        index: rank of this process in it.
        root: rank of the root of a gather or broadcast in it.
        closes: whether an all-gather concatenates shards, instead of payloads for the same elements.
        dtype: dtype of the numbers in payloads that are added.

    Returns:
        The buffer with the received payloads, ``[sources', chunks', nbytes]`` (after a gather, only at the root), and
        the call.
    """
    sources, chunks, nbytes = buffer.shape
    match step:
        case AllReduce():
            numbers = buffer.view(dtype)
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

            def concatenate() -> None:
                all_gather(gathered.view(-1), buffer.view(-1), group=group)
                received.view(sources, ranks, chunks, nbytes).copy_(gathered.transpose(0, 1))

            return received, concatenate
        case AllGather():
            shape = (sources, ranks * chunks) if closes else (ranks * sources, chunks)
            received = _zeros_like(buffer, *shape, nbytes)
            return received, lambda: all_gather(received.view(-1), buffer.view(-1), group=group)
        case Reduce() | ReduceScatter() | Hop():
            raise AssertionError(f"no collective of payloads: {step}")
        case _:
            assert_never(step)


def _zeros_like(buffer: torch.Tensor, *shape: int) -> torch.Tensor:
    """Zeros of another shape on the same device, pinned if ``buffer`` is."""
    return buffer.new_zeros(shape, pin_memory=buffer.is_pinned())


def bind_hop(buffer: torch.Tensor, group: dist.ProcessGroup, ranks: int, index: int) -> tuple[torch.Tensor, Call]:
    """One hop around a ring: rank ``index`` of ``ranks`` sends ``buffer`` to the next rank.

    Returns:
        The buffer for the data from the previous rank, and the call.
    """
    received = torch.zeros_like(buffer)

    def pass_on() -> None:
        calls = [
            dist.P2POp(dist.isend, buffer, group=group, group_peer=(index + 1) % ranks),
            dist.P2POp(dist.irecv, received, group=group, group_peer=(index - 1) % ranks),
        ]
        for work in dist.batch_isend_irecv(calls):
            work.wait()

    return received, pass_on


def bind_raw_collective(
    step: Collective, vector: torch.Tensor, group: dist.ProcessGroup, ranks: int, root: int
) -> tuple[torch.Tensor, Call]:
    """A collective of raw data. It adds; for a mean, every rank must have divided its data by ``ranks``.

    Args:
        step: the collective.
        vector: ``[numel]``, for a reduce-scatter ``[ranks, numel]``: the data to send, or that to receive in a
            broadcast.
        group: the process group.
        ranks: number of its ranks.
        root: rank of the root of a reduce or broadcast in it.

    Returns:
        The vector with the received data, ``[numel]``, after an all-gather ``[ranks, numel]``; and the call.
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
        case AllToAll() | Gather() | Hop():
            raise AssertionError(f"no collective of raw data: {step}")
        case _:
            assert_never(step)
