"""Answers to a rank's questions about its link."""

from __future__ import annotations

import os
from pathlib import Path

from .namespaces import INTERFACE, LinksError

RATE = "LINK_RATE"  # environment variable with the rate of a rank's link


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
