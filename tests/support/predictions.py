"""Machines and traces with round numbers, for predictions that a person can check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gckernels.compressor import Compressor
from gckernels.planner.machines.machine import Floats, Overheads, Price, Shared
from gckernels.sync import Topology
from gckernels.sync.programs import Level, Place
from gckernels.sync.programs.stages import StageKind
from gckernels.sync.traces.model_trace import ModelTrace
from gckernels.sync.traces.traced_tensors import TracedTensor


@dataclass(frozen=True)
class RatedMachine:
    """A machine whose prices are rates, by default without latencies.

    Attributes:
        link_s: seconds of the link between machines for each byte that a rank sends.
        fabric_s: the same for the links inside a machine.
        element_s: seconds to encode or decode an element of one payload, on the device and on the host.
        copy_s: seconds to copy a byte.
        latency_s: seconds before each collective.
    """

    topology: Topology = field(default_factory=lambda: Topology(2))
    link_s: float = 1.0
    fabric_s: float = 0.1
    element_s: Mapping[Place, float] = field(default_factory=lambda: dict.fromkeys(Place, 0.0))
    copy_s: float = 0.0
    latency_s: float = 0.0
    computes_on: Shared = Shared.DEVICE
    overheads: Overheads = field(default_factory=Overheads)
    capacities: Mapping[Shared, float] = field(default_factory=lambda: dict.fromkeys(Shared, 1.0))
    margin: float = 0.0
    shared_by: Mapping[Shared, int] = field(default_factory=dict)
    memory_nbytes: float | None = None
    name: str = "rated"
    estimated: bool = True

    def collective(self, step: str, level: Level, place: Place, wire_nbytes: Floats, from_roots: bool = False) -> Price:
        shared, rate = (Shared.INTRA, self.fabric_s) if level == Level.INTRA else (Shared.INTER, self.link_s)
        return Price(self.latency_s + wire_nbytes * rate, {shared: wire_nbytes * rate})

    def codec(
        self, work: StageKind, compressor: Compressor, place: Place, units: Floats, elements: Floats, sources: int
    ) -> Price:
        seconds = elements * self.element_s[place] * sources
        return Price(seconds, {Shared.CORES if place == Place.HOST else self.computes_on: seconds})

    def copy(self, resource: Shared, nbytes: Floats) -> Price:
        return Price(nbytes * self.copy_s, {resource: nbytes * self.copy_s})


def trace_of(
    *tensors: tuple[str, int, float], buckets: tuple[tuple[str, ...], ...] = (), **changes: float
) -> ModelTrace:
    """A trace of tensors, given as name, number of elements and the time when the gradient is ready."""
    traced = tuple(TracedTensor(*each) for each in tensors)
    return ModelTrace("model", traced, max(each.ready_s for each in traced), buckets=buckets, **changes)
