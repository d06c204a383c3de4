"""The machine of a training as its trials have shown it: prices fitted to the stages of recorded steps."""

from __future__ import annotations

import functools
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from gckernels.codec import Codec
from gckernels.compressor import Compressor
from gckernels.sync.accuracy.accuracy import unfitted
from gckernels.sync.engine.recorded_step import RecordedStage, RecordedStep
from gckernels.sync.plans.plan import Plan
from gckernels.sync.programs.stages import StageKind
from gckernels.sync.programs.steps import Level, Place
from gckernels.sync.programs.topology import Topology

from ..machines.codecs import moved_nbytes_per_element, payload_nbytes_per_element
from ..machines.curves import Curve
from ..machines.machine import Floats, MachineError, Overheads, Price, Shared
from ..profiling.measurements.fits import CallCost, curve_of, non_negative_least_squares

_CODINGS = (
    StageKind.ENCODE,
    StageKind.ENCODE_SHARD,
    StageKind.DECODE,
    StageKind.RECODE,
    StageKind.ADD,
    StageKind.PROJECT,
    StageKind.RECONSTRUCT,
)


class StageTime(NamedTuple):
    """A stage of a recorded step, the same on all ranks but for its time."""

    name: str  # the name of the collective, or the work of a codec
    spec: str  # the compressor of most elements; empty for a collective
    amount: float  # the bytes that a rank sends, or the bytes that a codec moves at least
    seconds: float  # its time


def stage_times(plan: Plan, step: RecordedStep) -> list[StageTime]:
    """The stages of a recorded step, in an order that is the same on all ranks.

    Args:
        plan: the plan that has run.
    """
    found = []
    for stage in sorted(step.stages, key=lambda stage: (stage.message, stage.start_s)):
        seconds = stage.end_s - stage.start_s
        if stage.kind in (StageKind.COLLECTIVE, StageKind.AVERAGE):
            name = "AllReduce" if stage.kind == StageKind.AVERAGE else stage.name.partition("(")[0]
            found.append(StageTime(name, "", stage.sent_nbytes, seconds))
        elif stage.kind in _CODINGS:
            method = unfitted(max((plan.by_key[key] for key in stage.units), key=lambda unit: unit.numel).compressor)
            moved = stage.elements * moved_nbytes_per_element(stage.kind, method, _sources(method, stage))
            found.append(StageTime(stage.kind.value, str(method), moved, seconds))
    return found


def _sources(method: Compressor, stage: RecordedStage) -> int:
    """The number of payloads that a stage merges."""
    if not isinstance(method, Codec) or stage.kind not in (StageKind.DECODE, StageKind.RECODE) or not stage.elements:
        return 1
    return max(round(stage.read_nbytes / (stage.elements * payload_nbytes_per_element(method))), 1)


@dataclass(frozen=True)
class CodecFit:
    """The seconds of one work of a codec: ``launch_s + moved * byte_s``."""

    launch_s: float
    byte_s: float

    @staticmethod
    def of(stages: Sequence[StageTime]) -> CodecFit:
        """The fit with the least relative error. Seconds are not negative."""
        seconds = np.array([max(stage.seconds, 1e-9) for stage in stages])
        columns = np.stack([np.ones(len(stages)), [stage.amount for stage in stages]], axis=1) / seconds[:, None]
        launch_s, byte_s = non_negative_least_squares(columns, np.ones(len(stages))).tolist()
        return CodecFit(launch_s, byte_s)


@dataclass(frozen=True)
class TrialMachine:
    """A machine whose prices are fitted to recorded stages, as a
    :class:`~gckernels.planner.machines.machine.Machine`.

    The stages ran beside backward and the stages of other messages, so prices include what that takes. Collectives that
    were not recorded have no price, but for all-reduces, which plain averaging needs: they take as long as the others
    do for the bytes that a rank sends. A work of a codec that was not recorded takes as long as the others do for the
    bytes that it moves at least.
    """

    ranks: int  # the number of ranks
    computes_on: Shared  # the resource of backward
    cores: float  # the cores of a rank
    curves: Mapping[str, Curve]  # seconds of collectives over the bytes that a rank sends, by name
    sending: Curve  # the seconds of all collectives together
    codecs: Mapping[tuple[str, str], CodecFit]  # the works of codecs, by name and compressor

    name = "trials"
    estimated = False
    margin = 0.0
    overheads = Overheads()
    memory_nbytes = None
    shared_by: Mapping[Shared, int] = field(default_factory=dict)

    @staticmethod
    def of(stages: Iterable[StageTime], ranks: int, computes_on: Shared, cores: float) -> TrialMachine:
        """The machine that explains recorded stages.

        Raises:
            MachineError: no collective or no codec was recorded.
        """
        sent, coded = defaultdict[str, list[StageTime]](list), defaultdict[tuple[str, str], list[StageTime]](list)
        for stage in stages:
            if stage.spec:
                coded[stage.name, stage.spec].append(stage)
            elif stage.amount > 0:
                sent[stage.name].append(stage)
        if not sent or not coded:
            raise MachineError("trials: no plan that compresses has run a step that could be recorded")
        everything = [stage for each in sent.values() for stage in each]
        return TrialMachine(
            ranks,
            computes_on,
            cores,
            {name: _curve(each) for name, each in sent.items()},
            _curve(everything),
            {key: CodecFit.of(each) for key, each in coded.items()},
        )

    @property
    def topology(self) -> Topology:
        return Topology(self.ranks)

    @property
    def capacities(self) -> Mapping[Shared, float]:
        return {shared: self.cores if shared == Shared.CORES else 1.0 for shared in Shared}

    def collective(self, step: str, level: Level, place: Place, wire_nbytes: Floats, from_roots: bool = False) -> Price:
        if self.topology.size(level) == 1:
            return Price(np.zeros_like(wire_nbytes))
        curve = self.curves.get(step, self.sending if step == "AllReduce" else None)
        if curve is None:
            raise MachineError(f"{self.name}: {step} was not recorded")
        return Price(curve.wall(wire_nbytes), {Shared.INTER: curve.wire(wire_nbytes)})

    def codec(
        self, work: StageKind, compressor: Compressor, place: Place, units: Floats, elements: Floats, sources: int
    ) -> Price:
        fit = self.codecs.get((work.value, str(unfitted(compressor)))) or self._usual_codec
        seconds = (np.asarray(units) > 0) * fit.launch_s
        seconds = seconds + elements * moved_nbytes_per_element(work, compressor, sources) * fit.byte_s
        return Price(seconds, {self.computes_on: seconds})

    def copy(self, resource: Shared, nbytes: Floats) -> Price:
        seconds = self._usual_codec.launch_s + 2 * np.asarray(nbytes, dtype=np.float64) * self._usual_codec.byte_s
        return Price(seconds, {resource: seconds})

    @functools.cached_property
    def _usual_codec(self) -> CodecFit:
        """The fit in the middle of all."""
        fits = self.codecs.values()
        launches_s, bytes_s = [fit.launch_s for fit in fits], [fit.byte_s for fit in fits]
        return CodecFit(statistics.median(launches_s), statistics.median(bytes_s))


def _curve(stages: Sequence[StageTime]) -> Curve:
    """The curve through the stages, with the median time of those that send as much."""
    by_size = defaultdict[float, list[float]](list)
    for stage in stages:
        by_size[stage.amount].append(max(stage.seconds, 1e-9))
    return curve_of([CallCost(nbytes, statistics.median(each), 0.0) for nbytes, each in by_size.items()])
