"""A network of ranks on this machine."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator
from pathlib import Path

from . import processes
from .inside import RATE
from .namespaces import INTERFACE, LinksError, missing, own_prefix, remove, remove_leftovers, run_tool, terminable
from .rates import UNTHROTTLED, checked_rate, token_bucket

FIRST_PORT = 29500


class Links:
    """Namespaces of ranks, joined by a bridge; created by :func:`links`.

    Attributes:
        ranks: number of ranks.
        rate: rate of each link in the notation of ``tc``, such as ``"100mbit"``; ``"none"`` if links are not throttled.
        namespaces: names of the namespaces, by rank.
    """

    def __init__(self, ranks: int, rate: str) -> None:
        self.ranks, self.rate = ranks, rate
        own = own_prefix()
        self.namespaces = [f"{own}-rank{rank}" for rank in range(ranks)]
        self._switch = f"{own}-switch"
        self._ports = itertools.count(FIRST_PORT)  # a port that has just been used may still be taken

    def _make(self) -> None:
        switch = self._switch
        for name in (switch, *self.namespaces):
            run_tool("ip", "netns", "add", name)
        run_tool("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        run_tool("ip", "-n", switch, "link", "set", "bridge", "up")
        for rank, name in enumerate(self.namespaces):
            port = f"port{rank}"
            ends = ((name, INTERFACE), (switch, port))
            run_tool("ip", "-n", name, "link", "add", INTERFACE, "type", "veth", "peer", "name", port, "netns", switch)
            run_tool("ip", "-n", switch, "link", "set", port, "master", "bridge")
            for where, end in ends:
                # no IPv6: it would send packets of its own
                run_tool("ip", "-n", where, "link", "set", end, "addrgenmode", "none")
                if self.rate != UNTHROTTLED:
                    run_tool("tc", "-n", where, "qdisc", "add", "dev", end, "root", *token_bucket(self.rate))
                run_tool("ip", "-n", where, "link", "set", end, "up")
            run_tool("ip", "-n", name, "address", "add", f"{_address(rank)}/16", "dev", INTERFACE)
            run_tool("ip", "-n", name, "link", "set", "lo", "up")

    def run(self, *arguments: str | Path, timeout_s: float = math.inf, grace_s: float = 10) -> list[int]:
        """Run a Python program with one thread in every namespace, and wait until all ranks have ended.

        The environment variables of the ranks are those that torchrun sets, for one rank per machine. No process is
        left running, however this method ends.

        Args:
            arguments: a script's path, or ``-m`` and a module's name, followed by the program's arguments.
            timeout_s: ranks that run longer are killed.
            grace_s: seconds until the other ranks are killed when one has failed; they may be waiting for it.

        Returns:
            Exit codes by rank, negative for signals.
        """
        port = next(self._ports)
        environments = [self._environment(rank, port) for rank in range(self.ranks)]
        return processes.run_all(self.namespaces, environments, arguments, timeout_s, grace_s)

    def _environment(self, rank: int, port: int) -> dict[str, str]:
        like_torchrun = {
            "RANK": rank,
            "ROLE_RANK": rank,
            "GROUP_RANK": rank,
            "LOCAL_RANK": 0,
            "WORLD_SIZE": self.ranks,
            "ROLE_WORLD_SIZE": self.ranks,
            "GROUP_WORLD_SIZE": self.ranks,
            "LOCAL_WORLD_SIZE": 1,
            "ROLE_NAME": "default",
            "MASTER_ADDR": _address(0),
            "MASTER_PORT": port,
            "TORCHELASTIC_RUN_ID": "lab",
            "TORCHELASTIC_RESTART_COUNT": 0,
            "TORCHELASTIC_MAX_RESTARTS": 0,
            "TORCHELASTIC_USE_AGENT_STORE": False,  # rank 0 serves the store
            "OMP_NUM_THREADS": 1,
        }
        # without it Gloo listens on 127.0.0.1, which no other rank reaches
        own = {"GLOO_SOCKET_IFNAME": INTERFACE, RATE: self.rate}
        return {name: str(value) for name, value in (like_torchrun | own).items()}


@contextlib.contextmanager
def links(ranks: int, rate: str = UNTHROTTLED) -> Iterator[Links]:
    """Create links, and remove them at the end of the ``with`` block, also after an exception, SIGINT or SIGTERM.

    Leftovers of killed runs are removed first.

    Args:
        ranks: number of namespaces, 1 to 250.
        rate: rate of each link in both directions, such as ``"100mbit"`` or ``"1gbit"``; ``"none"`` does not throttle.

    Raises:
        ValueError: an argument is not valid.
        LinksError: links cannot be created on this machine.
    """
    if not 1 <= ranks <= 250:
        raise ValueError(f"links: ranks must be from 1 to 250, got {ranks}")
    checked_rate(rate)
    if (why := missing()) is not None:
        raise LinksError(why)
    remove_leftovers()
    made = Links(ranks, rate)
    with terminable():
        try:
            made._make()
            yield made
        finally:
            for name in (*made.namespaces, made._switch):
                remove(name)


def _address(rank: int) -> str:
    return f"10.77.0.{rank + 1}"
