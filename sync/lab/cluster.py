"""A network of ranks while it exists on this machine."""

from __future__ import annotations

import collections
import contextlib
import itertools
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from . import delay_switch
from .link import LabLink
from .namespaces import (
    INTERFACE,
    LinksError,
    found_tool,
    kill_processes,
    missing,
    own_prefix,
    remove,
    remove_leftovers,
    run_tool,
    terminable,
)
from .network import SUBNET, Event, Network

FIRST_PORT = 29500
POLL_S = 0.05
CONGESTION_CONTROL = "reno"
"""TCP's control of its rate inside the namespaces, which every kernel has. It only fills the queue of a link. BBR
probes links in rounds of a round trip, which takes microseconds here, and leaves slow links idle now and then."""


class Links:
    """Namespaces of ranks and the links between them; created by :func:`links`.

    ``links[1]`` is the link of a rank, ``links["machine1"]`` that of a machine (:class:`LabLink`). With one rank per
    machine these are the same links. They can be changed at any time, also from other threads while :meth:`run` is on.

    Attributes:
        network: the description of the network.
        namespaces: names of the ranks' namespaces, by rank.
        switch_pid: id of the process that delays packets; ``None`` if nothing is delayed.
    """

    def __init__(self, network: Network) -> None:
        self.network = network
        own, alone = own_prefix(), network.ranks_per_machine == 1
        self.namespaces = [f"{own}-rank{rank}" for rank in range(network.ranks)]
        self._outer = f"{own}-switch"
        self._inner = [] if alone else [f"{own}-machine{machine}" for machine in range(network.machines)]
        self._links: dict[int | str, LabLink] = {}
        for machine in range(network.machines):
            node, interface = (self.namespaces[machine], INTERFACE) if alone else (self._inner[machine], "uplink")
            link = LabLink(node, interface, self._outer, f"port{machine}", network.rate_of_machine(machine))
            self._links[f"machine{machine}"] = link
        for rank, name in enumerate(self.namespaces):
            machine, local_rank = divmod(rank, network.ranks_per_machine)
            if alone:
                self._links[rank] = self._links[f"machine{machine}"]
            else:
                switch, port = self._inner[machine], f"port{local_rank}"
                self._links[rank] = LabLink(name, INTERFACE, switch, port, network.rate_of_rank(rank))
        self._ports = itertools.count(FIRST_PORT)  # a port that has just been used may still be taken
        self._delaying: subprocess.Popen[str] | None = None

    @property
    def switch_pid(self) -> int | None:  # documented with the attributes
        return None if self._delaying is None else self._delaying.pid

    def __getitem__(self, place: int | str) -> LabLink:
        """The link of a rank or a machine.

        Raises:
            ValueError: there is no such link.
        """
        self.network.check_place(place)
        return self._links[place]

    def run(
        self,
        *arguments: str | Path,
        timeout_s: float = math.inf,
        grace_s: float = 10,
        schedule: Sequence[Event] = (),
        announce: Callable[[Event], object] = lambda event: None,
    ) -> list[int]:
        """Run a Python program in every namespace, and wait until all ranks have ended.

        The environment variables of the ranks are those that torchrun sets. A rank has one thread, unless
        ``OMP_NUM_THREADS`` is set. No process is left running, however this method ends.

        Args:
            arguments: a script's path, or ``-m`` and a module's name, followed by the program's arguments.
            timeout_s: ranks that run longer are killed.
            grace_s: seconds until the other ranks are killed when one has failed; they may be waiting for it.
            schedule: changes of links while the ranks run; links stay changed afterwards.
            announce: called with every event that has taken place.

        Returns:
            Exit codes by rank, negative for signals.

        Raises:
            ValueError: the schedule names a link that does not exist.
            LinksError: links cannot be changed, or no longer work.
        """
        for event in schedule:
            self.network.check_place(event.place)
        events = collections.deque(sorted(schedule, key=lambda event: event.at_s))
        port = next(self._ports)
        processes: list[subprocess.Popen[str]] = []
        start_s = time.monotonic()
        end_s, failed = start_s + timeout_s, False
        try:
            for rank, name in enumerate(self.namespaces):
                processes.append(_start(name, self.network.environment(rank, port), arguments))
            while None in (codes := [process.poll() for process in processes]) and time.monotonic() < end_s:
                if any(codes) and not failed:
                    failed, end_s = True, min(end_s, time.monotonic() + grace_s)
                if self._delaying is not None and self._delaying.poll() is not None:
                    raise LinksError("the switch that delays packets has ended")
                while events and events[0].at_s <= time.monotonic() - start_s:
                    event = events.popleft()
                    rates = () if event.rate is None else (event.rate,)
                    getattr(self[event.place], event.action)(*rates)
                    announce(event)
                time.sleep(POLL_S)
        finally:
            for process in processes:
                process.kill()
                process.wait()
            for name in self.namespaces:
                kill_processes(name)  # processes that the ranks have started
        return [process.returncode for process in processes]

    def _make(self) -> None:
        switches = [self._outer, *self._inner]
        for name in (*switches, *self.namespaces):
            run_tool("ip", "netns", "add", name)
        delayed = self._outer if self.network.delay_s else None
        for name in switches:
            if name != delayed:
                run_tool("ip", "-n", name, "link", "add", "bridge", "type", "bridge")
                run_tool("ip", "-n", name, "link", "set", "bridge", "up")
        for link in dict.fromkeys(self._links.values()):
            link.make()
            for name, interface in ((link.switch, link.port), (link.node, link.interface)):
                if name in switches and name != delayed:
                    run_tool("ip", "-n", name, "link", "set", interface, "master", "bridge")
        for rank, name in enumerate(self.namespaces):
            address, device = f"{self.network.address(rank)}/16", ("dev", INTERFACE)
            run_tool("ip", "-n", name, "address", "add", address, *device, "noprefixroute")
            run_tool("ip", "-n", name, "route", "add", SUBNET, *device, "congctl", CONGESTION_CONTROL)
            run_tool("ip", "-n", name, "link", "set", "lo", "up")
        if delayed is not None:
            self._start_delay_switch(delayed)

    def _start_delay_switch(self, name: str) -> None:
        ports = [self._links[f"machine{machine}"].port for machine in range(self.network.machines)]
        program = (delay_switch.__file__, str(self.network.delay_s), *ports)
        self._delaying = _start(name, {}, program, stdout=subprocess.PIPE)
        assert self._delaying.stdout is not None
        if self._delaying.stdout.readline() != "ready\n":
            raise LinksError("the switch that delays packets has not started")

    def _remove(self) -> None:
        if self._delaying is not None:
            self._delaying.kill()
            self._delaying.communicate()
        for name in (*self.namespaces, *self._inner, self._outer):
            remove(name)


