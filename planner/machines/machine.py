"""Machines: the prices of stages, and the physical resources that stages share.

Two kinds of machines implement :class:`Machine`: profiles, which are measured, and descriptions, whose prices are
estimated from the published rates of links and devices.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from gckernels.codec import Codec
from gckernels.compressor import Compressor
from gckernels.sync.plans.json_files import Entry
from gckernels.sync.plans.json_records import JsonForm
from gckernels.sync.programs.spans import MEAN, SHARD, Span
from gckernels.sync.programs.stages import StageKind
from gckernels.sync.programs.steps import Level, Place
from gckernels.sync.programs.topology import Topology

Floats: TypeAlias = npt.NDArray[np.float64]

MAX_RATE = 1e18
"""The largest number in a description. It is beyond every rate, time and size, and products of several stay finite."""
AtLeastZero: TypeAlias = Annotated[float, JsonForm(functools.partial(Entry.number, most=MAX_RATE))]


class Shared(Enum):
    """A physical resource of a rank that everything which runs at the same time has to share.

    Lanes give stages an order; shared resources limit their speed. The devices of a machine may share a link: then it
    carries the bytes of all of them, whichever rank sends them. The other resources are a rank's own.
    """

    DEVICE = "device"  # the streaming multiprocessors and the memory of a GPU
    CORES = "cores"  # the rank's part of the cores of its machine
    INTER = "inter"  # the link between machines, or the only link of a flat network
    INTRA = "intra"  # the links inside a machine
    TO_HOST = "to-host"
    TO_DEVICE = "to-device"

    @property
    def is_link(self) -> bool:
        """Whether it is a link between ranks."""
        return self in (Shared.INTER, Shared.INTRA)


@dataclass(frozen=True)
class Price:
    """The price of a stage, for any number of stages at once.

    Attributes:
        alone_s: ``float64 [n]``, seconds when nothing else runs. For a collective the seconds that it adds to a train,
            in which the next one of its lane is issued before it has ended.
        work_s: for every shared resource that the stage needs, ``float64 [n]``: the seconds that the resource would
            need for the stage if it did nothing else. They are at most ``alone_s`` times the capacity of the resource,
            except for cores, of which a stage can take more from what runs beside it. A stage of 10 ms that keeps the
            link busy for 8 ms has the price ``(0.010, {INTER: 0.008})``. For links it is the mean over all of a kind.
        submit_s: seconds of the submitting thread, which delay backward.
        busiest_s: for links of which one has more work than the mean, as that of a root, the seconds of work of this
            one.
        unsure_s: ``float64 [n]``, the seconds by which ``alone_s`` may be wrong; ``None`` if only the margin of the
            machine tells.
    """

    alone_s: Floats
    work_s: Mapping[Shared, Floats] = field(default_factory=dict)
    submit_s: float = 0.0
    busiest_s: Mapping[Shared, Floats] = field(default_factory=dict)
    unsure_s: Floats | None = None

    def entry(self, at: int) -> Price:
        """The price of one of the stages, as arrays of one entry."""
        one = slice(at, at + 1)
        work_s, busiest_s = (
            {shared: each[one] for shared, each in work.items()} for work in (self.work_s, self.busiest_s)
        )
        unsure_s = None if self.unsure_s is None else self.unsure_s[one]
        return Price(self.alone_s[one], work_s, self.submit_s, busiest_s, unsure_s)

    def __add__(self, other: Price) -> Price:
        """The price of both works, one after the other, in one stage."""
        none = np.zeros_like(self.alone_s)
        keys = dict.fromkeys((*self.work_s, *other.work_s))
        work_s = {key: self.work_s.get(key, none) + other.work_s.get(key, none) for key in keys}
        unsure_s = [each.unsure_s for each in (self, other) if each.unsure_s is not None]
        added_s = sum(unsure_s[1:], unsure_s[0]) if unsure_s else None
        return Price(self.alone_s + other.alone_s, work_s, self.submit_s + other.submit_s, unsure_s=added_s)

    @staticmethod
    def fastest(prices: Sequence[Price]) -> Price:
        """For each stage the price that is fastest alone, of several for the same stages and resources."""
        if len(prices) == 1:
            return prices[0]
        best = np.argmin([price.alone_s for price in prices], axis=0)[None]

        def chosen(each: Sequence[Floats]) -> Floats:
            found: Floats = np.take_along_axis(np.array(each), best, axis=0)[0]
            return found

        first = prices[0]
        return Price(
            chosen([price.alone_s for price in prices]),
            {shared: chosen([price.work_s[shared] for price in prices]) for shared in first.work_s},
            first.submit_s,
            {shared: chosen([price.busiest_s[shared] for price in prices]) for shared in first.busiest_s},
        )


@dataclass(frozen=True)
class Overheads:
    """Constant times of the engine, in seconds.

    Attributes:
        stage_s: for each stage, on its lane.
        submit_s: for each stage, on the submitting thread.
        hook_s: for each launch, in the hook of the front end.
        plain_s: for each bucket, in DDP without a hook.
    """

    stage_s: AtLeastZero = 0.0
    submit_s: AtLeastZero = 0.0
    hook_s: AtLeastZero = 0.0
    plain_s: AtLeastZero = 0.0


class Machine(Protocol):
    """The prices of stages on one kind of rank.

    Every method takes arrays of one shape ``[n]`` and returns a price for each entry. Times are in seconds.
    """

    @property
    def name(self) -> str:
        """Its name, for people."""

    @property
    def topology(self) -> Topology:
        """The machines and devices whose ranks exchange gradients."""

    @property
    def estimated(self) -> bool:
        """Whether its prices are estimated, and not measured on the machine."""

    @property
    def margin(self) -> float:
        """The relative error that prices are expected to have."""

    @property
    def computes_on(self) -> Shared:
        """The resource of forward, backward, optimizer and of stages that compute on the device."""

    @property
    def capacities(self) -> Mapping[Shared, float]:
        """The capacity of every shared resource: 1 for links and devices, the number of cores for ``CORES``."""

    @property
    def overheads(self) -> Overheads:
        """The constant times of the engine."""

    @property
    def memory_nbytes(self) -> float | None:
        """The bytes of memory of a rank: of its device, or its part of the memory of its host; ``None`` if the machine
        does not say."""

    @property
    def shared_by(self) -> Mapping[Shared, int]:
        """The devices of a machine that share a link, by kind of link; one if a kind is missing."""

    def collective(self, step: str, level: Level, place: Place, wire_nbytes: Floats, from_roots: bool = False) -> Price:
        """The price of a collective.

        Args:
            step: its name, such as ``"AllGather"``.
            level: the ranks that take part. All groups of a level run at the same time.
            place: where the data lies.
            wire_nbytes: bytes that a rank sends, as a mean over all ranks.
            from_roots: whether one device of each machine has all data of the machine. Then its group of the level
                takes part alone.

        Raises:
            MachineError: the machine has no price for it.
        """

    def codec(
        self, work: StageKind, compressor: Compressor, place: Place, units: Floats, elements: Floats, sources: int
    ) -> Price:
        """The price of encoding or decoding of units with one compressor, in one launch.

        Args:
            work: ``ENCODE``, ``ENCODE_SHARD``, ``DECODE``, ``RECODE``, ``ADD``, ``PROJECT`` or ``RECONSTRUCT``.
            compressor: the fitted compressor of the units.
            place: where it is computed.
            units: the number of units; an entry may be 0, with the price 0.
            elements: the number of elements of all of them, counted once however many sources are merged.
            sources: the number of payloads that are decoded and merged.

        Raises:
            MachineError: the machine has no price for it.
        """

    def copy(self, resource: Shared, nbytes: Floats) -> Price:
        """The price of copies of ``nbytes`` bytes: between device and host for ``TO_HOST`` and ``TO_DEVICE``, in the
        memory of the device for the resource :attr:`computes_on`, in the host's for ``CORES``."""


