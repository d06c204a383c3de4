"""The process that has created the links, at the service of its ranks: it changes links.

The ranks reach it through a socket in the file system, which no fault of a link disturbs.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from multiprocessing.connection import Client, Listener

import torch.distributed as dist

from gckernels.sync.lab import UNTHROTTLED, Links, Network

ADDRESS = "BENCH_CHANGES"  # environment variable with the path of the socket
ACTIONS = ("cut", "restore", "throttle")


@contextlib.contextmanager
def served(made: Links) -> Iterator[None]:
    """Serve the ranks of ``made`` in a thread, until the end of the ``with`` block."""
    with Listener(family="AF_UNIX") as listener:
        thread = threading.Thread(target=_serve, args=(listener, made))
        thread.start()
        os.environ[ADDRESS] = str(listener.address)
        try:
            yield
        finally:
            with Client(listener.address) as connection:
                connection.send(None)
            thread.join()
            del os.environ[ADDRESS]


def change(action: str, place: str | int, *arguments: str) -> None:
    """Change a link, and return when that has been done.

    Args:
        action: one of :data:`ACTIONS`, which are methods of :class:`~gckernels.sync.lab.LabLink`.
        place: the rank or machine whose link it is.
        arguments: the arguments of that method.

    Raises:
        RuntimeError: the link cannot be changed; with the reason.
    """
    with Client(os.environ[ADDRESS]) as connection:
        connection.send((action, place, arguments))
        problem = connection.recv()
    if problem is not None:
        raise RuntimeError(f"{' '.join(map(str, (action, place, *arguments)))}: {problem}")


def cut_for(seconds: float, place: str | int) -> None:
    """Cut a link, and restore it some seconds later; collective.

    Other ranks may go on before that, as far as they need nothing of rank 0.
    """
    dist.barrier()
    if dist.get_rank() == 0:
        change("cut", place)
        threading.Timer(seconds, change, ("restore", place)).start()


def throttle(network: Network, rate: str) -> None:
    """Give the links between machines another rate; collective."""
    dist.barrier()
    if dist.get_rank() == 0 and network.rate != UNTHROTTLED:
        for machine in range(network.machines):
            change("throttle", f"machine{machine}", rate)
    dist.barrier()


def _serve(listener: Listener, made: Links) -> None:
    while True:
        with listener.accept() as connection:
            asked = connection.recv()
            if asked is None:
                return
            connection.send(_changed(made, *asked))


def _changed(made: Links, action: str, place: str | int, arguments: tuple[str, ...]) -> str | None:
    """Change a link; returns why that is not possible, or ``None``."""
    if action not in ACTIONS:
        return "there is no such change"
    try:
        getattr(made[place], action)(*arguments)
    except Exception as error:  # the rank that has asked gets it
        return str(error)
    return None
