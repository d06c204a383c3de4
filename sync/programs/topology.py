"""The topology of the ranks: machines, their devices, the ranks of every level, and work that is shared by ranks."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from .steps import Level

K = TypeVar("K", int, str)


@dataclass(frozen=True)
class Topology:
    """``machines`` with ``devices`` ranks each; rank ``r`` is device ``r % devices`` of machine ``r // devices``.

    Attributes:
        machines: number of machines, at least 1.
        devices: number of ranks of each machine, at least 1.

    Raises:
        ValueError: a number is not an int, or less than 1.
    """

    machines: int
    devices: int = 1

    def __post_init__(self) -> None:
        for name in ("machines", "devices"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"Topology: {name} must be an int from 1 up, got {value!r}")

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.machines * self.devices

    def size(self, level: Level) -> int:
        """Number of ranks that take part in a collective of ``level``."""
        match level:
            case Level.FLAT:
                return self.world_size
            case Level.INTRA:
                return self.devices
            case Level.INTER:
                return self.machines

    def index(self, level: Level, rank: int) -> int:
        """Index of ``rank`` among the ranks of its collective of ``level``, from 0."""
        match level:
            case Level.FLAT:
                return rank
            case Level.INTRA:
                return rank % self.devices
            case Level.INTER:
                return rank // self.devices

    def groups(self, level: Level) -> list[list[int]]:
        """The ranks of all collectives of ``level``. Each rank is in exactly one of these lists."""
        everyone = list(range(self.world_size))
        match level:
            case Level.FLAT:
                return [everyone]
            case Level.INTRA:
                return [everyone[first : first + self.devices] for first in range(0, self.world_size, self.devices)]
            case Level.INTER:
                return [everyone[device :: self.devices] for device in range(self.devices)]


def balanced(sizes: Mapping[K, int], places: int) -> dict[K, int]:
    """The place of each key, so that the sums of the sizes are about equal; the same on all ranks.

    From the largest to the smallest, each gets the place with the least so far.

    Args:
        sizes: the sizes by key. Equal ones follow in the order of the keys.
        places: the number of places.
    """
    load = [(0, place) for place in range(places)]  # a heap
    found: dict[K, int] = {}
    for key in sorted(sizes, key=lambda each: (-sizes[each], each)):
        least, found[key] = load[0]
        heapq.heapreplace(load, (least + sizes[key], found[key]))
    return found
