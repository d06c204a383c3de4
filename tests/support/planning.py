"""Problems for tests of policies: a machine with simple prices."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch

import gckernels
from gckernels.compressor import Compressor
from gckernels.planner.drafts.problem import Policy, Problem
from gckernels.planner.machines.machine import Floats, MachineError, Overheads, Price, Shared
from gckernels.planner.timeline.pricing import Pricer
from gckernels.sync import Plan, Topology
from gckernels.sync.plans.plan import Frontend
from gckernels.sync.programs import Level, Place
from gckernels.sync.programs.stages import StageKind
from gckernels.sync.traces.model_trace import ModelTrace
from gckernels.sync.traces.traced_tensors import TracedTensor


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


COMPRESSORS = (
    gckernels.EFSignSGD(),
    gckernels.BlockQuant(bits=4),
    gckernels.TopK(ratio=0.01),
    gckernels.DGC(),
    gckernels.Cast16(),
    gckernels.PowerSGD(rank=2),
)


def random_problem(seed: int, frontend: Frontend, launches: int = 3) -> Problem:
    """A problem of random tensors, machine and two compressors, of which a fifth of the tensors may use none."""
    rng = random.Random(seed)
    tensors: list[TracedTensor] = []
    buckets, ready_s = [], 0.0
    for launch in range(launches):
        for index in range(rng.randint(1, 3)):
            ready_s += rng.choice([0.0, 1e-4, 1e-3, 5e-3])
            shape = (2 ** rng.randint(3, 11), 2 ** rng.randint(3, 11))
            tensors.append(TracedTensor(f"t{launch}.{index}", shape[0] * shape[1], ready_s, shape))
        buckets.append(tuple(each.name for each in tensors if each.name.startswith(f"t{launch}.")))
    problem = problem_of(
        ModelTrace("m", tuple(tensors), ready_s, buckets=tuple(buckets)),
        frontend,
        tuple(rng.sample(COMPRESSORS, 2)),
        topology=rng.choice([Topology(2), Topology(4), Topology(3, 2)]),
        link_nbytes_per_s=10 ** rng.uniform(7, 10),
        latency_s=10 ** rng.uniform(-5, -3.5),
        codec_s=10 ** rng.uniform(-5, -3.7),
        element_s=10 ** rng.uniform(-10.5, -8.5),
        overheads=Overheads(1e-5, 1e-5, 2e-5),
    )
    exact = {tensor.name: () for tensor in tensors if rng.random() < 0.2}
    return replace(problem, allowed={**problem.allowed, **exact})


def traced(*numels: int, dtypes: tuple[torch.dtype, ...] = (), gap_s: float = 0.001) -> ModelTrace:
    """A trace whose gradients are ready one after the other, in buckets of two."""
    dtypes = dtypes or (torch.float32,) * len(numels)
    tensors = tuple(
        TracedTensor(f"t{index}", numel, gap_s * (index + 1), (numel,), dtype)
        for index, (numel, dtype) in enumerate(zip(numels, dtypes, strict=True))
    )
    buckets = [[tensors[0].name]]
    for one, other in itertools.pairwise(tensors):
        if len(buckets[-1]) < 2 and one.dtype == other.dtype:
            buckets[-1].append(other.name)
        else:
            buckets.append([other.name])
    return ModelTrace("m", tensors, gap_s * len(numels), buckets=tuple(map(tuple, buckets)))


def checked_plan(problem: Problem, policy: Policy) -> Plan:
    """The plan of a policy, after the checks that it would go through before training."""
    plan = policy(problem)
    parameters = [
        (each.name, torch.nn.Parameter(torch.empty(each.shape or each.numel, dtype=each.dtype, device="meta")))
        for each in problem.trace.tensors
    ]
    plan.check(parameters, problem.topology.world_size)
    assert problem.step_s(plan) >= problem.trace.backward_s
    for unit in plan.units:
        methods = problem.allowed.get(unit.parameter, ())
        assert unit.compressor.name == "Identity" or unit.compressor in methods
    return plan
