"""How far predicted steps of published systems are from the published ones.

The published steps are those of Espresso's figures 11 and 12: VGG-16 and an LSTM on its testbed with PCIe, BERT and
GPT-2 on that with NVLink, 64 devices. ``tests/planner/policies/test_published_orderings.py`` computes the predicted
ones. Neither HiPress nor HiTopKComm is predicted with its own queues.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class PublishedSystem(NamedTuple):
    """A published system whose steps are predicted to be shorter than its authors, or others, have measured them."""

    name: str
    longest: float  # the published step over the predicted one, at most

    def line(self) -> str:
        """A sentence for people."""
        longest = f"{self.longest:.2f} times as long as predicted here"
        return f"Published steps of {self.name} are up to {longest}, on four models: its times are promised no better."


SLOWER: Mapping[str, PublishedSystem] = {
    "secopa": PublishedSystem("HiPress", 1.48),
    "hitopkcomm": PublishedSystem("HiTopKComm", 1.39),
}
"""These systems, by policy. Steps of Espresso, and of BytePS where the host encodes, are no longer than predicted."""
ON_DEVICE = "BytePS encodes on the host, and this plan on the device, because --host is not given."
"""A sentence on ``byteps`` without the host."""
