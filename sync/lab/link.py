"""A link between two namespaces: a veth pair with a token bucket at both ends; rates in the notation of ``tc``."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field

from .namespaces import run_tool

UNTHROTTLED = "none"
QUEUE = "50ms"
BUCKET_S, BUCKET_NBYTES = 0.001, 4096  # with smaller buckets, late timers cost throughput on busy cores


def checked_rate(text: str) -> str:
    """Return ``text`` unchanged if it is a valid rate of links.

    Raises:
        ValueError: ``text`` is not a rate.
    """
    if text != UNTHROTTLED and re.fullmatch(r"[1-9][0-9]*[kmg]bit", text) is None:
        raise ValueError(f"rate must be written like 100mbit or 1gbit, or be {UNTHROTTLED}; got {text!r}")
    return text


def bucket_nbytes(rate: str) -> int:
    """Size of the token bucket: bytes that pass without delay after a pause, on a link of this rate."""
    bits_per_s = int(rate[:-4]) * {"k": 10**3, "m": 10**6, "g": 10**9}[rate[-4]]
    return BUCKET_NBYTES + int(bits_per_s / 8 * BUCKET_S)


@dataclass(eq=False)
class LabLink:
    """A link from a node, which is a rank or a machine, up to the port of a switch.

    Its methods raise a :class:`~gckernels.sync.lab.LinksError` where the link cannot be changed.

    Attributes:
        node: namespace of the node.
        interface: its interface in the node's namespace.
        switch: namespace of the switch.
        port: its interface in the namespace of the switch.
        rate: its rate in both directions, unless it has been throttled since.
    """

    node: str
    interface: str
    switch: str
    port: str
    rate: str
    _rate_now: str = field(default=UNTHROTTLED, init=False, repr=False)

    def make(self) -> None:
        """Create both interfaces, at the rate, and set them up."""
        peer = ("peer", "name", self.port, "netns", self.switch)
        run_tool("ip", "-n", self.node, "link", "add", self.interface, "type", "veth", *peer)
        for where, end in self._ends():
            # no IPv6: it would send packets of its own
            run_tool("ip", "-n", where, "link", "set", end, "addrgenmode", "none")
        self.throttle(self.rate)
        for where, end in self._ends():
            run_tool("ip", "-n", where, "link", "set", end, "up")

    def throttle(self, rate: str) -> None:
        """Give the link another rate, in both directions; packets that wait for their turn may be lost.

        Raises:
            ValueError: ``rate`` is not a rate.
        """
        checked_rate(rate)
        for where, end in self._ends():
            command, root = ("tc", "-n", where, "qdisc"), ("dev", end, "root")
            if rate != UNTHROTTLED:
                bucket = ("tbf", "rate", rate, "burst", str(bucket_nbytes(rate)), "latency", QUEUE)
                run_tool(*command, "replace", *root, *bucket)
            elif self._rate_now != UNTHROTTLED:
                run_tool(*command, "delete", *root)
        self._rate_now = rate

    def cut(self) -> None:
        """Let nothing through any more, as if somebody had pulled the cable out of the switch."""
        # the interface of the node stays up: without it the node would forget its address and its routes
        run_tool("ip", "-n", self.switch, "link", "set", self.port, "down")

    def restore(self) -> None:
        """Undo all cuts and throttles."""
        run_tool("ip", "-n", self.switch, "link", "set", self.port, "up")
        self.throttle(self.rate)

    def sent_nbytes(self) -> int:
        """Bytes that the node has sent over the link so far, with the headers of Ethernet, IP and TCP."""
        shown = json.loads(run_tool("ip", "-json", "-stats", "-n", self.node, "link", "show", "dev", self.interface))
        return int(shown[0]["stats64"]["tx"]["bytes"])

    def _ends(self) -> tuple[tuple[str, str], tuple[str, str]]:
        return (self.node, self.interface), (self.switch, self.port)
