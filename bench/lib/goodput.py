"""The goodput of links, measured with plain sockets."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time

import torch
import torch.distributed as dist

PROBE_NBYTES, LARGEST_NBYTES = 2**18, 2**27
SECONDS, ROUNDS = 0.3, 5
CHUNK_NBYTES = 2**18


def goodput() -> float:
    """Bytes per second that every rank can send to its neighbour while it receives as much from the other one.

    Collective. The result is the same on all ranks: that of the slowest rank, in the fastest of the rounds. Headers of
    packets are not counted.
    """
    with contextlib.ExitStack() as stack:
        to_next, from_previous = _neighbours(stack)
        nbytes = PROBE_NBYTES
        _transfer(to_next, from_previous, nbytes)
        while (seconds := _transfer(to_next, from_previous, nbytes)) < SECONDS / 2 and nbytes < LARGEST_NBYTES:
            nbytes *= 2
        seconds = min(_transfer(to_next, from_previous, nbytes) for _ in range(ROUNDS))
    return nbytes / seconds


def _neighbours(stack: contextlib.ExitStack) -> tuple[socket.socket, socket.socket]:
    """A connection to the next rank and one from the rank before, closed at the end of ``stack``."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    server = stack.enter_context(socket.create_server((_own_address(), 0)))
    addresses: list[tuple[str, int]] = [("", 0)] * ranks
    dist.all_gather_object(addresses, server.getsockname())
    to_next = stack.enter_context(socket.create_connection(addresses[(rank + 1) % ranks]))
    from_previous = stack.enter_context(server.accept()[0])
    return to_next, from_previous


def _own_address() -> str:
    """The address of the interface from which rank 0 is reached."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # sends nothing
        probe.connect((os.environ["MASTER_ADDR"], 1))
        return str(probe.getsockname()[0])


def _send(to_next: socket.socket, chunk: bytes, times: int) -> None:
    for _ in range(times):
        to_next.sendall(chunk)


def _transfer(to_next: socket.socket, from_previous: socket.socket, nbytes: int) -> float:
    """Seconds until every rank has received ``nbytes`` bytes."""
    chunk, received = bytes(CHUNK_NBYTES), bytearray(CHUNK_NBYTES)
    dist.barrier()
    start = time.perf_counter()
    sender = threading.Thread(target=_send, args=(to_next, chunk, nbytes // CHUNK_NBYTES))
    sender.start()
    left = nbytes
    while left:
        got = from_previous.recv_into(received)
        if not got:
            raise ConnectionError("the rank before has closed its connection")
        left -= got
    sender.join()
    slowest = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)
