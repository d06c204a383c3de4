"""The parts of a described machine: its devices, its hosts, its links, copies between them, published codecs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...plans.json_files import Entry
from .machine import Floats

MAX_RATE = 1e18
"""The largest number in a description. It is beyond every rate, time and size, and products of several stay finite."""
MAX_SHARING = 1 << 20
"""The largest number of machines, of devices, and of devices that share something."""
_USUAL = ("limit_bit_per_s", "one_medium")
_UNKNOWN = ("memory_nbytes",)


def names_of(part: type[Any]) -> tuple[str, ...]:
    """The names of the fields of a part."""
    return tuple(field.name for field in dataclasses.fields(part))


def at_least_zero(entry: Entry) -> float:
    """The number of an entry, from 0 up."""
    return entry.number(most=MAX_RATE)


def above_zero(entry: Entry) -> float:
    """The number of an entry, above 0."""
    return entry.number(above=0, most=MAX_RATE)


def known(part: Any) -> dict[str, Any]:
    """The fields of a part as an object; those that are not known, or usual, are left out."""
    fields = dataclasses.asdict(part).items()
    return {key: value for key, value in fields if value not in (None, math.inf) and value is not False}


def _required(part: type[Any], optional: Collection[str]) -> list[str]:
    return [name for name in names_of(part) if name not in optional]


@dataclass(frozen=True)
class Gpu:
    """A device with a memory of its own, on which codecs are limited by the bandwidth of that memory.

    Attributes:
        memory_byte_per_s: the bytes that its memory reads and writes in a second.
        codec_efficiency: the fraction of that rate which codecs reach, above 0 and at most 1.
        launch_s: seconds from the launch of a kernel to its start.
        memory_nbytes: the bytes of its memory; ``None`` if they are not known.
    """

    memory_byte_per_s: float
    codec_efficiency: float
    launch_s: float
    memory_nbytes: float | None = None

    @staticmethod
    def from_json(entry: Entry) -> Gpu:
        """The device in an object of kind ``"cuda"``."""
        fields = entry.fields(("kind", *_required(Gpu, _UNKNOWN)), _UNKNOWN)
        return Gpu(
            above_zero(fields["memory_byte_per_s"]),
            fields["codec_efficiency"].number(above=0, most=1),
            at_least_zero(fields["launch_s"]),
            above_zero(fields["memory_nbytes"]) if "memory_nbytes" in fields else None,
        )


@dataclass(frozen=True)
class Host:
    """The host of a machine.

    Attributes:
        cores: its cores, which its ranks share equally.
        memory_byte_per_s: the bytes that its memory reads and writes in a second, for all ranks together.
        codec_byte_per_core_s: the bytes that codecs on one core read and write in a second.
        network_byte_per_core_s: the bytes that one core sends in a second, while it receives as many.
        call_s: seconds that a call takes besides.
        memory_nbytes: the bytes of its memory, for all ranks together; ``None`` if they are not known.
    """

    cores: float
    memory_byte_per_s: float
    codec_byte_per_core_s: float
    network_byte_per_core_s: float
    call_s: float
    memory_nbytes: float | None = None

    @staticmethod
    def from_json(entry: Entry) -> Host:
        """The host in an object."""
        fields = entry.fields(_required(Host, _UNKNOWN), _UNKNOWN)
        return Host(
            above_zero(fields["cores"]),
            above_zero(fields["memory_byte_per_s"]),
            above_zero(fields["codec_byte_per_core_s"]),
            above_zero(fields["network_byte_per_core_s"]),
            at_least_zero(fields["call_s"]),
            above_zero(fields["memory_nbytes"]) if "memory_nbytes" in fields else None,
        )


@dataclass(frozen=True)
class DescribedLink:
    """The links of one kind: those between machines, or those between the devices of a machine.

    Attributes:
        bandwidth_bit_per_s: the nominal bits that a link carries in a second, in each direction.
        efficiency: the fraction of the bandwidth that collectives reach, above 0 and at most 1.
        latency_s: seconds until the first byte of a message arrives.
        shared_by: the number of devices of a machine that share a link.
        limit_bit_per_s: the bits that software gets through a link in a second, however large its bandwidth is.
        one_medium: whether all machines send through one medium in turns, as by radio. It has the bandwidth, for all
            machines together and for both directions.
    """

    bandwidth_bit_per_s: float
    efficiency: float
    latency_s: float
    shared_by: int
    limit_bit_per_s: float = math.inf
    one_medium: bool = False

    @property
    def byte_per_s(self) -> float:
        """The bytes that collectives get through a link in a second in each direction."""
        return min(self.bandwidth_bit_per_s * self.efficiency, self.limit_bit_per_s) / 8

    @staticmethod
    def from_json(entry: Entry) -> DescribedLink:
        """The link in an object."""
        fields = entry.fields(_required(DescribedLink, _USUAL), _USUAL)
        return DescribedLink(
            above_zero(fields["bandwidth_bit_per_s"]),
            fields["efficiency"].number(above=0, most=1),
            at_least_zero(fields["latency_s"]),
            fields["shared_by"].integer(1, MAX_SHARING),
            above_zero(fields["limit_bit_per_s"]) if "limit_bit_per_s" in fields else math.inf,
            fields["one_medium"].boolean() if "one_medium" in fields else False,
        )


@dataclass(frozen=True)
class Copies:
    """Copies between the memory of devices and that of their host.

    Attributes:
        bandwidth_byte_per_s: the bytes that are copied in a second, in each direction.
        latency_s: seconds that a copy takes besides.
        shared_by: the number of devices of a machine that share the bandwidth.
    """

    bandwidth_byte_per_s: float
    latency_s: float
    shared_by: int

    @staticmethod
    def from_json(entry: Entry) -> Copies:
        """The copies in an object."""
        fields = entry.fields(names_of(Copies))
        return Copies(
            above_zero(fields["bandwidth_byte_per_s"]),
            at_least_zero(fields["latency_s"]),
            fields["shared_by"].integer(1, MAX_SHARING),
        )


@dataclass(frozen=True)
class CodecCurve:
    """The seconds of a codec call as a function of the bytes of its gradient in fp32.

    The seconds are those of the first point up to there, linear between points, and beyond the last point they go on
    as between the last two.

    Attributes:
        points: at least two pairs ``(bytes, seconds)``. Bytes increase from each point to the next, seconds do not
            decrease.
    """

    points: tuple[tuple[float, float], ...]

    @property
    def fixed_s(self) -> float:
        """The seconds of the smallest gradient."""
        return self.points[0][1]

    def seconds(self, nbytes: Floats) -> Floats:
        """The seconds for gradients of ``nbytes`` bytes."""
        sizes, seconds = (np.array(column, dtype=np.float64) for column in zip(*self.points, strict=True))
        slope = (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])
        beyond = np.maximum(nbytes - sizes[-1], 0.0) * slope
        result: Floats = np.interp(nbytes, sizes, seconds) + beyond
        return result


@dataclass(frozen=True)
class PublishedCodec:
    """Published times of a compressor on the device.

    Attributes:
        encode: the times of encoding.
        decode: the times of decoding one payload.
    """

    encode: CodecCurve
    decode: CodecCurve
