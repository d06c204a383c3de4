"""Timelines without sharing equal a restatement of what the engine does: plain events in a heap."""

from __future__ import annotations

import heapq
import random
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
import pytest

from gckernels import from_spec
from gckernels.compressor import Compressor
from gckernels.planner.machines.machine import Floats, Overheads, Price, Shared
from gckernels.planner.timeline.launches import launches_of, messages_of
from gckernels.planner.timeline.pricing import Pricer
from gckernels.planner.timeline.timeline import timeline
from gckernels.sync import Plan, Topology, UnitPlan
from gckernels.sync.plans.plan import Frontend
from gckernels.sync.programs import PROGRAMS, Level, Place, enumerate_programs, ring
from gckernels.sync.programs.stages import MessageKind, StageKind
from gckernels.sync.programs.steps import Collective
from gckernels.sync.traces.model_trace import ModelTrace
from gckernels.sync.traces.traced_tensors import TracedTensor
from planning import PLANNED
from predictions import RatedMachine

TOPOLOGIES = (Topology(2), Topology(4), Topology(2, 3), Topology(4, 2), Topology(12))
SPECS = ("BlockQuant", "EFSignSGD", "Cast16", "TopK(ratio=0.05)", "Identity")
PLACES = ((Place.DEVICE,), (Place.DEVICE, Place.HOST))


SHARED = (Shared.INTER, Shared.CORES)


@dataclass(frozen=True)
class Arbitrary(RatedMachine):
    """A machine whose prices follow no rule, and whose resources are all without limit."""

    seed: int = 0
    capacities: dict[Shared, float] = field(default_factory=dict)

    def collective(self, step: str, level: Level, place: Place, wire_nbytes: Floats, from_roots: bool = False) -> Price:
        return self._price(step, level, place, amounts=wire_nbytes, submit_s=self._draw("submit", step) / 10)

    def codec(
        self, work: StageKind, compressor: Compressor, place: Place, units: Floats, elements: Floats, sources: int
    ) -> Price:
        return self._price(work, compressor.name, place, sources, amounts=elements)

    def copy(self, resource: Shared, nbytes: Floats) -> Price:
        return self._price(resource, amounts=nbytes)

    def _price(self, *key: object, amounts: Floats, submit_s: float = 0.0) -> Price:
        alone_s = np.array([self._draw(*key, amount) + 0.01 for amount in amounts.tolist()])
        parts = {shared: [self._draw(shared, *key, amount) for amount in amounts.tolist()] for shared in SHARED}
        return Price(alone_s, {shared: alone_s * np.array(each) for shared, each in parts.items()}, submit_s)

    def _draw(self, *key: object) -> float:
        return random.Random(repr((self.seed, *key))).random()


def random_case(seed: int) -> tuple[Plan, ModelTrace, Pricer, Frontend]:
    draw = random.Random(seed)
    topology, frontend = draw.choice(TOPOLOGIES), draw.choice(PLANNED)
    places = draw.choice(PLACES)
    spec = draw.choice(SPECS)
    summable = from_spec(spec).traits.summable
    programs = enumerate_programs(topology, places, summable=summable)
    chosen = [draw.choice(programs) for _ in range(3)] + [PROGRAMS["allreduce"], ring(topology.world_size)]
    names = [f"p{number}" for number in range(draw.randint(1, 9))]
    tensors = tuple(
        TracedTensor(name, draw.randint(16, 3 << 20), index * draw.random()) for index, name in enumerate(names)
    )
    tensors = tuple(sorted(tensors, key=lambda tensor: tensor.ready_s))
    buckets = ()
    if draw.random() < 0.5:
        cut = draw.randint(0, len(tensors))
        halves = ([each.name for each in tensors[:cut]], [each.name for each in tensors[cut:]])
        buckets = tuple(tuple(reversed(half)) for half in halves if half)
    last_s = tensors[-1].ready_s + draw.choice((0.0, 0.3))
    trace = ModelTrace("any", tensors, last_s, draw.random(), draw.random(), buckets)
    units = []
    for tensor in reversed(tensors):
        program = draw.choice(chosen)
        method = from_spec("Identity" if program == PROGRAMS["allreduce"] else spec)
        units.append(UnitPlan(tensor.name, tensor.numel, method, program, False))
    plan = Plan(tuple(units), topology, channels=draw.randint(1, 3))
    plan = plan.parted(1 << 20) if draw.random() < 0.5 else plan
    overheads = Overheads(*(draw.random() / 50 for _ in range(4)))
    on = draw.choice((Shared.DEVICE, Shared.CORES))
    return plan, trace, Pricer(Arbitrary(topology, overheads=overheads, computes_on=on, seed=seed)), frontend


