"""The parts of a described machine: its devices, its hosts, its links, copies between them, published codecs."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

import numpy as np

from gckernels.compressor import COMPRESSORS
from gckernels.sync.plans.json_files import Entry
from gckernels.sync.plans.json_records import JsonForm, read_record, written
from gckernels.sync.programs.topology import Topology

from .machine import MAX_RATE, AtLeastZero, Floats, Shared

MAX_SHARING = 1 << 20
"""The largest number of machines, of devices, and of devices that share something."""
_ABOVE_ZERO = JsonForm(functools.partial(Entry.number, above=0, most=MAX_RATE))
AboveZero: TypeAlias = Annotated[float, _ABOVE_ZERO]
Fraction: TypeAlias = Annotated[float, JsonForm(functools.partial(Entry.number, above=0, most=1))]
Count: TypeAlias = Annotated[int, JsonForm(functools.partial(Entry.integer, least=1, most=MAX_SHARING))]


@dataclass(frozen=True)
class Gpu:
    """A device with a memory of its own, on which codecs are limited by the bandwidth of that memory.

    Attributes:
        memory_byte_per_s: the bytes that its memory reads and writes in a second.
        codec_efficiency: the fraction of that rate which codecs reach, above 0 and at most 1.
        launch_s: seconds from the launch of a kernel to its start.
        memory_nbytes: the bytes of its memory; ``None`` if they are not known.
    """

    memory_byte_per_s: AboveZero
    codec_efficiency: Fraction
    launch_s: AtLeastZero
    memory_nbytes: Annotated[float | None, _ABOVE_ZERO] = None


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

    cores: AboveZero
    memory_byte_per_s: AboveZero
    codec_byte_per_core_s: AboveZero
    network_byte_per_core_s: AboveZero
    call_s: AtLeastZero
    memory_nbytes: Annotated[float | None, _ABOVE_ZERO] = None


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

    bandwidth_bit_per_s: AboveZero
    efficiency: Fraction
    latency_s: AtLeastZero
    shared_by: Count
    limit_bit_per_s: AboveZero = math.inf
    one_medium: bool = False

    @property
    def byte_per_s(self) -> float:
        """The bytes that collectives get through a link in a second in each direction."""
        return min(self.bandwidth_bit_per_s * self.efficiency, self.limit_bit_per_s) / 8


@dataclass(frozen=True)
class Copies:
    """Copies between the memory of devices and the memory of their host.

    Attributes:
        bandwidth_byte_per_s: the bytes that are copied in a second, in each direction.
        latency_s: seconds that a copy takes besides.
        shared_by: the number of devices of a machine that share the bandwidth.
    """

    bandwidth_byte_per_s: AboveZero
    latency_s: AtLeastZero
    shared_by: Count


def _points(entry: Entry) -> tuple[tuple[float, float], ...]:
    if len(entry.items()) < 2:
        entry.refuse("a list of at least two pairs [bytes, seconds]")
    points: list[tuple[float, float]] = []
    for pair in entry.items():
        if len(pair.items()) != 2:
            pair.refuse("a pair [bytes, seconds]")
        nbytes, seconds = (each.number(most=MAX_RATE) for each in pair.items())
        if points and (nbytes <= points[-1][0] or seconds < points[-1][1]):
            pair.refuse("of more bytes and no fewer seconds than the pair before it", str(pair.value))
        points.append((nbytes, seconds))
    return tuple(points)


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


_CURVE = JsonForm(lambda entry: CodecCurve(_points(entry)), lambda curve: [list(point) for point in curve.points])


@dataclass(frozen=True)
class PublishedCodec:
    """Published times of a compressor on the device.

    Attributes:
        encode: the times of encoding.
        decode: the times of decoding one payload.
    """

    encode: Annotated[CodecCurve, _CURVE]
    decode: Annotated[CodecCurve, _CURVE]


# -------------------------------------------------------------------- their forms in files

_LINKS = (Shared.INTER, Shared.INTRA)


def _known(part: Any) -> dict[str, Any]:
    """The object of a part, without entries that are not known, or usual."""
    return {key: value for key, value in written(part).items() if value not in (None, math.inf) and value is not False}


def _topology(entry: Entry) -> Topology:
    fields = entry.fields(("machines", "devices"))
    return Topology(*(fields[name].integer(1, MAX_SHARING) for name in ("machines", "devices")))


def _links(entry: Entry) -> dict[Shared, DescribedLink]:
    given = entry.fields((), [link.value for link in _LINKS])
    return {link: read_record(given[link.value], DescribedLink) for link in _LINKS if link.value in given}


def _gpu(entry: Entry) -> Gpu | None:
    if entry.fields(("kind",), None)["kind"].choice(("gpu", "cpu")) == "gpu":
        return read_record(entry, Gpu, head=("kind",))
    entry.fields(("kind",))
    return None


def _codecs(entry: Entry) -> dict[str, PublishedCodec]:
    return {name: read_record(each, PublishedCodec) for name, each in entry.fields((), sorted(COMPRESSORS)).items()}


DescribedTopology: TypeAlias = Annotated[Topology, JsonForm(_topology, written)]
DescribedHost: TypeAlias = Annotated[Host, JsonForm(functools.partial(read_record, kind=Host), _known)]
DescribedLinks: TypeAlias = Annotated[
    Mapping[Shared, DescribedLink],
    JsonForm(_links, lambda links: {link.value: _known(each) for link, each in links.items()}),
]
Device: TypeAlias = Annotated[
    Gpu | None, JsonForm(_gpu, lambda gpu: {"kind": "cpu"} if gpu is None else {"kind": "gpu"} | _known(gpu))
]
PublishedCodecs: TypeAlias = Annotated[
    Mapping[str, PublishedCodec],
    JsonForm(_codecs, lambda codecs: {name: written(each) for name, each in codecs.items()}),
]
