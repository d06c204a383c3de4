"""The topology of the ranks: machines, their devices, and the ranks of every level."""

from __future__ import annotations

from dataclasses import dataclass

from .steps import Level


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