class MachineError(ValueError):
    """Raised for a machine that is not valid, or that lacks a price."""


@dataclass
class DerivedMachine:
    """A :class:`Machine` that is another one; classes below it change some of its attributes and prices."""

    base: Machine

    def __post_init__(self) -> None:
        base = self.base
        self.name, self.topology, self.estimated, self.margin = base.name, base.topology, base.estimated, base.margin
        self.computes_on, self.capacities, self.shared_by = base.computes_on, base.capacities, base.shared_by
        self.overheads, self.memory_nbytes = base.overheads, base.memory_nbytes

    def collective(self, step: str, level: Level, place: Place, wire_nbytes: Floats, from_roots: bool = False) -> Price:
        return self.base.collective(step, level, place, wire_nbytes, from_roots)

    def codec(
        self, work: StageKind, compressor: Compressor, place: Place, units: Floats, elements: Floats, sources: int
    ) -> Price:
        return self.base.codec(work, compressor, place, units, elements, sources)

    def copy(self, resource: Shared, nbytes: Floats) -> Price:
        return self.base.copy(resource, nbytes)


@dataclass(frozen=True)
class Sharding:
    """The shards of a model of FSDP2."""

    inside: int | None = None
    """The devices of a machine, if they have the shards together and machines have replicas; ``None`` if all ranks have
    the shards together."""

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


BAD_ERROR = 0.20
"""The relative error of a price from which it is bad."""


def price_error(machine: Machine, method: Compressor) -> float:
    """The largest relative error of a machine's prices for a compressor; 0 if only its margin is known, infinite if it
    lacks a price."""
    one, sources, errors = np.array([1.0]), machine.topology.world_size, [0.0]
    works = [(StageKind.PROJECT, 1), (StageKind.RECONSTRUCT, 1)]
    if isinstance(method, Codec):
        works = [(StageKind.ENCODE, 1), (StageKind.DECODE, sources)]
    try:
        for work, merged in works:
            price = machine.codec(work, method, Place.DEVICE, one, 4096 * one, merged)
            if price.unsure_s is not None and price.alone_s.item(0) > 0:
                errors.append(price.unsure_s.item(0) / price.alone_s.item(0))
    except MachineError:
        return math.inf
    return max(errors)
