"""The fluid simulation against restatements that are slow and plain, worked examples, and what no schedule can beat."""

from __future__ import annotations

import math
import random
from collections import defaultdict

import pytest

from gckernels.sync.planner.fluid import SERIAL, UNLIMITED, Need, Service, Task, Times, simulate

PIPELINED, PAIRS = Service(2, 1), Service(2, 2)
SERVICES = (SERIAL, SERIAL, PIPELINED, PAIRS, UNLIMITED)
CAPACITIES = {"link": 1.0, "cores": 1.5, "copies": 1.0}


def random_tasks(seed: int, count: int = 40) -> tuple[list[Task], list[Service]]:
    """Tasks of which a third load nothing, and some take no time at all."""
    draw = random.Random(seed)
    services = [draw.choice(SERVICES) for _ in range(draw.randint(2, 7))]
    tasks = []
    for number in range(count):
        keys = draw.sample(list(CAPACITIES), draw.choice((0, 1, 1, 2, 3)))
        shares = {key: draw.choice((1.0, draw.uniform(0.05, 1.0))) for key in keys}
        need = Need(draw.choice((0.0, draw.random())), draw.choice((0.0, draw.random(), 1.0)), shares)
        after = draw.sample(range(number), min(number, draw.choice((0, 0, 1, 2))))
        tasks.append(Task(draw.randrange(len(services)), need, tuple(after)))
    return tasks, services


def without_sharing(tasks: list[Task], services: list[Service]) -> list[float]:
    """The ends of tasks, each computed from those before it in its lane. Nothing slows anything down."""
    lanes: dict[int, list[tuple[float, float]]] = defaultdict(list)  # starts and ends
    ends: list[float] = []
    for lane, need, after in tasks:
        before, service = lanes[lane], services[lane]
        start = max([0.0, *(ends[number] for number in after), *(start for start, _ in before)])
        if len(before) >= service.in_flight:  # wait until one less is in flight
            start = max(start, sorted(end for _, end in before)[-int(service.in_flight)])
        load = start + need.latency_s
        if service.loading == 1:
            load = max([load, *(end for _, end in before)])
        ends.append(load + need.loaded_s)
        before.append((start, ends[-1]))
    return ends


def step_by_step(tasks: list[Task], services: list[Service], capacities: dict[str, float]) -> list[float]:
    """The ends of tasks. Everything is looked at again after each event."""
    count, now = len(tasks), 0.0
    latency: dict[int, float] = {}  # the rest, in seconds
    loads: dict[int, float] = {}
    ends: dict[int, float] = {}
    lanes = [[number for number in range(count) if tasks[number].lane == lane] for lane in range(len(services))]
    while len(ends) < count:
        for lane, service in zip(lanes, services, strict=True):
            for number in lane:
                if number in ends or number in loads:
                    continue
                flying = sum(other in loads and other not in ends for other in lane)
                if flying >= service.in_flight or any(each not in ends for each in tasks[number].after):
                    break
                latency[number], loads[number] = tasks[number].need.latency_s, tasks[number].need.loaded_s
        active = [number for number in loads if number not in ends]
        loading = []
        for number in active:
            lane, service = lanes[tasks[number].lane], services[tasks[number].lane]
            earlier = [other for other in lane[: lane.index(number)] if other not in ends]
            if latency[number] <= 0 and (service.loading > 1 or service.in_flight == 1 or not earlier):
                loading.append(number)
        demand = defaultdict(float)
        for number in loading:
            if loads[number] > 0:
                for key, share in tasks[number].need.shares.items():
                    demand[key] += share
        speed = {}
        for number in loading:
            shares = tasks[number].need.shares
            speed[number] = min([1.0, *(capacities[key] / demand[key] for key in shares if demand[key] > 0)])
        step = min(
            [latency[number] for number in active if latency[number] > 0]
            + [loads[number] / speed[number] for number in loading]
        )
        now += step
        for number in active:
            if latency[number] > 0:
                latency[number] -= step
                latency[number] = 0.0 if latency[number] < 1e-12 else latency[number]
        for number in loading:
            loads[number] -= step * speed[number]
            if loads[number] < 1e-12:
                ends[number] = now
    return [ends[number] for number in range(count)]


@pytest.mark.parametrize("seed", range(0, 200, 20))
def test_without_sharing_every_end_follows_from_those_before(seed):
    for each in range(seed, seed + 20):
        tasks, services = random_tasks(each)
        assert simulate(tasks, services).end_s == pytest.approx(without_sharing(tasks, services), abs=1e-9)


@pytest.mark.parametrize("seed", range(0, 50, 10))
def test_with_sharing_a_plain_simulation_finds_the_same(seed):
    for each in range(seed, seed + 10):
        tasks, services = random_tasks(each, count=25)
        ends = step_by_step(tasks, services, CAPACITIES)
        assert simulate(tasks, services, CAPACITIES).end_s == pytest.approx(ends, abs=1e-9)


# -------------------------------------------------------------------- worked examples


