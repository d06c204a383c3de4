"""Problems for tests of policies: a machine with simple prices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from gckernels.compressor import Compressor
from gckernels.planner.drafts.problem import Problem
from gckernels.planner.machines.machine import Floats, MachineError, Overheads, Price, Shared
from gckernels.planner.timeline.pricing import Pricer
from gckernels.sync import Topology
from gckernels.sync.plans.plan import Frontend
from gckernels.sync.programs import Level, Place
from gckernels.sync.programs.stages import StageKind
from gckernels.sync.traces.model_trace import ModelTrace


@dataclass(frozen=True)
class SimpleMachine:
    """A machine whose prices are a latency plus bytes or elements over a rate.

    Attributes:
        link_nbytes_per_s: the rate of the link between machines; the links inside are ten times as fast.
        latency_s: for each collective.
        codec_s: for each call of a codec.
        element_s: for each element that is encoded or decoded on the device; the host takes five times as long.
        lacks: the collectives without a price.
    """

    topology: Topology = field(default_factory=lambda: Topology(4))
    link_nbytes_per_s: float = 1e8
    latency_s: float = 1e-4
    codec_s: float = 5e-5
    element_s: float = 1e-9
    computes_on: Shared = Shared.DEVICE
    overheads: Overheads = field(default_factory=Overheads)
    capacities: Mapping[Shared, float] = field(default_factory=lambda: dict.fromkeys(Shared, 1.0))
    shared_by: Mapping[Shared, int] = field(default_factory=dict)
    memory_nbytes: float | None = None
    margin: float = 0.0
    name: str = "simple"
    estimated: bool = True
    lacks: frozenset[str] = frozenset()

    def collective(self, step: str, level: Level, place: Place, wire_nbytes: Floats, from_roots: bool = False) -> Price:
        if step in self.lacks:
            raise MachineError(f"{step}: was not measured")
        link = Shared.INTRA if level == Level.INTRA else Shared.INTER
        work = wire_nbytes / (self.link_nbytes_per_s * (10 if link == Shared.INTRA else 1))
        return Price(self.latency_s + work, {link: work})

    def codec(
        self, work: StageKind, compressor: Compressor, place: Place, units: Floats, elements: Floats, sources: int
    ) -> Price:
        each_s = self.element_s * (5.0 if place == Place.HOST else 1.0) * (0.5 + 0.5 * sources)
        seconds = np.where(units > 0, self.codec_s + elements * each_s, 0.0)
        return Price(seconds, {Shared.CORES if place == Place.HOST else self.computes_on: seconds})

    def copy(self, resource: Shared, nbytes: Floats) -> Price:
        seconds = 1e-5 + nbytes / 5e9
        return Price(seconds, {resource: seconds})


PLANNED = (Frontend.DDP, Frontend.MODULE)
"""The kinds of models whose steps are predicted."""


def problem_of(
    trace: ModelTrace, frontend: Frontend, compressors: tuple[Compressor, ...] = (), **machine: object
) -> Problem:
    """A problem in which every tensor may use all ``compressors``."""
    allowed = {tensor.name: compressors for tensor in trace.tensors}
    return Problem(trace, Pricer(SimpleMachine(**machine)), frontend, allowed)
