"""The timeline of one rank equals a whole cluster's, whose ranks and machines are all simulated, where it says so.

All ranks are alike in programs without roots. With roots inside machines they do different things, and only the links
that devices share make one rank's work slow down another's. So the timeline is right if links alone are limited.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from dataclasses import replace

import pytest

from gckernels import from_spec
from gckernels.planner.machines.machine import Shared
from gckernels.planner.timeline.launches import launches_of, messages_of
from gckernels.planner.timeline.pricing import Pricer
from gckernels.planner.timeline.simulator import Need, SimulatedTask, simulate
from gckernels.planner.timeline.timeline import timeline
from gckernels.sync import Plan, Topology, UnitPlan
from gckernels.sync.plans.plan import Frontend
from gckernels.sync.programs import PROGRAMS, Level, Place, Program, enumerate_programs, ring
from gckernels.sync.programs.layouts import Capabilities, propagate
from gckernels.sync.programs.stages import MessageKind, Resource, takes_part
from gckernels.sync.programs.steps import Broadcast, Collective, Gather, Reduce
from gckernels.sync.traces.model_trace import ModelTrace
from gckernels.sync.traces.traced_tensors import TracedTensor
from predictions import RatedMachine

LINKS = dict.fromkeys(Shared, math.inf) | {Shared.INTER: 1.0, Shared.INTRA: 1.0}


class Cluster:
    """The tasks of all ranks. A collective is one task of its ranks, and loads what each of them has or shares.

    Args:
        machine: prices, without overheads. All devices of a machine share one card.
    """

    def __init__(self, machine: RatedMachine) -> None:
        self.machine, self.tasks = machine, []
        self.ranks = range(machine.topology.world_size)
        self.queues: dict[object, tuple[int, ...]] = defaultdict(tuple)  # the last task of each queue

    def add(self, queues: list[object], need: Need, after: set[int]) -> int:
        """A task that waits for its turn in all of its queues."""
        before = after.union(*(self.queues[queue] for queue in queues))
        self.tasks.append(SimulatedTask(len(self.tasks), need, tuple(sorted(before))))
        for queue in queues:
            self.queues[queue] = (len(self.tasks) - 1,)
        return len(self.tasks) - 1

    def compute(self, seconds: float) -> None:
        share = min(1.0, self.machine.capacities.get(self.machine.computes_on, 1.0))
        for rank in self.ranks:
            self.add([(rank, "thread")], Need(0.0, seconds, {(rank, self.machine.computes_on): share}), set())

    def send(self, queues: dict[int, object], need: Need, level: Level, only: bool, after: dict[int, set[int]]) -> int:
        """A collective of some ranks, one of the groups of its level that run at the same time, or the only one."""
        devices, shares = self.machine.topology.devices, {}
        groups = devices if level == Level.INTER and not only else 1
        for shared, share in need.shares.items():
            for rank in queues:
                machine = rank // devices
                shares[(f"machine {machine}", shared) if shared == Shared.INTER else (rank, shared)] = share / groups
        need = Need(need.latency_s, need.loaded_s, shares)
        return self.add(list(queues.values()), need, set().union(*(after[rank] for rank in queues)))

    def step_s(self, trace: ModelTrace) -> float:
        capacities = {}
        for shared, capacity in self.machine.capacities.items():
            for rank in self.ranks:
                capacities |= {(rank, shared): capacity, (f"machine {rank}", shared): capacity}
        times = simulate(self.tasks, [1] * len(self.tasks), capacities)
        return max(times.end_s) + trace.optimizer_s


def cluster_step_s(plan: Plan, trace: ModelTrace, pricer: Pricer, frontend: Frontend) -> float:
    """The seconds of a step of a cluster."""
    machine, topology = pricer.machine, pricer.machine.topology
    cluster = Cluster(machine)
    longest = [sum(isinstance(step, Collective) for step in unit.program) for unit in plan.units if not unit.in_place]
    last_phase = max(longest, default=1) % 8
    cluster.compute(trace.forward_s)
    before_s = 0.0
    for launch in launches_of(plan, trace, frontend):
        cluster.compute(launch.ready_s - before_s)
        before_s = launch.ready_s
        messages = messages_of(launch, plan, frontend)
        ends: dict[int, set[int]] = {rank: set() for rank in cluster.ranks}
        for message in messages:
            unit = message.units[0].plan
            layouts = propagate(message.program, Capabilities.of(unit.compressor), topology)
            after = {rank: set(cluster.queues[rank, "thread"]) for rank in cluster.ranks}
            for number, stage in enumerate(pricer.messages([(message, launch.dtype)])[0]):
                spec, key = stage.spec, stage.lane(message.channel)
                part = [
                    rank
                    for rank in cluster.ranks
                    if takes_part(spec, message.program, layouts, topology, rank, unit.root)
                ]
                queues = {rank: (rank, key, number == 0 and spec.starts_immediately) for rank in part}
                if spec.level is None:
                    for rank in part:
                        shares = {(rank, shared): share for shared, share in stage.need.shares.items()}
                        need = Need(stage.need.latency_s, stage.need.loaded_s, shares)
                        after[rank] = {cluster.add([queues[rank]], need, after[rank])}
                    continue
                only = len(part) == topology.machines and topology.devices > 1
                for group in topology.groups(spec.level):
                    members = {rank: queues[rank] for rank in group if rank in queues}
                    if members:
                        token = cluster.send(members, stage.need, spec.level, only, after)
                        after |= {rank: {token} for rank in members}
            for rank in cluster.ranks:
                ends[rank] |= after[rank]
        if len(messages) != 1 or messages[0].kind != MessageKind.IN_PLACE:
            for rank in cluster.ranks:
                cluster.add([(rank, (Resource.COMPUTE, last_phase))], Need(), ends[rank])
    cluster.compute(max(trace.backward_s - before_s, 0.0))
    return cluster.step_s(trace)


def roots_in(program: Program) -> set[Level]:
    return {step.level for step in program if isinstance(step, Gather | Reduce | Broadcast)}


def random_trace(draw: random.Random) -> ModelTrace:
    tensors, ready_s = [], 0.0
    for number in range(draw.randint(1, 8)):
        ready_s += draw.choice((0.0, 0.1, 1.0))
        tensors.append(TracedTensor(f"t{number}", draw.randint(16, 3 << 16), ready_s))
    return ModelTrace("any", tuple(tensors), ready_s + draw.choice((0.0, 0.3)), draw.random(), draw.random())


def random_plan(draw: random.Random, trace: ModelTrace, topology: Topology, programs: list[Program]) -> Plan:
    units = []
    for number, tensor in enumerate(reversed(trace.tensors)):
        program = draw.choice(programs)
        method = from_spec("Identity" if program == PROGRAMS["allreduce"] else "BlockQuant")
        units.append(
            UnitPlan(
                *(tensor.name, tensor.numel, method, program, False),
                root=draw.randrange(topology.world_size),
                launch=len(trace.tensors) - 1 - number,
                channel=None if program == PROGRAMS["allreduce"] else draw.randint(0, 1),
            )
        )
    return Plan(tuple(units), topology, channels=2)


def random_machine(draw: random.Random, topology: Topology) -> RatedMachine:
    rates = {place: draw.random() / 2e5 for place in Place}
    link_s, fabric_s = draw.random() / 2e5, draw.random() / 1e6
    return RatedMachine(topology, link_s, fabric_s, rates, draw.random() / 1e6, draw.choice((0.0, 0.1)))


@pytest.mark.parametrize("topology", [Topology(4), Topology(2, 2), Topology(3, 2), Topology(2, 3)], ids=str)
@pytest.mark.parametrize("computes_on", [Shared.DEVICE, Shared.CORES])
def test_ranks_are_alike_without_roots(topology, computes_on):
    for seed in range(6):
        draw = random.Random(seed)
        programs = [each for each in enumerate_programs(topology, draw.choice(((Place.DEVICE,), tuple(Place))))
                    if not roots_in(each)]  # fmt: skip
        chosen = [*draw.choices(programs, k=3), PROGRAMS["allreduce"], ring(topology.world_size)]
        trace, machine = random_trace(draw), replace(random_machine(draw, topology), computes_on=computes_on)
        plan, pricer = random_plan(draw, trace, topology, chosen), Pricer(machine)
        one_s = timeline(plan, trace, pricer, Frontend.MODULE).step_s
        assert one_s == pytest.approx(cluster_step_s(plan, trace, pricer, Frontend.MODULE), rel=1e-9), seed


@pytest.mark.parametrize("topology", [Topology(2, 2), Topology(3, 2), Topology(2, 3), Topology(2, 4)], ids=str)
def test_roots_of_one_machine_share_its_card(topology):
    for seed in range(12):
        draw = random.Random(seed)
        programs = [each for each in enumerate_programs(topology) if roots_in(each) == {Level.INTRA}]
        trace, machine = random_trace(draw), replace(random_machine(draw, topology), capacities=LINKS)
        plan, pricer = random_plan(draw, trace, topology, [draw.choice(programs)]), Pricer(machine)
        one_s = timeline(plan, trace, pricer, Frontend.MODULE).step_s
        assert one_s == pytest.approx(cluster_step_s(plan, trace, pricer, Frontend.MODULE), rel=1e-9), seed