@dataclass(eq=False)
class Job:
    """Something that a queue does.

    Attributes:
        number: its place among all jobs.
        queue: the queue, which does one thing at a time.
        seconds: how long it takes.
        after: the jobs that must have ended.
    """

    number: int
    queue: str
    seconds: float
    after: list[Job]
    begun: bool = False
    end_s: float | None = None


def jobs_of(plan: Plan, trace: ModelTrace, pricer: Pricer, frontend: Frontend) -> tuple[list[Job], list[Job], Job]:
    """All jobs in the order of submission, those that are stages, and the last one of backward."""
    machine = pricer.machine
    overheads = machine.overheads
    bare = frontend == Frontend.DDP and all(unit.program == PROGRAMS["allreduce"] for unit in plan.units)
    jobs, stages = [], []

    def add(queue: str, seconds: float, after: list[Job]) -> Job:
        jobs.append(Job(len(jobs), queue, seconds, after))
        return jobs[-1]

    add("thread", trace.forward_s, [])
    ready_s = 0.0
    longest = [sum(isinstance(step, Collective) for step in unit.program) for unit in plan.units if not unit.in_place]
    for launch in launches_of(plan, trace, frontend):
        add("thread", launch.ready_s - ready_s, [])
        ready_s = launch.ready_s
        add("thread", overheads.plain_s if bare else overheads.hook_s, [])
        messages, ends = messages_of(launch, plan, frontend), []
        for message in messages:
            before = None
            for priced in pricer.messages([(message, launch.dtype)])[0]:
                spec, price = priced.spec, priced.price
                alone_s, submit_s = float(price.alone_s[0]), price.submit_s
                if bare:
                    alone_s, submit_s = alone_s - overheads.stage_s, submit_s - overheads.submit_s
                thread = add("thread", submit_s, [])
                queue = f"{spec.resource.value} {spec.phase % 8}"
                if "communicate" in queue:
                    queue += f" {message.channel}"
                before = add(queue, alone_s, [thread if before is None else before])
                stages.append(before)
            ends.append(before)
        if len(messages) != 1 or messages[0].kind != MessageKind.IN_PLACE:
            add(f"compute {max(longest, default=1) % 8}", 0.0, ends)
    return jobs, stages, add("thread", max(trace.backward_s - ready_s, 0.0), [])


def run_events(jobs: list[Job]) -> None:
    """Fill in when the jobs end. Whenever something ends, every queue is looked at."""
    queues = defaultdict(list)
    for job in jobs:
        queues[job.queue].append(job)
    events = [(0.0, -1)]
    while events:
        now_s, number = heapq.heappop(events)
        if number >= 0:
            jobs[number].end_s = now_s
            queues[jobs[number].queue].remove(jobs[number])
        for queue in queues.values():
            if queue and not queue[0].begun and all(before.end_s is not None for before in queue[0].after):
                queue[0].begun = True
                heapq.heappush(events, (now_s + queue[0].seconds, queue[0].number))


def check(seeds: range) -> None:
    for each in seeds:
        case = random_case(each)
        trace, predicted = case[1], timeline(*case)
        jobs, stages, backward = jobs_of(*case)
        run_events(jobs)
        assert [stage.end_s for stage in predicted.stages] == pytest.approx([job.end_s for job in stages], abs=1e-9)
        assert predicted.backward_s == pytest.approx(backward.end_s - trace.forward_s, abs=1e-9)
        end_s = max(job.end_s for job in (*stages, backward))
        assert predicted.step_s == pytest.approx(end_s + trace.optimizer_s, abs=1e-9)
        assert predicted.exposed_s == pytest.approx(end_s - backward.end_s, abs=1e-9)


@pytest.mark.parametrize("seed", range(0, 100, 20))
def test_timelines_equal_plain_events(seed):
    check(range(seed, seed + 20))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1500, 50))
def test_more_timelines_equal_plain_events(seed):
    check(range(seed, seed + 50))
