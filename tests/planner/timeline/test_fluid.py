"""The fluid simulation against restatements that are slow and plain, worked examples, and what no schedule can beat."""

from __future__ import annotations

import math
import random
from collections import defaultdict

import pytest

from gckernels.planner.timeline.simulator import Need, SimulatedTask, Times, simulate

WIDTHS = (1, 1, 2, math.inf)
CAPACITIES = {"link": 1.0, "cores": 0.9, "copies": 1.0}


def random_tasks(seed: int, count: int = 40) -> tuple[list[SimulatedTask], list[float]]:
    """Tasks of which a third load nothing, and some take no time at all."""
    draw = random.Random(seed)
    widths = [draw.choice(WIDTHS) for _ in range(draw.randint(2, 7))]
    tasks = []
    for number in range(count):
        keys = draw.sample(list(CAPACITIES), draw.choice((0, 1, 1, 2, 3)))
        shares = {key: draw.choice((1.0, draw.uniform(0.05, 1.0))) for key in keys}
        need = Need(draw.choice((0.0, draw.random())), draw.choice((0.0, draw.random(), 1.0)), shares)
        after = draw.sample(range(number), min(number, draw.choice((0, 0, 1, 2))))
        tasks.append(SimulatedTask(draw.randrange(len(widths)), need, tuple(after)))
    return tasks, widths


def without_sharing(tasks: list[SimulatedTask], widths: list[float]) -> list[float]:
    """The ends of tasks, each computed from those before it in its lane. Nothing slows anything down."""
    lanes: dict[int, list[tuple[float, float]]] = defaultdict(list)  # starts and ends
    ends: list[float] = []
    for lane, need, after in tasks:
        before, width = lanes[lane], widths[lane]
        start = max([0.0, *(ends[number] for number in after), *(start for start, _ in before)])
        if len(before) >= width:  # wait until one less runs
            start = max(start, sorted(end for _, end in before)[-int(width)])
        ends.append(start + need.latency_s + need.loaded_s)
        before.append((start, ends[-1]))
    return ends


def step_by_step(tasks: list[SimulatedTask], widths: list[float], capacities: dict[str, float]) -> list[float]:
    """The ends of tasks. Everything is looked at again after each event."""
    count, now = len(tasks), 0.0
    latency: dict[int, float] = {}  # the rest, in seconds
    loads: dict[int, float] = {}
    ends: dict[int, float] = {}
    lanes = [[number for number in range(count) if tasks[number].lane == lane] for lane in range(len(widths))]
    while len(ends) < count:
        for lane, width in zip(lanes, widths, strict=True):
            for number in lane:
                if number in ends or number in loads:
                    continue
                running = sum(other in loads and other not in ends for other in lane)
                if running >= width or any(each not in ends for each in tasks[number].after):
                    break
                latency[number], loads[number] = tasks[number].need.latency_s, tasks[number].need.loaded_s
        active = [number for number in loads if number not in ends]
        loading = [number for number in active if latency[number] <= 0]
        demand = defaultdict(list)
        for number in loading:
            if loads[number] > 0:
                for key, share in tasks[number].need.shares.items():
                    demand[key].append(share)
        slow = {key: min(capacities[key] / sum(shares), 1.0) for key, shares in demand.items() if len(shares) > 1}
        speed = {number: min([1.0, *(slow.get(key, 1.0) for key in tasks[number].need.shares)]) for number in loading}
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
        tasks, widths = random_tasks(each)
        assert simulate(tasks, widths).end_s == pytest.approx(without_sharing(tasks, widths), abs=1e-9)


@pytest.mark.parametrize("seed", range(0, 50, 10))
def test_with_sharing_a_plain_simulation_finds_the_same(seed):
    for each in range(seed, seed + 10):
        tasks, widths = random_tasks(each, count=25)
        ends = step_by_step(tasks, widths, CAPACITIES)
        assert simulate(tasks, widths, CAPACITIES).end_s == pytest.approx(ends, abs=1e-9)


# -------------------------------------------------------------------- worked examples


def run(*tasks: SimulatedTask, widths: tuple[float, ...] = (1, 1, 1, 1), **capacities: float) -> Times:
    return simulate(tasks, widths, capacities)


def test_two_tasks_halve_their_speed_while_both_run():
    """Until 2 the first has the link alone. Both then run at half speed until the second ends at 4, and the rest of the
    first takes one more second."""
    ends = run(
        SimulatedTask(0, Need(0, 4, {"link": 1})),
        SimulatedTask(1, Need(0, 2)),
        SimulatedTask(1, Need(0, 1, {"link": 1}), (1,)),
        link=1,
    ).end_s
    assert ends == [5.0, 2.0, 4.0]


