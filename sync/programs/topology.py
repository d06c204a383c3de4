"""Machines and devices: which rank is where, and how large each level is."""

from __future__ import annotations

from dataclasses import dataclass

from .steps import Level


@dataclass(frozen=True)
class Topology:
    """``machines`` with ``devices`` ranks each; rank ``r`` is device ``r % devices`` of machine ``r // devices``.

    Attributes:
        machines: from 1 up.
        devices: ranks of each machine, from 1 up.

    Raises:
        ValueError: for any other value.
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
        return self.machines * self.devices

    def size(self, level: Level) -> int:
        """Ranks that take part in a collective of ``level``."""
        match level:
            case Level.FLAT:
                return self.world_size
            case Level.INTRA:
                return self.devices
            case Level.INTER:
                return self.machines

    def index(self, level: Level, rank: int) -> int:
        """Which of the ranks of its collective of ``level`` is ``rank``, from 0 on."""
        match level:
            case Level.FLAT:
                return rank
            case Level.INTRA:
                return rank % self.devices
            case Level.INTER:
                return rank // self.devices

    def groups(self, level: Level) -> list[list[int]]:
        """The ranks of every collective of ``level``; each rank is in one of them."""
        everyone = list(range(self.world_size))
        match level:
            case Level.FLAT:
                return [everyone]
            case Level.INTRA:
                return [everyone[first : first + self.devices] for first in range(0, self.world_size, self.devices)]
            case Level.INTER:
                return [everyone[device :: self.devices] for device in range(self.devices)]