def _start(
    place: str, environment: Mapping[str, str], arguments: Sequence[str | Path], stdout: int | None = None
) -> subprocess.Popen[str]:
    """Start a Python program in a namespace; it ends with this process, even if this process is killed.

    Args:
        place: name of the namespace.
        environment: environment variables, besides those of this process.
        arguments: arguments of the interpreter.
        stdout: where the output goes, as for :class:`subprocess.Popen`.
    """
    ip, setpriv = (found_tool(tool) or tool for tool in ("ip", "setpriv"))
    inside = (ip, "netns", "exec", place, setpriv, "--pdeathsig", "KILL", sys.executable)
    command, variables = [*inside, *map(str, arguments)], {**os.environ, **environment}
    return subprocess.Popen(command, env=variables, stdin=subprocess.DEVNULL, stdout=stdout, text=True)


@contextlib.contextmanager
def links(network: Network) -> Iterator[Links]:
    """Create links, and remove them at the end of the ``with`` block.

    They are also removed after an exception, and after SIGINT, SIGTERM and SIGHUP, such as the end of an ssh session.
    Leftovers of killed runs are removed first.

    Args:
        network: the description of ranks and links.

    Raises:
        LinksError: links cannot be created on this machine.
    """
    if (why := missing()) is not None:
        raise LinksError(why)
    remove_leftovers()
    made = Links(network)
    with terminable():
        try:
            made._make()
            yield made
        finally:
            made._remove()