def test_small_shares_fit_beside_each_other():
    half = Need(0, 3, {"cores": 0.5})
    assert run(SimulatedTask(0, half), SimulatedTask(1, half), cores=1).end_s == [3.0, 3.0]
    assert run(SimulatedTask(0, half), SimulatedTask(1, half), SimulatedTask(2, half), cores=1).end_s == pytest.approx(
        [4.5, 4.5, 4.5]
    )
    assert run(SimulatedTask(0, half), SimulatedTask(1, half), SimulatedTask(2, half), cores=2).end_s == [3.0, 3.0, 3.0]


def test_a_task_is_as_slow_as_its_slowest_resource_and_then_loads_the_others_less():
    """The first needs link and copies, the second and third copies alone. All run at a third of their speed, so the
    link is busy for a third of the time, and the fourth, with two thirds of it, has all that it wants."""
    ends = run(
        *(SimulatedTask(0, Need(0, 1, {"link": 1, "copies": 1})), SimulatedTask(1, Need(0, 1, {"copies": 1}))),
        *(SimulatedTask(2, Need(0, 1, {"copies": 1})), SimulatedTask(3, Need(0, 1))),
        link=1,
        copies=1,
    ).end_s
    assert ends == pytest.approx([3, 3, 3, 1])


def test_a_share_above_the_capacity_slows_others_down_but_not_a_task_alone():
    """While backward has the cores for itself it takes its time, and so does the codec behind it. The codec beside it
    takes 1.5 seconds from it for each of its own."""
    backward, codec = Need(0, 4, {"cores": 1}), Need(0, 1, {"cores": 1.5})
    assert run(SimulatedTask(0, backward), SimulatedTask(1, codec, (0,)), cores=1).end_s == [4.0, 5.0]
    assert run(SimulatedTask(0, backward), SimulatedTask(1, codec), cores=1).end_s == [5.5, 2.5]


def test_latency_passes_while_others_load():
    """As a part of a share, latency would slow both down: they would end at 4."""
    ends = run(SimulatedTask(0, Need(2, 1, {"link": 1})), SimulatedTask(1, Need(0, 2, {"link": 1})), link=1).end_s
    assert ends == [3.0, 2.0]


def test_latencies_of_a_lane_add_up_and_those_of_two_lanes_do_not():
    """On two lanes the first two share the link from 1 to 7; the latencies of the others then pass together."""
    each = Need(1, 3, {"link": 1})
    assert run(*[SimulatedTask(0, each)] * 4, link=1).end_s == [4.0, 8.0, 12.0, 16.0]
    assert run(
        SimulatedTask(0, each), SimulatedTask(1, each), SimulatedTask(0, each), SimulatedTask(1, each), link=1
    ).end_s == [7.0, 7.0, 14.0, 14.0]


def test_a_wide_lane_runs_several_tasks_that_share():
    pair = [SimulatedTask(0, Need(0, 2, {"link": 1}))] * 3
    assert run(*pair, widths=(1,), link=1).end_s == [2.0, 4.0, 6.0]
    assert run(*pair, widths=(2,), link=1).end_s == [4.0, 4.0, 6.0]


def test_a_faster_link_can_make_a_step_longer():
    """The cores compute 2 seconds for a task that 10 more seconds follow. If a message arrives meanwhile, its decoding
    takes half of the cores, and everything ends 2 seconds later. No bound is broken: the link was not what limited."""

    def end_s(send_s: float) -> float:
        decode, long = SimulatedTask(1, Need(0, 2, {"cores": 1}), (0,)), SimulatedTask(2, Need(0, 2, {"cores": 1}))
        tasks = (SimulatedTask(0, Need(0, send_s, {"link": 1})), decode, long, SimulatedTask(2, Need(10)))
        return max(run(*tasks, cores=1, link=1).end_s)

    assert (end_s(5.0), end_s(0.0)) == (12.0, 14.0)


# -------------------------------------------------------------------- properties


@pytest.mark.parametrize("seed", range(100, 130))
def test_nothing_is_faster_than_its_lanes_resources_and_chains(seed):
    tasks, widths = random_tasks(seed)
    times = simulate(tasks, widths, CAPACITIES)
    alone = simulate(tasks, widths)
    assert all(math.isfinite(each) for each in (*times.start_s, *times.load_s, *times.end_s))
    for number, (_, need, after) in enumerate(tasks):
        assert times.start_s[number] >= max((times.end_s[each] for each in after), default=0.0)
        assert times.load_s[number] - times.start_s[number] >= need.latency_s - 1e-9
        assert times.end_s[number] - times.load_s[number] >= need.loaded_s - 1e-9
    assert max(times.end_s) >= max(alone.end_s) * (1 - 1e-12)
    for key, capacity in CAPACITIES.items():
        work = sum(min(task.need.shares.get(key, 0.0), capacity) * task.need.loaded_s for task in tasks)
        assert max(times.end_s) >= work / capacity - 1e-9