def run(*tasks: Task, services: tuple[Service, ...] = (SERIAL,) * 4, **capacities: float) -> Times:
    return simulate(tasks, services, capacities)


def test_two_tasks_halve_their_speed_while_both_run():
    """Until 2 the first has the link alone. Both then run at half speed until the second ends at 4, and the rest of the
    first takes one more second."""
    ends = run(
        Task(0, Need(0, 4, {"link": 1})), Task(1, Need(0, 2)), Task(1, Need(0, 1, {"link": 1}), (1,)), link=1
    ).end_s
    assert ends == [5.0, 2.0, 4.0]


def test_small_shares_fit_beside_each_other():
    half = Need(0, 3, {"cores": 0.5})
    assert run(Task(0, half), Task(1, half), cores=1).end_s == [3.0, 3.0]
    assert run(Task(0, half), Task(1, half), Task(2, half), cores=1).end_s == pytest.approx([4.5, 4.5, 4.5])
    assert run(Task(0, half), Task(1, half), Task(2, half), cores=2).end_s == [3.0, 3.0, 3.0]


def test_a_task_is_as_slow_as_its_slowest_resource_and_then_loads_the_others_less():
    """The first needs link and copies, the second and third copies alone. All run at a third of their speed, so the
    link is busy for a third of the time, and the fourth, with two thirds of it, has all that it wants."""
    ends = run(
        *(Task(0, Need(0, 1, {"link": 1, "copies": 1})), Task(1, Need(0, 1, {"copies": 1}))),
        *(Task(2, Need(0, 1, {"copies": 1})), Task(3, Need(0, 1))),
        link=1,
        copies=1,
    ).end_s
    assert ends == pytest.approx([3, 3, 3, 1])


def test_latency_passes_while_others_load():
    """As a part of a share, latency would slow both down: they would end at 4."""
    ends = run(Task(0, Need(2, 1, {"link": 1})), Task(1, Need(0, 2, {"link": 1})), link=1).end_s
    assert ends == [3.0, 2.0]


def test_a_train_of_collectives_keeps_the_link_busy():
    """The link waits for the first latency only. If a lane issued a collective when the last has ended, it would wait
    for each of them."""
    train = [Task(0, Need(1, 3, {"link": 1}))] * 5
    assert run(*train, services=(PIPELINED,), link=1).end_s == [4.0, 7.0, 10.0, 13.0, 16.0]
    assert run(*train, services=(SERIAL,), link=1).end_s == [4.0, 8.0, 12.0, 16.0, 20.0]


def test_short_collectives_of_a_train_wait_for_their_latency():
    """With two in flight, a third one is issued when the first has ended: at 4, 5, 8, 9."""
    train = [Task(0, Need(3, 1, {"link": 1}))] * 6
    assert run(*train, services=(PIPELINED,), link=1).end_s == [4.0, 5.0, 8.0, 9.0, 12.0, 13.0]


def test_collectives_of_a_lane_load_the_link_in_order_and_those_of_two_threads_share_it():
    pair = [Task(0, Need(0, 2, {"link": 1}))] * 2
    assert run(*pair, services=(PIPELINED,), link=1).end_s == [2.0, 4.0]
    assert run(*pair, services=(PAIRS,), link=1).end_s == [4.0, 4.0]


def test_a_faster_link_can_make_a_step_longer():
    """The cores compute 2 seconds for a task that 10 more seconds follow. If a message arrives meanwhile, its decoding
    takes half of the cores, and everything ends 2 seconds later. No bound is broken: the link was not what limited."""

    def end_s(send_s: float) -> float:
        decode, long = Task(1, Need(0, 2, {"cores": 1}), (0,)), Task(2, Need(0, 2, {"cores": 1}))
        tasks = (Task(0, Need(0, send_s, {"link": 1})), decode, long, Task(2, Need(10)))
        return max(run(*tasks, cores=1, link=1).end_s)

    assert (end_s(5.0), end_s(0.0)) == (12.0, 14.0)


# -------------------------------------------------------------------- properties


@pytest.mark.parametrize("seed", range(100, 130))
def test_nothing_is_faster_than_its_lanes_resources_and_chains(seed):
    tasks, services = random_tasks(seed)
    times = simulate(tasks, services, CAPACITIES)
    alone = simulate(tasks, services)
    assert all(math.isfinite(each) for each in (*times.start_s, *times.load_s, *times.end_s))
    for number, (_, need, after) in enumerate(tasks):
        assert times.start_s[number] >= max((times.end_s[each] for each in after), default=0.0)
        assert times.load_s[number] - times.start_s[number] >= need.latency_s - 1e-9
        assert times.end_s[number] - times.load_s[number] >= need.loaded_s - 1e-9
    assert max(times.end_s) >= max(alone.end_s) * (1 - 1e-12)
    for key, capacity in CAPACITIES.items():
        work = sum(task.need.shares.get(key, 0.0) * task.need.loaded_s for task in tasks)
        assert max(times.end_s) >= work / capacity - 1e-9
