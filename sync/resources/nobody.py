"""In the place of communicators, where messages are built and nothing will be sent."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..programs.steps import Level, Place
from ..programs.topology import Topology
from .places import Places

_NOWHERE = Places(torch.device("meta"), torch.device("meta"), apart=False)


@dataclass(frozen=True)
class Nobody:
    """What a message asks of :class:`~.communicators.Communicators` while it is built.

    Attributes:
        rank: the one that the message is built for.
        topology: of all ranks.
        places: its memory, by default none, for tensors of the device ``meta``.
    """

    rank: int
    topology: Topology
    places: Places = _NOWHERE

    @property
    def world_size(self) -> int:
        return self.topology.world_size

    @property
    def averaging(self) -> None:
        """There is none."""
        return None

    def group(self, phase: int, level: Level = Level.FLAT, channel: int = 0, place: Place = Place.DEVICE) -> None:
        """There is none."""
        return None
