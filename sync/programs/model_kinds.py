"""Kinds of models, as records of what they can do. Other modules ask a record, and never which kind it is of."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from .spans import MEAN, SHARD, SHARD_OF_LEVELS, Span
from .topology import Topology


@dataclass(frozen=True)
class KindTraits:
    """The abilities of a kind of model, and its words."""

    name: str  # the name in lists, such as "a bare module"
    models: str  # all models of the kind, in sentences
    launched_in: str  # the place where its gradients are launched
    plain_by: str  # how gradients are averaged while nothing is compressed
    attached: str  # the model that `attach` takes, in sentences
    is_wrapped: bool = True  # whether a wrapper averages the gradients, and leaves out parameters by its own list
    plans_launches: bool = False  # whether the plan says which units are launched together; else the wrapper does
    copies_buckets: bool = False  # whether averaged gradients are copied out of buckets, unless they are views of these
    shards_on_all: bool | None = None
    """Whether shards of the parameters are on all ranks, so that means end in shards and parameters are gathered;
    ``False`` if there are replicas of the shards; ``None`` if there are no shards."""


class Frontend(Enum):
    """The kind of model that a plan is for, by what brings its gradients.

    Attributes:
        traits: what models of the kind can do.
    """

    traits: KindTraits

    DDP = (
        "ddp",
        KindTraits(
            name="DistributedDataParallel",
            models="DistributedDataParallel models",
            launched_in="a DDP model's buckets",
            plain_by="by DDP, without a hook",
            attached="the DistributedDataParallel model of the trace",
            copies_buckets=True,
        ),
    )
    MODULE = (
        "module",
        KindTraits(
            name="a bare module",
            models="bare modules",
            launched_in="a bare module",
            plain_by="in the buckets of plain steps",
            attached="a bare module",
            is_wrapped=False,
            plans_launches=True,
        ),
    )
    HSDP = (  # fully_shard over replicas and shards, and replicate
        "hsdp",
        KindTraits(
            name="HSDP",
            models="models of fully_shard over replicas, or of replicate",
            launched_in="FSDP's groups of shards over replicas",
            plain_by="by FSDP itself",
            attached="a model of fully_shard with replicas between machines",
            shards_on_all=False,
        ),
    )
    FSDP = (  # fully_shard over all ranks
        "fsdp",
        KindTraits(
            name="FSDP",
            models="models of fully_shard without replicas",
            launched_in="FSDP's groups of shards",
            plain_by="by FSDP itself",
            attached="a model of fully_shard over all ranks",
            shards_on_all=True,
        ),
    )

    def __new__(cls, value: str, traits: KindTraits) -> Frontend:
        kind = object.__new__(cls)
        kind._value_, kind.traits = value, traits
        return kind

    @classmethod
    def named(cls, name: str) -> Frontend:
        """The kind with a name of plan files, such as ``"ddp"``."""
        return next(kind for kind in cls if kind.value == name)

    @property
    def gathers(self) -> bool:
        """Whether parameters are gathered from shards on all ranks."""
        return self.traits.shards_on_all is True

    @property
    def replicates(self) -> bool:
        """Whether there are replicas of shards."""
        return self.traits.shards_on_all is False

    @property
    def plans_launches(self) -> bool:
        """Whether the plan says which units are launched together."""
        return self.traits.plans_launches

    def span(self, topology: Topology | None = None) -> Span:
        """The states between which programs for such models go, on ranks with a topology."""
        if not self.gathers:
            return MEAN
        return SHARD if topology is None or 1 in (topology.machines, topology.devices) else SHARD_OF_LEVELS


def kind_of_span(span: Span) -> Frontend | None:
    """The only kind of model with programs between some states; ``None`` if there are several."""
    found = [kind for kind in Frontend if span in (kind.span(), kind.span(Topology(2, 2)))]
    return found[0] if len(found) == 1 else None


PLANNED: Frontend = next(kind for kind in Frontend if kind.plans_launches)
"""The kind of plans with launches."""
