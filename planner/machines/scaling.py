"""Machines as they would be with other links, another number of machines, or faster codecs.

Descriptions get other numbers, and their prices are then those of such a machine. Any other machine, such as a profile,
is wrapped. Its prices are changed by the laws of collectives: latencies follow the number of messages, and seconds per
byte the bandwidth. The result is estimated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from gckernels.compressor import Compressor
from gckernels.sync.programs.stages import StageKind
from gckernels.sync.programs.steps import Level, Place
from gckernels.sync.programs.topology import Topology

from .collectives import Use, algorithms_of
from .description import MARGIN, Description
from .machine import DerivedMachine, Floats, Machine, MachineError, Price, Replicas, Shared

_SLOPE_NBYTES = np.array([1 << 18, 1 << 20], dtype=np.float64)
"""The sizes between which the seconds per byte of a measured link are taken. Every profile has them."""
_WHAT_IF = "a what-if question"


def scaled(
    machine: Machine,
    *,
    bandwidth_bit_per_s: float | None = None,
    machines: int | None = None,
    codec_speed: float | None = None,
) -> Machine:
    """The machine as it would be with other links, another number of machines, or faster codecs.

    Args:
        machine: the machine.
        bandwidth_bit_per_s: the bits per second in each direction of a link between machines, or of those inside the
            machine if there is one machine only. For a description it is the nominal bandwidth, whose efficiency and
            limit remain. For other machines it is that of :func:`sending_bit_per_s`.
        machines: the number of machines, with as many devices each as before. If the machine is not described, it must
            have several machines, because otherwise no link between machines has been measured.
        codec_speed: how many times as fast codecs are; infinity makes them free.

    Raises:
        MachineError: a number is not valid, or the prices of such a machine cannot be derived.
    """
    _require("bandwidth_bit_per_s", bandwidth_bit_per_s, finite=True)
    _require("codec_speed", codec_speed, finite=False)
    if machines is not None and (type(machines) is not int or machines < 1):
        raise MachineError(f"machines: must be an integer from 1 up, got {machines!r}")
    if machines == machine.topology.machines:
        machines = None
    speed, base = 1.0 if codec_speed is None else codec_speed, machine
    if isinstance(machine, FasterCodecs):  # speeds multiply
        speed, base = speed * machine.codec_speed, machine.base
    others = _with_links(base, bandwidth_bit_per_s, machines)
    return others if speed == 1 else FasterCodecs(others, speed)


def _with_links(machine: Machine, bandwidth_bit_per_s: float | None, machines: int | None) -> Machine:
    match machine:
        case _ if bandwidth_bit_per_s is None and machines is None:
            return machine
        case Replicas(base):
            return Replicas(_with_links(base, bandwidth_bit_per_s, machines))
        case Description():
            return _described(machine, bandwidth_bit_per_s, machines)
    return OtherLinks(machine, bandwidth_bit_per_s, machines)


def _require(name: str, value: float | None, finite: bool) -> None:
    """Raise :class:`~.machine.MachineError` unless ``value`` is ``None`` or a number above 0."""
    if value is None:
        return
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not value > 0 or (finite and value == math.inf):
        raise MachineError(f"{name}: must be a number above 0, got {value!r}")


def _link(topology: Topology) -> Shared:
    """The link of which a bandwidth is given."""
    return Shared.INTER if topology.machines > 1 else Shared.INTRA


def _described(machine: Description, bandwidth_bit_per_s: float | None, machines: int | None) -> Description:
    name, sources = machine.name, dict(machine.sources)
    topology, links = machine.topology, dict(machine.links)
    if machines is not None:
        topology = replace(topology, machines=machines)
        sources["topology.machines"] = _WHAT_IF
        name = f"{name}, machines: {machines}"
    if bandwidth_bit_per_s is not None:
        changed = _link(topology)
        if changed not in links:
            raise MachineError(f"bandwidth_bit_per_s: {machine.name} has a single rank, and so no link")
        links[changed] = replace(links[changed], bandwidth_bit_per_s=float(bandwidth_bit_per_s))
        sources[f"links.{changed.value}.bandwidth_bit_per_s"] = _WHAT_IF
        name = f"{name}, {bandwidth_bit_per_s / 1e9:g} Gbit/s"
    return replace(machine, name=name, topology=topology, links=links, sources=sources)


def sending_bit_per_s(machine: Machine, step: str = "AllReduce") -> float:
    """The bits per second that a rank sends in a large collective of all ranks, counted as those around a ring.

    Args:
        machine: the machine.
        step: the name of the collective.

    Raises:
        MachineError: there is one rank only, or sending more takes no longer.
    """
    first, last = machine.collective(step, Level.FLAT, Place.DEVICE, _SLOPE_NBYTES).alone_s
    if last <= first:
        raise MachineError(f"{machine.name}: no bandwidth can be derived from its prices")
    return float(8 * (_SLOPE_NBYTES[1] - _SLOPE_NBYTES[0]) / (last - first))


@dataclass
class FasterCodecs(DerivedMachine):
    """A machine whose codecs are faster than those of another one."""

    codec_speed: float  # how many times as fast they are

    def __post_init__(self) -> None:
        super().__post_init__()
        self.name = f"{self.name}, codecs {self.codec_speed:g} times as fast"
        self.estimated, self.margin = True, max(self.margin, MARGIN)

    def codec(
        self, work: StageKind, compressor: Compressor, place: Place, units: Floats, elements: Floats, sources: int
    ) -> Price:
        price, speed = super().codec(work, compressor, place, units, elements, sources), self.codec_speed
        work_s = {shared: seconds / speed for shared, seconds in price.work_s.items()}
        return Price(price.alone_s / speed, work_s, price.submit_s)


@dataclass
class OtherLinks(DerivedMachine):
    """A machine with other links, or another number of machines, than a measured one.

    The seconds of a collective are its latency, the price of its first byte, and its seconds per byte. With another
    number of machines the latency changes as the number of messages that follow one another, and the seconds per byte
    as the bytes of the busiest link; of several algorithms the one counts that gives the least. With another bandwidth
    the seconds per byte of the changed link are longer or shorter. Other resources, such as cores, have as much work as
    before, and no collective is faster than these can be.

    Raises:
        MachineError: the prices of such a machine cannot be derived.
    """

    bandwidth_bit_per_s: float | None  # the bits per second of the changed link; None for those of the measured machine
    machines: int | None  # the number of machines; None for that of the measured machine

    def __post_init__(self) -> None:
        super().__post_init__()
        self.estimated, self.margin = True, max(self.margin, MARGIN)
        self._slower = 1.0  # seconds per byte of the changed link, relative to those of the measured machine
        if self.machines is not None:
            if 1 in (self.machines, self.topology.machines):
                raise MachineError(
                    f"machines: {self.name} was measured on {self.topology.machines} machines. From that, prices on "
                    f"{self.machines} cannot be derived, because one of the two has no link between machines; measure "
                    "there, or describe the machine in a file"
                )
            self.topology = replace(self.topology, machines=self.machines)
            self.name = f"{self.name}, machines: {self.machines}"
        if self.bandwidth_bit_per_s is not None:
            self._slower = sending_bit_per_s(self.base) / self.bandwidth_bit_per_s
            self.name = f"{self.name}, {self.bandwidth_bit_per_s / 1e9:g} Gbit/s"

    def collective(self, step: str, level: Level, place: Place, wire_nbytes: Floats, from_roots: bool = False) -> Price:
        price = super().collective(step, level, place, wire_nbytes, from_roots)
        link = _link(self.topology)
        if self.topology.size(level) == 1 or (link == Shared.INTER and level == Level.INTRA):
            return price
        latency_s = super().collective(step, level, place, np.minimum(wire_nbytes, 1.0), from_roots).alone_s
        prices = []
        uses = (self._uses(step, level, topology, link) for topology in (self.base.topology, self.topology))
        for before, after in zip(*uses, strict=True):
            work_s = dict(price.work_s)
            if link in work_s:
                work_s[link] = work_s[link] * (self._slower * after.mean / before.mean)
            sending_s = (price.alone_s - latency_s) * (self._slower * after.busiest / before.busiest)
            alone_s = latency_s * (after.hops / before.hops) + sending_s
            for shared, seconds in work_s.items():
                alone_s = np.maximum(alone_s, seconds / self.capacities[shared])
            prices.append(Price(alone_s, work_s, price.submit_s))
        return Price.fastest(prices)

    def _uses(self, step: str, level: Level, topology: Topology, link: Shared) -> list[Use]:
        """The uses of the changed link, one for each algorithm. Only the ratio of two uses counts, so the
        sharing of links does not matter."""
        in_pipeline = self.computes_on != Shared.CORES
        return [algorithm.uses[link] for algorithm in algorithms_of(step, level, topology, in_pipeline)]
