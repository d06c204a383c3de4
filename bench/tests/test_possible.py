"""No predicted step is shorter than what its links have to carry and its ranks have to compute."""

from __future__ import annotations

import random

import pytest

import gckernels
from bench.planner.possible import COMPRESSORS, links_s, problem_of, ranks_s, rows_of
from gckernels.planner.choice import STARTS
from gckernels.planner.machines.description import Description
from gckernels.planner.machines.files import machine_names
from gckernels.planner.machines.machine import Overheads, Shared
from gckernels.planner.machines.parts import Copies, DescribedLink, Gpu, Host
from gckernels.planner.timeline.pricing import Pricer
from gckernels.planner.timeline.timeline import timeline
from gckernels.sync import Plan, Topology, UnitPlan
from gckernels.sync.plans.plan import Frontend
from gckernels.sync.programs import PROGRAMS, Place, enumerate_programs, ring
from gckernels.sync.programs.steps import Broadcast
from gckernels.sync.traces.model_trace import ModelTrace
from gckernels.sync.traces.trace_files import trace_names
from gckernels.sync.traces.traced_tensors import TracedTensor
from planning import PLANNED

TOPOLOGIES = [Topology(2), Topology(1, 4), Topology(2, 2), Topology(3, 2), Topology(2, 4), Topology(5, 4)]
ROUNDING = 1.0 - 1e-9


def random_machine(draw: random.Random) -> Description:
    topology = draw.choice(TOPOLOGIES)
    shared_by = draw.choice([each for each in (1, 2, 4) if topology.devices % each == 0])
    gpu = draw.random() < 0.7
    return Description(
        "random",
        topology,
        Host(draw.choice((1, 3, 32)), 1e11, 10 ** draw.uniform(8.5, 10), 10 ** draw.uniform(8.5, 9.5), 1e-5),
        {
            Shared.INTER: DescribedLink(10 ** draw.uniform(8, 10.5), 0.9, draw.choice((0.0, 1e-5)), shared_by),
            Shared.INTRA: DescribedLink(
                10 ** draw.uniform(9, 12), 0.8, draw.choice((0.0, 1e-6)), draw.choice((1, shared_by))
            ),
        },
        Gpu(10 ** draw.uniform(10.5, 12.5), 0.9, 5e-6) if gpu else None,
        Copies(1e10, 1e-5, draw.choice((1, 2))) if gpu else None,
        draw.choice((Overheads(), Overheads(8e-6, 4e-6, 5e-5))),
    )


def random_trace(draw: random.Random) -> ModelTrace:
    tensors, ready_s = [], 0.0
    for number in range(draw.randint(1, 9)):
        ready_s += draw.choice((0.0, 1e-4, 1e-3))
        tensors.append(TracedTensor(f"t{number}", int(10 ** draw.uniform(1, 6.5)), ready_s))
    return ModelTrace("random", tuple(tensors), ready_s + draw.choice((0.0, 1e-3)), draw.choice((0.0, 1e-3)), 1e-4)


def random_plan(draw: random.Random, trace: ModelTrace, topology: Topology, frontend: Frontend) -> Plan:
    """A plan with any programs and roots, of which the roots may all be the same."""
    spec = draw.choice(("BlockQuant", "EFSignSGD", "Cast16", "TopK(ratio=0.05)"))
    compressor, places = gckernels.from_spec(spec), draw.choice(((Place.DEVICE,), tuple(Place)))
    programs = enumerate_programs(topology, places, summable=compressor.traits.summable)
    rooted = [each for each in programs if any(isinstance(step, Broadcast) for step in each)]
    chosen = [*draw.choices(rooted if draw.random() < 0.5 else programs, k=draw.choice((1, 4))), PROGRAMS["allreduce"]]
    if topology.world_size > 2 and spec != "TopK(ratio=0.05)":
        chosen.append(ring(topology.world_size))
    roots = draw.sample(range(topology.world_size), draw.randint(1, topology.world_size))
    units = []
    for number, tensor in enumerate(reversed(trace.tensors)):
        program = draw.choice(chosen)
        method = compressor if any(type(step).__name__ == "Encode" for step in program) else gckernels.Identity()
        launch = None if frontend == Frontend.DDP else len(trace.tensors) - 1 - number
        unit = UnitPlan(tensor.name, tensor.numel, method, program, False, root=draw.choice(roots), launch=launch)
        units.append(unit)
    plan = Plan(tuple(units), topology, channels=draw.randint(1, 2), frontend=frontend)
    return plan.parted(1 << 18) if draw.random() < 0.5 else plan


def check(seeds: range) -> None:
    for seed in seeds:
        draw = random.Random(seed)
        machine, trace, frontend = random_machine(draw), random_trace(draw), draw.choice(PLANNED)
        plan, pricer = random_plan(draw, trace, machine.topology, frontend), Pricer(machine)
        least_s = max(links_s(plan, trace, machine), ranks_s(plan, trace, pricer, frontend))
        assert timeline(plan, trace, pricer, frontend).step_s >= least_s * ROUNDING, seed


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_no_step_of_a_random_plan_is_impossible(first):
    check(range(first, first + 20))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 3000, 100))
def test_no_step_of_many_random_plans_is_impossible(first):
    check(range(first, first + 100))


@pytest.mark.parametrize(
    ("machine", "trace"),
    [("lab", "lstm"), pytest.param("utility-p3-8xlarge", "resnet50", marks=pytest.mark.slow)],
)
def test_no_step_of_a_shipped_trace_is_impossible(machine, trace):
    assert all(float(row["ratio"]) >= 1.0 for row in rows_of(machine, trace, COMPRESSORS))


@pytest.mark.slow
@pytest.mark.parametrize("trace", trace_names())
@pytest.mark.parametrize("machine", machine_names())
def test_no_policy_finds_an_impossible_step(machine, trace):
    problem = problem_of(machine, trace, COMPRESSORS, tuple(Place))
    assert isinstance(problem.machine, Description)
    for name, policy in STARTS.items():
        plan = policy(problem)
        least_s = max(
            links_s(plan, problem.trace, problem.machine),
            ranks_s(plan, problem.trace, problem.pricer, problem.frontend),
        )
        assert problem.step_s(plan) >= least_s * ROUNDING, name
