"""Profiles: machines whose prices were measured.

A profile has a curve for every collective and copy, and a linear model for every codec. Each knows its relative error
at sizes that were held out when it was fitted. Nothing is hidden: prices beyond the measured sizes, and prices that are
put together from others, are noted in :attr:`Profile.assumptions`.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gckernels.compressor import Compressor
from gckernels.ops import PowerSGD
from gckernels.sync.plans.json_files import write_whole
from gckernels.sync.plans.json_records import written
from gckernels.sync.programs.stages import StageKind
from gckernels.sync.programs.steps import AllGather, AllToAll, Hop, Level, Place
from gckernels.sync.programs.topology import Topology

from .curves import CodecModel, CollectiveCurve, CopyCurve, Curve, is_fitted_from, sides_of
from .machine import BAD_ERROR, AtLeastZero, Floats, MachineError, Overheads, Price, Shared
from .parts import AboveZero, Fraction

WARNED_ERROR = 0.10
"""Relative error from which a measurement is doubtful."""
MIN_MARGIN = 0.02
"""Least relative error that predictions are expected to have: nothing repeats more exactly on a machine."""

Measured = CollectiveCurve | CodecModel | CopyCurve

_TAKEN = ("collective", "exchange", "codec")
_EXCHANGES = tuple(each.__name__ for each in (AllGather, AllToAll, Hop))
PROFILE_FORMAT = "gckernels profile"
"""The ``"format"`` of files with profiles."""
VERSION = 1
"""The ``"version"`` of files of machines."""
MEASURE_AGAIN = "measure again with gckernels profile, with nothing else running"


@dataclass(frozen=True)
class Stamp:
    """Where and when a profile was measured."""

    hosts: tuple[str, ...]  # name of the host of each rank
    device: str  # name of the device of a rank
    backend: str  # backend of the process group
    torch: str  # version of torch
    gckernels: str  # version of gckernels
    date: str  # when, in ISO 8601
    seconds: float  # how long it took


@dataclass(frozen=True)
class Profile:
    """A measured machine. It implements :class:`~gckernels.planner.machines.machine.Machine`.

    The work of a collective on the link is its wire part (:meth:`~.curves.Curve.wire`) times the share of the link that
    one such collective can use; that share is measured by running two at once on two channels. CPU seconds are work on
    the cores.
    """

    name: str  # its name, for people
    topology: Topology  # topology of the ranks
    computes_on: Shared  # CORES on the CPU, otherwise DEVICE
    cores: AboveZero  # cores of the machine per rank
    overheads: Overheads  # constant times of the engine
    collectives: tuple[CollectiveCurve, ...]
    codecs: tuple[CodecModel, ...]
    copies: tuple[CopyCurve, ...]
    sharing: Mapping[Level, Fraction]  # for each level, the share of its link that one collective can use
    taken: Mapping[str, AtLeastZero]
    """For ``"collective"``, ``"exchange"`` and ``"codec"``: the work on :attr:`computes_on` that a backward beside them
    loses, relative to their own time on a device, to their CPU seconds on the CPU. Exchanges move payloads and add
    nothing. Without a measurement of their own they take their CPU seconds, and as much of a device as collectives."""
    left_out: tuple[str, ...]  # everything that was not measured, for people
    stamp: Stamp  # where and when it was measured
    memory_nbytes: float | None = None
    """The bytes of memory of a rank, the least of all; ``None`` in profiles of earlier releases."""
    assumptions: dict[str, int] = field(default_factory=dict, compare=False, init=False)
    """How often prices were asked that were not measured as such, by reason."""

    def __post_init__(self) -> None:
        if self.computes_on not in (Shared.CORES, Shared.DEVICE):
            raise MachineError(f"profile: computes_on must be cores or device, got {self.computes_on.value!r}")
        if wrong := {*self.taken} - {*_TAKEN}:
            raise MachineError(f"profile: taken must have numbers for {', '.join(_TAKEN)}, got {', '.join(wrong)}")

    # ---------------------------------------------------------------- files

    def to_json(self) -> dict[str, Any]:
        """The profile as a dict of JSON values."""
        return {"format": PROFILE_FORMAT, "version": VERSION} | written(self)

    def to_text(self) -> str:
        """The text of the profile's file."""
        return json.dumps(self.to_json(), indent=1) + "\n"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the profile to a file, which :func:`~gckernels.planner.machines.files.load_machine` and the
        commands read. The file never holds a part of a profile.

        Raises:
            OSError: the file cannot be written. If there was one, it is as it was.
        """
        write_whole(path, self.to_text())

    # ---------------------------------------------------------------- the machine

    @property
    def estimated(self) -> bool:
        """Never: prices were measured."""
        return False

    @property
    def margin(self) -> float:
        """The relative error that predictions are expected to have.

        It is the median error of the measurements at held-out sizes, of collectives or of codecs, whichever is larger;
        at least :data:`MIN_MARGIN`. Codecs with a bad error do not count, because plans do without them where they can.
        A prediction whose own prices are worse has a larger error, which the prices say.
        """
        codecs = [each.error for each in self.codecs if each.error is not None]
        good = [error for error in codecs if error <= BAD_ERROR]
        collectives = [each.error for each in self.collectives if each.error is not None]
        return max([MIN_MARGIN, *(statistics.median(errors) for errors in (collectives, good or codecs) if errors)])

    @property
    def capacities(self) -> Mapping[Shared, float]:
        """The capacity of every shared resource."""
        return {shared: self.cores if shared == Shared.CORES else 1.0 for shared in Shared}

    @property
    def shared_by(self) -> Mapping[Shared, int]:
        """Nothing: measured times are those of the busiest links already."""
        return {}

    def collective(self, step: str, level: Level, place: Place, wire_nbytes: Floats, from_roots: bool = False) -> Price:
        """The price of a collective; see :meth:`~gckernels.planner.machines.machine.Machine.collective`.

        Collectives of roots are not measured. A root sends as many bytes as all devices of its machine do otherwise,
        which takes as long over one card.

        Raises:
            MachineError: it was not measured.
        """
        if self.topology.size(level) == 1:
            return Price(np.zeros_like(wire_nbytes))
        if self.topology.size(level) == self.topology.world_size:
            level = Level.FLAT  # the same ranks
        wanted = (step, level, self._actual(place))
        alike = (each for each in self.collectives if (each.step, each.level, each.place) == wanted)
        curve = self._curve(next(alike, None), f"{step} of level {level.value} was", wire_nbytes)
        alone = curve.wall(wire_nbytes)
        wire = self.sharing.get(level, 1.0) * curve.wire(wire_nbytes)
        measured = "exchange" in self.taken or self.computes_on == Shared.CORES
        kind = "exchange" if step in _EXCHANGES and measured else "collective"
        work_s = {self._link(level): wire} | self._computing(alone, curve.cores(wire_nbytes), kind)
        return Price(alone, work_s, unsure_s=(curve.error or 0.0) * alone)

    def codec(
        self, work: StageKind, compressor: Compressor, place: Place, units: Floats, elements: Floats, sources: int
    ) -> Price:
        """The price of a codec; see :meth:`~gckernels.planner.machines.machine.Machine.codec`.

        A shard is encoded at the price of other units. Recoding that was not measured costs as much as decoding and
        encoding. Low-rank messages encode and decode the units that they send exactly.

        Raises:
            MachineError: it was not measured.
        """
        match work:
            case StageKind.ENCODE_SHARD:
                return self.codec(StageKind.ENCODE, compressor, place, units, elements, 1)
            case StageKind.PROJECT if not isinstance(compressor, PowerSGD):
                return self.codec(StageKind.ENCODE, compressor, place, units, elements, 1)
            case StageKind.RECONSTRUCT if not isinstance(compressor, PowerSGD):
                return self.codec(StageKind.DECODE, compressor, place, units, elements, sources)
        at = self._actual(place)
        found = next(
            (
                each
                for each in self.codecs
                if (each.work, each.place) == (work, at) and is_fitted_from(each.compressor, compressor)
            ),
            None,
        )
        if found is None and work in (StageKind.RECODE, StageKind.ADD):
            self._note(f"{compressor} {work.value} was not measured: decode and encode")
            decode = self.codec(StageKind.DECODE, compressor, place, units, elements, sources)
            return decode + self.codec(StageKind.ENCODE, compressor, place, units, elements, 1)
        if found is None:
            raise MachineError(f"{self.name}: {work.value} of {compressor} was not measured; {MEASURE_AGAIN}")
        if np.any(elements > found.max_elements):
            self._note(f"{found} beyond {found.max_elements} elements")
        if np.any(units > found.max_units):
            self._note(f"{found} beyond {found.max_units} units")
        if sources > found.max_sources:
            self._note(f"{found} beyond {found.max_sources} sources")
        alone = found.coefficients.seconds(units, elements, sources, sides_of(compressor, units, elements))
        if at == Place.HOST:  # beside the device, and so beside nothing of backward's
            work_s = {Shared.CORES: np.minimum(alone * found.cores, alone * self.cores)}
        else:
            work_s = self._computing(alone, alone * found.cores, "codec")
        return Price(alone, work_s, unsure_s=(found.error or 0.0) * alone)

    def copy(self, resource: Shared, nbytes: Floats) -> Price:
        """The price of copies; see :meth:`~gckernels.planner.machines.machine.Machine.copy`.

        Raises:
            MachineError: it was not measured.
        """
        found = next((each for each in self.copies if each.resource == resource), None)
        curve = self._curve(found, f"copies over {resource.value} were", nbytes)
        alone = curve.wall(nbytes)
        return Price(alone, {resource: alone}, unsure_s=(curve.error or 0.0) * alone)

    # ---------------------------------------------------------------- its quality

    @property
    def bad(self) -> tuple[str, ...]:
        """The measurements whose error is so large that plans do without these compressors if there are others, for
        people. Their prices are used where plans need them, and make the error of predictions larger."""
        return self._errors_above(BAD_ERROR, float("inf"))

    @property
    def doubtful(self) -> tuple[str, ...]:
        """The other measurements with large errors, for people."""
        return self._errors_above(WARNED_ERROR, BAD_ERROR)

    def _errors_above(self, least: float, largest: float) -> tuple[str, ...]:
        measured: tuple[Measured, ...] = (*self.collectives, *self.codecs, *self.copies)
        errors = [(each, each.error or 0.0) for each in measured]
        return tuple(f"{each}: error {error:.0%}" for each, error in errors if least < error <= largest)

    def _curve(self, found: CollectiveCurve | CopyCurve | None, what: str, nbytes: Floats) -> Curve:
        """The curve of a measurement, whose use for sizes ``[n]`` is noted.

        Raises:
            MachineError: it was not made.
        """
        if found is None:
            raise MachineError(f"{self.name}: {what} not measured; {MEASURE_AGAIN}")
        if np.any(nbytes > found.curve.nbytes[-1]):
            self._note(f"{found} beyond {found.curve.nbytes[-1]:.0f} bytes")
        return found.curve

    def _note(self, reason: str) -> None:
        self.assumptions[reason] = self.assumptions.get(reason, 0) + 1

    # ---------------------------------------------------------------- resources

    def _actual(self, place: Place) -> Place:
        """The place where it is measured: a rank without a device has only one."""
        return Place.DEVICE if self.computes_on == Shared.CORES else place

    def _link(self, level: Level) -> Shared:
        """The link that a level needs most. On one machine all ranks are inside of it."""
        return Shared.INTRA if level == Level.INTRA or self.topology.machines == 1 else Shared.INTER

    def _computing(self, alone: Floats, cores: Floats, kind: str) -> dict[Shared, Floats]:
        """The work on the resource of backward, of stages that take ``alone`` seconds and ``cores`` CPU seconds."""
        if self.computes_on == Shared.CORES:
            return {Shared.CORES: self.taken.get(kind, 1.0) * np.minimum(cores, self.cores * alone)}
        share = min(self.taken.get(kind, 1.0 if kind == "codec" else 0.0), 1.0)
        return {Shared.DEVICE: share * alone}
