"""Ranks in network namespaces, joined by links of a known rate: a cluster's network on one machine.

    gckernels lab --ranks 2 --rate 1gbit -m examples.digits --compressor EFSignSGD

Every rank has a namespace with one interface, ``eth0``. A switch in a further namespace joins the ranks or, if machines
have several ranks, the switches of the machines. A token bucket throttles both ends of every link to its rate. Nothing
outside these namespaces is changed. Needs ``ip`` and ``tc`` from Debian's package ``iproute2``, and root or a program
that has called :func:`~gckernels.sync.lab.enter_own_namespaces`.

This folder needs nothing of the rest of the package, and no torch.
"""

from .cluster import Links, links
from .link import UNTHROTTLED, LabLink, checked_rate
from .namespaces import LinksError, enter_own_namespaces, missing, remove_leftovers
from .network import RATE, Event, Network, in_rank, sent_nbytes

__all__ = [
    "RATE",
    "UNTHROTTLED",
    "Event",
    "LabLink",
    "Links",
    "LinksError",
    "Network",
    "checked_rate",
    "enter_own_namespaces",
    "in_rank",
    "links",
    "missing",
    "remove_leftovers",
    "sent_nbytes",
]
