"""Descriptions: machines whose prices are estimated from published rates of links and devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated

import numpy as np

from gckernels.compressor import Compressor
from gckernels.sync.plans.json_files import Entry
from gckernels.sync.plans.json_records import JsonForm
from gckernels.sync.programs.stages import StageKind
from gckernels.sync.programs.steps import Level, Place

from .codecs import FP32_NBYTES, LAUNCHES, moved_nbytes_per_element
from .collectives import Algorithm, algorithms_of
from .machine import Floats, MachineError, Overheads, Price, Shared
from .parts import (
    Copies,
    DescribedHost,
    DescribedLinks,
    DescribedTopology,
    Device,
    Gpu,
    PublishedCodec,
    PublishedCodecs,
)

MARGIN = 0.25
"""The relative error that predictions from descriptions are expected to have."""


@dataclass(frozen=True)
class Description:
    """A machine that nobody has measured, as a :class:`~gckernels.planner.machines.machine.Machine`.

    Attributes:
        name: its name.
        topology: its machines and devices.
        host: the host of each machine.
        links: the links between machines, ``INTER``, and those between the devices of a machine, ``INTRA``. Each must
            be there if the topology has several machines or several devices.
        gpu: the device of a rank; ``None`` if ranks compute on the cores of the host.
        copies: copies between device and host; ``None`` without a GPU.
        overheads: constant times of the engine.
        codecs: published times of compressors on the device, by the names of the compressors. They replace estimates.
        about: a text on what the machine is.
        sources: for every number of the file where it comes from, by its dotted path or that of an object around it.
    """

    name: Annotated[str, JsonForm(Entry.name)]
    topology: DescribedTopology
    host: DescribedHost
    links: DescribedLinks
    gpu: Device = field(default=None, metadata={"key": "device"})
    copies: Copies | None = None
    overheads: Overheads = field(default_factory=Overheads)
    codecs: PublishedCodecs = field(default_factory=dict)
    about: str = ""
    sources: Mapping[str, str] = field(default_factory=dict)

    estimated = True
    margin = MARGIN

    def __post_init__(self) -> None:
        if (self.gpu is None) != (self.copies is None):
            raise MachineError("copies: must be there exactly if device is of kind gpu")
        if self.gpu is None and self.codecs:
            raise MachineError("codecs: published times are those of a device of kind gpu; leave them out")
        for needed, link in ((self.topology.machines, Shared.INTER), (self.topology.devices, Shared.INTRA)):
            if needed > 1 and link not in self.links:
                what = "machines" if link == Shared.INTER else "devices"
                raise MachineError(f"links.{link.value}: is missing; {needed} {what} need it")
        if Shared.INTRA in self.links and self.links[Shared.INTRA].one_medium:
            raise MachineError("links.intra.one_medium: only links between machines can be one medium")

    @property
    def computes_on(self) -> Shared:
        return Shared.CORES if self.gpu is None else Shared.DEVICE

    @cached_property
    def capacities(self) -> Mapping[Shared, float]:
        return {shared: max(1.0, self._cores) if shared == Shared.CORES else 1.0 for shared in Shared}

    @property
    def memory_nbytes(self) -> float | None:
        if self.gpu is not None:
            return self.gpu.memory_nbytes
        return None if self.host.memory_nbytes is None else self.host.memory_nbytes / self.topology.devices

    @property
    def _cores(self) -> float:
        """Cores of a rank. The capacity is that of threads: a part of a core runs one, more slowly."""
        return self.host.cores / self.topology.devices

    @property
    def _thread(self) -> float:
        """The part of a core that a thread gets."""
        return min(1.0, self._cores)

    @cached_property
    def shared_by(self) -> Mapping[Shared, int]:
        return {link: min(each.shared_by, self.topology.devices) for link, each in self.links.items()}

    # ---------------------------------------------------------------- prices

    def collective(self, step: str, level: Level, place: Place, wire_nbytes: Floats, from_roots: bool = False) -> Price:
        """The price of a collective, by the laws of :mod:`~gckernels.planner.machines.collectives`.

        Sending nothing costs nothing. Sending from a host takes cores as well. Data of GPUs that lies on the host of
        their machine is exchanged in its memory, at the rate of the cores, and not over the links between devices.
        """
        wire = np.asarray(wire_nbytes, dtype=np.float64)
        in_pipeline = place == Place.DEVICE and self.gpu is not None
        sharing = (self.shared_by.get(link, 1) for link in (Shared.INTER, Shared.INTRA))
        algorithms = algorithms_of(step, level, self.topology, in_pipeline, from_roots, *sharing)
        if not algorithms[0].uses:  # a single rank
            return Price(np.zeros_like(wire))
        return Price.fastest([self._sending(algorithm, place, wire) for algorithm in algorithms])

    def _sending(self, algorithm: Algorithm, place: Place, wire: Floats) -> Price:
        """The price of an algorithm."""
        on_host = place == Place.HOST or self.gpu is None
        in_memory = place == Place.HOST and self.gpu is not None
        latency_s = 0.0
        sending_s = np.zeros_like(wire)
        work_s: dict[Shared, Floats] = {}
        busiest_s: dict[Shared, Floats] = {}
        for shared, use in algorithm.uses.items():
            link = self.links[shared]
            if shared == Shared.INTRA and in_memory:
                latency_s += use.hops * self.host.call_s
                continue
            latency_s += use.hops * link.latency_s
            mean, busiest = use.mean, use.busiest
            if link.one_medium:  # it carries what all links would
                mean = busiest = use.mean * self.topology.world_size / self.shared_by[shared]
            link_s = busiest * wire / link.byte_per_s
            sending_s = sending_s + link_s if algorithm.in_turn else np.maximum(sending_s, link_s)
            work_s[shared] = mean * wire / link.byte_per_s
            if busiest > mean:
                busiest_s[shared] = link_s
        if on_host:
            work_s[Shared.CORES] = wire / (self._thread * self.host.network_byte_per_core_s)
            sending_s = np.maximum(sending_s, work_s[Shared.CORES])
        return Price(np.where(wire > 0, latency_s + sending_s, 0.0), work_s, busiest_s=busiest_s)

    def codec(
        self, work: StageKind, compressor: Compressor, place: Place, units: Floats, elements: Floats, sources: int
    ) -> Price:
        """The price of a codec: published times, or else the bytes that it moves at least, and launches.

        Published times are for single payloads. The time above that of the smallest gradient grows with the bytes that
        merging moves.
        """
        moved = moved_nbytes_per_element(work, compressor, sources)
        used = (np.asarray(units) > 0).astype(np.float64)
        if place == Place.HOST or self.gpu is None:
            return self._on_cores(used * elements * moved, used * self.host.call_s)
        published = self.codecs.get(compressor.name)
        if published is not None:
            seconds = used * _published_s(published, work, compressor, elements * FP32_NBYTES, sources)
            return Price(seconds, {Shared.DEVICE: seconds})
        return self._on_device(self.gpu, used * elements * moved, used * (LAUNCHES[work] * self.gpu.launch_s))

    def copy(self, resource: Shared, nbytes: Floats) -> Price:
        """The price of copies. A copy within the memory of device or host reads and writes every byte."""
        copied = np.asarray(nbytes, dtype=np.float64)
        match resource:
            case Shared.TO_HOST | Shared.TO_DEVICE if self.copies is not None:
                sharing = min(self.copies.shared_by, self.topology.devices)
                copying_s = copied * sharing / self.copies.bandwidth_byte_per_s
                return Price(self.copies.latency_s + copying_s, {resource: copying_s})
            case Shared.DEVICE if self.gpu is not None:
                return self._on_device(self.gpu, 2 * copied, self.gpu.launch_s)
            case Shared.CORES:
                rate = self.host.memory_byte_per_s / self.topology.devices
                return self._in_memory(2 * copied / rate, self.host.call_s)
        raise MachineError(f"{self.name}: has no copies of kind {resource.value!r}")

    def _on_device(self, gpu: Gpu, moved: Floats, launching_s: Floats | float) -> Price:
        moving_s = moved / (gpu.codec_efficiency * gpu.memory_byte_per_s)
        return Price(launching_s + moving_s, {Shared.DEVICE: moving_s})

    def _on_cores(self, moved: Floats, calling_s: Floats | float) -> Price:
        """The price of moving bytes with one core, not faster than the rank's part of the memory."""
        rate = min(self.host.codec_byte_per_core_s, self.host.memory_byte_per_s / self.topology.devices)
        return self._in_memory(moved / rate, calling_s)

    def _in_memory(self, moving_s: Floats, calling_s: Floats | float) -> Price:
        """The price of ``moving_s`` seconds of one core."""
        thread_s = moving_s / self._thread
        return Price(calling_s + thread_s, {Shared.CORES: thread_s})


def _published_s(
    published: PublishedCodec, work: StageKind, compressor: Compressor, nbytes: Floats, sources: int
) -> Floats:
    """Published seconds of a codec for gradients of ``nbytes`` bytes in fp32."""
    encode_s, one_s, fixed_s = (
        published.encode.seconds(nbytes),
        published.decode.seconds(nbytes),
        published.decode.fixed_s,
    )
    match work:
        case StageKind.ENCODE | StageKind.ENCODE_SHARD:
            return encode_s
        case StageKind.PROJECT:
            return encode_s / compressor.rounds
        case StageKind.RECONSTRUCT:
            return one_s
    several, one = (moved_nbytes_per_element(StageKind.DECODE, compressor, each) for each in (sources, 1))
    decode_s = fixed_s + (one_s - fixed_s) * (several / one)
    return decode_s if work == StageKind.DECODE else decode_s + encode_s
