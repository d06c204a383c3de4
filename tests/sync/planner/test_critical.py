"""Critical chains of predicted steps."""

from __future__ import annotations

import itertools
import random

import pytest

from gckernels import from_spec
from gckernels.sync import Plan, Topology, UnitPlan
from gckernels.sync.planner.critical import critical_chain
from gckernels.sync.planner.machines.machine import Overheads, Shared
from gckernels.sync.planner.timeline.pricing import Pricer
from gckernels.sync.planner.timeline.timeline import timeline
from gckernels.sync.plans.plan import Attached
from gckernels.sync.programs import PROGRAMS
from gckernels.sync.programs.steps import Place
from predictions import RatedMachine, trace_of

PROGRAM_NAMES = ("allreduce", "allgather", "alltoall", "parameter_server")


def test_a_step_on_a_slow_link_waits_for_averages():
    """Two averages of 4 and 8 seconds share the link of a GPU one after the other, from 1.5 on."""
    sizes = (("a", 32), ("b", 64))
    trace = trace_of(("a", 32, 1.0), ("b", 64, 2.0), buckets=(("a",), ("b",)), forward_s=0.5, optimizer_s=0.25)
    plan = Plan(tuple(UnitPlan(*size, from_spec("Identity"), PROGRAMS["allreduce"], False) for size in sizes))
    chain = critical_chain(timeline(plan, trace, Pricer(RatedMachine(link_s=1 / 32)), Attached.DDP))
    assert [(link.name, link.start_s, link.end_s) for link in chain] == [
        *(("forward", 0.0, 0.5), ("backward", 0.5, 1.5)),
        *(("average-0", 1.5, 5.5), ("average-0", 5.5, 13.5), ("optimizer", 13.5, 13.75)),
    ]


def test_a_chain_says_what_sharing_costs():
    """The encoding of ``a`` halves the speed of backward for two seconds, and the step waits for backward alone."""
    trace = trace_of(("a", 8, 1.0), ("b", 8, 9.0), buckets=(("a",), ("b",)))
    units = (
        UnitPlan("b", 8, from_spec("Identity"), PROGRAMS["allreduce"], False),
        UnitPlan("a", 8, from_spec("Cast16"), PROGRAMS["encoded_allreduce"], False),
    )
    machine = RatedMachine(link_s=1 / 32, element_s={Place.DEVICE: 1 / 8, Place.HOST: 0.0})
    chain = critical_chain(timeline(Plan(units), trace, Pricer(machine), Attached.DDP))
    assert [link.name for link in chain] == ["backward", "backward", "average-0"]
    assert [link.slowed_s for link in chain] == [0.0, pytest.approx(2.0), 0.0]  # by encoding and decoding


@pytest.mark.parametrize("seed", range(20))
def test_a_chain_has_no_gap_from_the_start_of_a_step_to_its_end(seed):
    draw = random.Random(seed)
    count, topology = draw.randint(1, 8), draw.choice((Topology(2), Topology(4)))
    names = [f"p{index}" for index in range(count)]
    trace = trace_of(
        *((name, draw.randint(16, 4096), 0.1 * index) for index, name in enumerate(names)),
        buckets=tuple((name,) for name in names),
        forward_s=draw.choice((0.0, 0.2)),
        optimizer_s=draw.choice((0.0, 0.2)),
    )
    units = []
    for index, tensor in enumerate(trace.tensors):
        program = draw.choice(PROGRAM_NAMES)
        method = from_spec("Identity" if program == "allreduce" else "BlockQuant")
        root = index % topology.world_size
        units.append(UnitPlan(tensor.name, tensor.numel, method, PROGRAMS[program], False, root=root))
    machine = RatedMachine(
        topology,
        1e-5,
        element_s=dict.fromkeys(Place, draw.choice((1e-6, 1e-4))),
        latency_s=draw.choice((0.0, 1e-2)),
        computes_on=draw.choice((Shared.DEVICE, Shared.CORES)),
        overheads=Overheads(1e-3, 1e-4, 1e-3, 1e-3),
    )
    found = timeline(Plan(tuple(units), channels=draw.randint(1, 2)), trace, Pricer(machine), Attached.DDP)
    chain = critical_chain(found)
    assert chain[0].start_s == 0.0 and chain[-1].end_s == found.step_s
    assert all(one.end_s == other.start_s for one, other in itertools.pairwise(chain))
    assert all(0.0 <= link.slowed_s <= link.end_s - link.start_s for link in chain)
    assert all(
        (link.stage is None) == (link.name in ("forward", "backward", "optimizer", "another rank")) for link in chain
    )
