"""Shards of models of FSDP2: where they are, and the machine of the ranks that have the same ones."""

from __future__ import annotations

from dataclasses import dataclass

from ...programs.spans import MEAN, SHARD, Span
from ...programs.steps import Level, Place
from ...programs.topology import Topology
from .machine import DerivedMachine, Floats, Price


@dataclass(frozen=True)
class Sharding:
    """The shards of a model of FSDP2.

    Attributes:
        inside: the devices of a machine, if they have the shards together and machines have replicas; ``None`` if all
            ranks have the shards together.
    """

    inside: int | None = None

    @property
    def span(self) -> Span:
        """The span of the programs of gradients."""
        return SHARD if self.inside is None else MEAN

    @property
    def level(self) -> Level:
        """The level of the ranks that have the shards together."""
        return Level.FLAT if self.inside is None else Level.INTRA


@dataclass
class Replicas(DerivedMachine):
    """A machine on which the devices at the same place of all machines average the gradients of their shards.

    Its ranks are the machines of another one. Collectives inside a machine, which FSDP2 begins itself, have the prices
    that they have there.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.topology = Topology(self.base.topology.machines)

    def collective(self, step: str, level: Level, place: Place, wire_nbytes: Floats, from_roots: bool = False) -> Price:
        level = Level.INTER if level == Level.FLAT else level
        return super().collective(step, level, place, wire_nbytes, from_roots)
