"""Measured costs: curves of seconds over bytes, and linear models of codecs."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from gckernels.compressor import Compressor, from_spec
from gckernels.ops import PowerSGD
from gckernels.sync.plans.json_files import Entry
from gckernels.sync.plans.json_records import FLAT, JsonForm
from gckernels.sync.programs.stages import StageKind
from gckernels.sync.programs.steps import KINDS, Level, Place
from gckernels.toolkit.fields import shown

from .machine import Floats, MachineError, Shared

_LAST = 4  # sizes between which the slope beyond them is measured
_LATENCIES = 2.0  # sizes that take less than this many times the latency do not tell a slope


@dataclass(frozen=True)
class Curve:
    """Seconds over bytes, measured at some sizes, linear between them.

    Below the first size the seconds are those of the first size, the latency. Beyond the last one the curve goes on
    with the median slope between its last sizes, because one of them may have been disturbed.
    """

    nbytes: tuple[float, ...]  # the measured sizes, ascending
    wall_s: tuple[float, ...]  # seconds at each size; they never fall
    cores_s: tuple[float, ...]  # CPU seconds at each size, of all threads
    error: float | None = None
    """Median relative error at sizes that were held out; ``None`` if there are too few sizes to tell."""

    def __post_init__(self) -> None:
        _require_points(self.nbytes, self.wall_s, self.cores_s)

    @property
    def latency_s(self) -> float:
        """Seconds of the smallest size."""
        return self.wall_s[0]

    def wire(self, nbytes: Floats) -> Floats:
        """Seconds for which sizes ``[n]`` keep the wire busy.

        They are the seconds beyond the latency, but at least what the bytes take at the best measured rate: calls of a
        train hide the latency of each other, and many small messages are no faster than a large one.
        """
        fastest_s = min(seconds / size for size, seconds in zip(self.nbytes, self.wall_s, strict=True))
        wall = self.wall(nbytes)
        result: Floats = np.minimum(np.maximum(wall - self.latency_s, nbytes * fastest_s), wall)
        return result

    def wall(self, nbytes: Floats) -> Floats:
        """Seconds for sizes ``[n]``; 0 for no bytes."""
        return _interpolated(nbytes, self.nbytes, self.wall_s)

    def cores(self, nbytes: Floats) -> Floats:
        """CPU seconds for sizes ``[n]``; 0 for no bytes."""
        return _interpolated(nbytes, self.nbytes, self.cores_s)


def _interpolated(nbytes: Floats, known: Sequence[float], seconds: Sequence[float]) -> Floats:
    inside = np.interp(nbytes, known, seconds)
    beyond = np.maximum(nbytes - known[-1], 0.0) * _slope(known, seconds)
    return np.where(nbytes > 0, inside + beyond, 0.0)


def _slope(known: Sequence[float], seconds: Sequence[float]) -> float:
    if len(known) == 1:
        return seconds[0] / known[0]
    last = list(zip(known, seconds, strict=True))[-_LAST:]
    sloping = [point for point in last if point[1] >= _LATENCIES * seconds[0]]
    pairs = itertools.combinations(sloping if len(sloping) > 2 else last[-2:], 2)
    slopes = [(more_s - less_s) / (more - less) for (less, less_s), (more, more_s) in pairs]
    return max(statistics.median(slopes), 0.0)


def _require_points(nbytes: Sequence[float], wall_s: Sequence[float], cores_s: Sequence[float]) -> None:
    if not len(nbytes) == len(wall_s) == len(cores_s) > 0:
        raise MachineError(f"sizes and seconds must be as many, at least one: {len(nbytes)} and {len(wall_s)}")
    for name, values in (("nbytes", nbytes), ("wall_s", wall_s), ("cores_s", cores_s)):
        if not all(math.isfinite(value) and value >= 0 for value in values):
            raise MachineError(f"{name} must be finite and not negative, got {list(values)}")
    if nbytes[0] <= 0 or any(one >= other for one, other in itertools.pairwise(nbytes)):
        raise MachineError(f"nbytes must be positive and ascend, got {list(nbytes)}")
    if wall_s[0] <= 0 or any(one > other for one, other in itertools.pairwise(wall_s)):
        raise MachineError(f"wall_s must be positive and never fall, got {list(wall_s)}")


@dataclass(frozen=True)
class CollectiveCurve:
    """The cost of one call of a collective in a train of calls."""

    step: Annotated[str, JsonForm(functools.partial(Entry.choice, allowed=KINDS))]  # name of the collective
    level: Level  # the ranks that take part
    place: Place  # where the data lies
    curve: Annotated[Curve, FLAT]  # seconds over the bytes that a rank sends

    @property
    def error(self) -> float | None:
        """The error of the curve."""
        return self.curve.error

    def __str__(self) -> str:
        return f"{self.step} {self.level.value}{place_suffix(self.place)}"


@dataclass(frozen=True)
class CopyCurve:
    """The cost of copies over one resource."""

    resource: Shared
    curve: Annotated[Curve, FLAT]

    @property
    def error(self) -> float | None:
        """The error of the curve."""
        return self.curve.error

    def __str__(self) -> str:
        return f"Copy {self.resource.value}"


@dataclass(frozen=True)
class Coefficients:
    """A linear model of the seconds of one launch, with coefficients that are not negative."""

    launch_s: float = 0.0  # seconds of a launch
    unit_s: float = 0.0  # for each unit
    element_s: float = 0.0  # for each element
    far_element_s: float = 0.0  # in addition for each element beyond knee, when data no longer fits into the caches
    source_unit_s: float = 0.0  # for each unit and each source after the first
    source_element_s: float = 0.0  # for each element and each source after the first
    side_s: float = 0.0  # for each row and column of a unit's matrix; low-rank methods only
    knee: float = 0.0  # number of elements

    def seconds(self, units: Floats, elements: Floats, sources: int | Floats, sides: Floats | float = 0.0) -> Floats:
        """Seconds of launches ``[n]``; 0 without units."""
        features = features_of(units, elements, sources, sides, self.knee)
        return np.where(units > 0, features @ np.array(dataclasses.astuple(self)[:-1]), 0.0)


def features_of(units: Floats, elements: Floats, sources: int | Floats, sides: Floats | float, knee: float) -> Floats:
    """The numbers that the first seven :class:`Coefficients` are multiplied by, ``[n, 7]``."""
    more = np.broadcast_to(np.asarray(sources, dtype=np.float64) - 1.0, units.shape)
    far = np.maximum(elements - knee, 0.0)
    wide = np.broadcast_to(np.asarray(sides, dtype=np.float64), units.shape)
    return np.stack([np.ones_like(units), units, elements, far, units * more, elements * more, wide], axis=-1)


def sides_of(method: Compressor, units: Floats, elements: Floats) -> Floats | float:
    """The rows and columns of the matrices of units; 0 for methods without matrices."""
    if isinstance(method, PowerSGD) and method.rows is not None:
        return units * method.rows + elements / method.rows
    return 0.0


def _compressor(entry: Entry) -> Compressor:
    try:
        return from_spec(entry.text())
    except ValueError as error:
        entry.refuse("a compressor of this release", f"{shown(entry.value)}: {error}")


@dataclass(frozen=True)
class CodecModel:
    """The cost of one codec's work in one launch."""

    compressor: Annotated[Compressor, JsonForm(_compressor, str)]  # the compressor before it is fitted to a parameter
    work: StageKind
    place: Place  # where it is computed
    coefficients: Annotated[Coefficients, FLAT]  # the seconds
    cores: float  # cores that it keeps busy on average, or the share of the device
    max_units: int  # max_units, max_elements, max_sources: the largest measured ones
    max_elements: int
    max_sources: int
    error: float | None = None  # median relative error at sizes that were held out; None if there are too few to tell

    def __str__(self) -> str:
        return f"{self.compressor} {self.work.value}{place_suffix(self.place)}"


def is_fitted_from(base: Compressor, method: Compressor) -> bool:
    """Whether ``method`` is ``base``, or ``base`` fitted to some shape. Fitting sets fields that were ``None``."""
    if type(base) is not type(method):
        return False
    pairs = ((getattr(base, field.name), getattr(method, field.name)) for field in dataclasses.fields(base))
    return all(mine is None or mine == other for mine, other in pairs)


def place_suffix(place: Place) -> str:
    """The end of the name of a measurement: nothing on the device."""
    return "" if place == Place.DEVICE else f" ({place.value})"
