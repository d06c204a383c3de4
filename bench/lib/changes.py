"""The process that has created the links, at the service of its ranks: it changes links, and carries messages.

The ranks reach it through a socket in the file system, which no fault of a link disturbs.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import torch.distributed as dist

from gckernels.sync.lab import UNTHROTTLED, Links, Network

ADDRESS = "BENCH_CHANGES"  # environment variable with the path of the socket
ACTIONS = ("cut", "restore", "throttle")
GATHER, SWITCH = "gather", "switch"


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


def change(action: str, *arguments: int | str) -> None:
    """Change a link, and return when that has been done.

    Args:
        action: one of :data:`ACTIONS`, which are methods of :class:`~gckernels.sync.lab.LabLink`.
        arguments: the rank or machine whose link it is, and the arguments of that method.

    Raises:
        RuntimeError: the link cannot be changed; with the reason.
    """
    problem = _ask(action, arguments)
    if problem is not None:
        raise RuntimeError(f"{action} {' '.join(map(str, arguments))}: {problem}")


def cut_for(seconds: float, place: str | int) -> None:
    """Cut a link before any rank goes on, and restore it some seconds later; collective."""
    if dist.get_rank() == 0:
        change("cut", place)
        threading.Timer(seconds, change, ("restore", place)).start()
    gather(None)


def throttle(network: Network, rate: str) -> None:
    """Give the links between machines another rate; collective."""
    dist.barrier()
    if dist.get_rank() == 0 and network.rate != UNTHROTTLED:
        for machine in range(network.machines):
            change("throttle", f"machine{machine}", rate)
    dist.barrier()


def switch_pid() -> int | None:
    """The id of the process that delays packets; ``None`` if nothing is delayed."""
    pid: int | None = _ask(SWITCH, None)
    return pid


def gather(value: Any) -> list[Any]:
    """The values of all ranks, in no particular order; every rank calls it."""
    found: list[Any] = _ask(GATHER, value)
    return found


def _ask(what: str, value: Any) -> Any:
    with Client(os.environ[ADDRESS]) as connection:
        connection.send((what, value))
        return connection.recv()


def _serve(listener: Listener, made: Links) -> None:
    waiting: list[tuple[Connection, Any]] = []  # ranks whose values are there
    while True:
        connection = listener.accept()
        asked = connection.recv()
        if asked is None:
            connection.close()
            return
        what, value = asked
        if what != GATHER:
            with connection:
                connection.send(made.switch_pid if what == SWITCH else _changed(made, what, value))
            continue
        waiting.append((connection, value))
        if len(waiting) == made.network.ranks:
            values = [each for _, each in waiting]
            for each, _ in waiting:
                with each:
                    each.send(values)
            waiting.clear()


def _changed(made: Links, action: str, arguments: tuple[int | str, ...]) -> str | None:
    """Change a link; returns why that is not possible, or ``None``."""
    if action not in ACTIONS:
        return "there is no such change"
    place, *rest = arguments
    try:
        getattr(made[place], action)(*rest)
    except Exception as error:  # the rank that has asked gets it
        return str(error)
    return None
