"""The description of a network: how many ranks there are, on which machines, what joins them, and when that changes.
Inside a rank, its link."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from pathlib import Path

from .link import UNTHROTTLED, checked_rate
from .namespaces import INTERFACE, LinksError

MAX_RANKS = 250
ACTIONS = ("cut", "restore", "throttle")
UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
SUBNET = "10.77.0.0/16"
"""The addresses of all ranks."""
RATE = "LINK_RATE"  # environment variable with the rate of a rank's link


@dataclass(frozen=True)
class Network:
    """Machines that a switch joins, each with one rank or several.

    With one rank per machine, every rank has its own link to the switch, with ``rate``. With several, every rank has a
    link with ``local_rate`` to a switch of its machine, and that switch has one link with ``rate`` to the switch that
    joins the machines. A rate limits each direction by itself.

    Attributes:
        ranks: number of ranks, 1 to 250; a multiple of ``ranks_per_machine``.
        rate: rate of each machine's link in the notation of ``tc``, such as ``"100mbit"`` or ``"1gbit"``; ``"none"``
            does not throttle.
        ranks_per_machine: number of ranks of each machine; rank ``r`` is on machine ``r // ranks_per_machine``.
        local_rate: rate of the links inside machines, if there is more than one rank per machine.
        delay_s: seconds that every packet between two machines waits, in each direction.
        rate_of: rates of single links, which replace ``rate`` and ``local_rate``. A key is a rank or, as in
            ``"machine1"``, a machine.

    Raises:
        ValueError: a value is not valid.
    """

    ranks: int
    rate: str = UNTHROTTLED
    ranks_per_machine: int = 1
    local_rate: str = UNTHROTTLED
    delay_s: float = 0.0
    rate_of: dict[int | str, str] | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.ranks <= MAX_RANKS:
            raise ValueError(f"ranks must be from 1 to {MAX_RANKS}, got {self.ranks}")
        if self.ranks_per_machine < 1 or self.ranks % self.ranks_per_machine:
            raise ValueError(
                f"ranks_per_machine must be at least 1 and divide ranks = {self.ranks}, got {self.ranks_per_machine}"
            )
        checked_rate(self.rate)
        checked_rate(self.local_rate)
        if self.local_rate != UNTHROTTLED and self.ranks_per_machine == 1:
            raise ValueError(f"local_rate needs more than one rank per machine, got {self.local_rate!r}")
        if not 0 <= self.delay_s <= 10:
            raise ValueError(f"delay must be from 0 to 10 s, got {self.delay_s!r}")
        own_rates = self.rate_of or {}
        for place, rate in own_rates.items():
            self.check_place(place)
            checked_rate(rate)
            if self.ranks_per_machine == 1 and f"machine{place}" in own_rates:
                raise ValueError(f"rate_of names the same link twice: rank {place} is alone on machine{place}")

    @property
    def machines(self) -> int:
        """Number of machines."""
        return self.ranks // self.ranks_per_machine

    def places(self) -> list[int | str]:
        """The names of all links: ranks, and machines such as ``"machine0"``."""
        return [*range(self.ranks), *(f"machine{machine}" for machine in range(self.machines))]

    def check_place(self, place: int | str) -> None:
        """Check the name of a link.

        Raises:
            ValueError: there is no such link.
        """
        if place not in self.places():
            ranks, machines = f"0 to {self.ranks - 1}", f"machine0 to machine{self.machines - 1}"
            raise ValueError(f"a link is named by a rank, {ranks}, or by a machine, {machines}; got {place!r}")

    def rate_of_rank(self, rank: int) -> str:
        """The rate of the link of a rank."""
        if self.ranks_per_machine == 1:
            return self.rate_of_machine(rank)
        return (self.rate_of or {}).get(rank, self.local_rate)

    def rate_of_machine(self, machine: int) -> str:
        """The rate of the link of a machine; with one rank per machine that is the link of the rank."""
        own_rates = self.rate_of or {}
        rate = own_rates.get(f"machine{machine}", self.rate)
        return own_rates.get(machine, rate) if self.ranks_per_machine == 1 else rate

    def address(self, rank: int) -> str:
        """The IPv4 address of a rank."""
        return f"10.77.0.{rank + 1}"

    def environment(self, rank: int, port: int) -> dict[str, str]:
        """Environment variables of a rank: those that torchrun sets, and those that make it use its link.

        Args:
            rank: the rank.
            port: port of the store, which rank 0 serves.
        """
        machine, local_rank = divmod(rank, self.ranks_per_machine)
        like_torchrun = {
            "RANK": rank,
            "ROLE_RANK": rank,
            "GROUP_RANK": machine,
            "LOCAL_RANK": local_rank,
            "WORLD_SIZE": self.ranks,
            "ROLE_WORLD_SIZE": self.ranks,
            "GROUP_WORLD_SIZE": self.machines,
            "LOCAL_WORLD_SIZE": self.ranks_per_machine,
            "ROLE_NAME": "default",
            "MASTER_ADDR": self.address(0),
            "MASTER_PORT": port,
            "TORCHELASTIC_RUN_ID": "lab",
            "TORCHELASTIC_RESTART_COUNT": 0,
            "TORCHELASTIC_MAX_RESTARTS": 0,
            "TORCHELASTIC_USE_AGENT_STORE": False,  # rank 0 serves the store
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", 1),
        }
        # without it Gloo listens on 127.0.0.1, which no other rank reaches; NCCL would find faster ways than the links
        over_links = {
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "NCCL_SOCKET_IFNAME": INTERFACE,
            "NCCL_NET": "Socket",
            "NCCL_P2P_DISABLE": 1,
            "NCCL_SHM_DISABLE": 1,
        }
        return {name: str(value) for name, value in (like_torchrun | over_links | {RATE: self.rate}).items()}


def in_rank() -> bool:
    """Whether this process was started by :meth:`Links.run`."""
    return RATE in os.environ


def sent_nbytes() -> int:
    """Bytes sent from this namespace so far, as the kernel counts them.

    They include the headers of Ethernet, IP and TCP, counted per packet or, with segmentation offload, once for up to
    64 KiB.

    Raises:
        LinksError: this process is in no namespace of links.
    """
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == INTERFACE:
            return int(numbers.split()[8])
    raise LinksError(f"this namespace has no interface {INTERFACE}")


# -------------------------------------------------------------------- changes of links


@dataclass(frozen=True)
class Event:
    """A change of a link at a given time, written like ``"5s cut 1"`` or ``"1500ms throttle machine0 10mbit"``.

    Attributes:
        at_s: seconds since the start of the ranks.
        action: ``"cut"``, ``"restore"`` or ``"throttle"``.
        place: the link, as in :class:`Links`.
        rate: the new rate, for ``"throttle"`` alone.

    Raises:
        ValueError: a value is not valid.
    """

    at_s: float
    action: str
    place: int | str
    rate: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.at_s < math.inf:
            raise ValueError(f"an event must be at 0 s or later, got {self.at_s!r}")
        if self.action not in ACTIONS:
            raise ValueError(f"the action of an event must be one of {', '.join(ACTIONS)}; got {self.action!r}")
        if (self.rate is not None) != (self.action == "throttle"):
            raise ValueError(f"an event has a rate if its action is throttle; got {self.action!r}, {self.rate!r}")
        if self.rate is not None:
            checked_rate(self.rate)

    @classmethod
    def from_text(cls, text: str) -> Event:
        """The event that a text describes.

        Raises:
            ValueError: the text describes none.
        """
        words = text.split()
        if len(words) < 3 or words[1] not in ACTIONS or len(words) != (4 if words[1] == "throttle" else 3):
            allowed = '"5s cut 1", "10s restore 1" or "20s throttle machine0 10mbit"'
            raise ValueError(f"an event must be written like {allowed}; got {text!r}")
        return cls(seconds(words[0]), words[1], place_from_text(words[2]), *words[3:])

    def __str__(self) -> str:
        return f"{self.at_s:g}s {self.action} {self.place}{'' if self.rate is None else f' {self.rate}'}"


def seconds(text: str) -> float:
    """Seconds of a duration such as ``"1ms"`` or ``"2.5s"``.

    Raises:
        ValueError: the text is no duration.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(us|ms|s)", text)
    if found is None:
        raise ValueError(f"a duration must be written like 100us, 1ms or 2.5s; got {text!r}")
    return float(found[1]) * UNITS_S[found[2]]


def place_from_text(text: str) -> int | str:
    """A place as :meth:`Links.cut` takes it: a rank's number becomes an int."""
    return int(text) if text.isdecimal() else text
