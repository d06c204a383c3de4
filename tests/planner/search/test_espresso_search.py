"""Times on lanes are those of a direct simulation; Espresso's searches find what trying everything finds."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest

from gckernels.planner.policies.espresso import Changes, choose_options, offload, offload_groups
from gckernels.planner.search.maxplus import Steps
from gckernels.planner.search.rows import BACKWARD, FIRST_LANE, NOWHERE, UNUSABLE_S, Gaps, Rows

LANES = [BACKWARD, FIRST_LANE, FIRST_LANE + 1, FIRST_LANE + 2, FIRST_LANE + 3]
LINK = FIRST_LANE + 3


@dataclass
class Table:
    """Stages of options: ``[options, stages]`` lanes, ``[launches, options, stages]`` seconds, and the
    ``[launches, options, resources]`` work of resources."""

    lanes: np.ndarray
    seconds: np.ndarray
    work_s: np.ndarray


def changes(gaps_s, table, choice, backward_work_s=None):
    """The times of steps with a table."""
    launches, options, _ = table.seconds.shape
    lanes = np.concatenate([np.full((options, 1), BACKWARD), table.lanes], axis=1)[None]
    ends = np.concatenate([np.zeros((launches, options, 1)), table.seconds.cumsum(axis=2)], axis=2)
    before = np.concatenate([ends[..., :1], ends[..., :-1]], axis=2)
    rows = Rows(
        lanes,
        before[:, None],
        ends[:, None],
        np.zeros((1, options)),
        table.work_s,
        np.array([], dtype=np.intp),
        FIRST_LANE + 4,
    )
    work_s = np.zeros((launches + 1, table.work_s.shape[2]))
    work_s[0] += 0.0 if backward_work_s is None else backward_work_s
    return Changes(Steps(rows, range(launches), Gaps(np.append(gaps_s, 0.0), work_s)), choice)


def random_table(rng, launches, options, stages=4, resources=2):
    lanes = rng.choice(LANES, (options, stages))
    used = rng.integers(1, stages + 1, options)
    padding = np.arange(stages) >= used[:, None]
    lanes[padding] = NOWHERE
    seconds = rng.exponential(1.0, (launches, options, stages)) * ~padding
    return Table(lanes, seconds, rng.exponential(1.0, (launches, options, resources)))


def simulated(gaps_s, table, choice, backward_work_s=0.0):
    """The time of the step: launch by launch, stage by stage. All work of a resource is done in order, too."""
    free_s, work_s = dict.fromkeys([*LANES, NOWHERE], 0.0), np.zeros(table.work_s.shape[2]) + backward_work_s
    for launch, option in enumerate(choice):
        free_s[BACKWARD] += gaps_s[launch]
        at_s = free_s[BACKWARD]
        work_s = np.maximum(work_s, at_s) + table.work_s[launch, option]
        for lane, seconds in zip(table.lanes[option], table.seconds[launch, option], strict=True):
            if lane != NOWHERE:
                at_s = free_s[int(lane)] = max(at_s, free_s[int(lane)]) + seconds
    return max(*free_s.values(), *work_s)


@pytest.mark.parametrize("seed", range(5))
def test_times_are_those_of_a_simulation_after_any_changes(seed):
    rng = np.random.default_rng(seed)
    launches, options = 7, 5
    gaps_s, table = rng.exponential(0.5, launches), random_table(rng, launches, options)
    backward_s = rng.exponential(1.0, 2)
    times = changes(gaps_s, table, [0] * launches, backward_s)
    for _ in range(40):
        launch, option = int(rng.integers(launches)), int(rng.integers(options))
        choice = list(times.choice)
        expected = [
            simulated(gaps_s, table, [*choice[:launch], each, *choice[launch + 1 :]], backward_s)
            for each in range(options)
        ]
        assert times.options_s(launch) == pytest.approx(expected)
        times.choose(launch, option)
        assert times.step_s() == pytest.approx(expected[option])


def table_of(launches, compute_s, send_s):
    """Two options: to send raw data for ``send_s[0]``; to compute first, on backward, and send for ``send_s[1]``."""
    lanes = np.array([[LINK, NOWHERE], [BACKWARD, LINK]])
    seconds = np.zeros((launches, 2, 2))
    seconds[:, 0, 0], seconds[:, 1, 0], seconds[:, 1, 1] = send_s[0], compute_s, send_s[1]
    return Table(lanes, seconds, np.zeros((launches, 2, 0)))


@pytest.mark.parametrize("seed", range(5))
def test_launches_before_a_pause_of_the_link_are_hidden(seed):
    """Restated: a pause is a time at which the link waits for backward; the last one counts."""
    rng = np.random.default_rng(seed)
    gaps_s = rng.exponential(1.0, 12)
    table = table_of(12, 0.1, (rng.uniform(0.3, 1.2), 0.1))
    times = changes(gaps_s, table, [0] * 12)
    free_s = at_s = 0.0
    first = 0  # behind the last pause
    for launch, gap_s in enumerate(gaps_s):
        at_s += gap_s
        first = launch if at_s > free_s else first
        free_s = max(free_s, at_s) + table.seconds[launch, 0, 0]
    assert [times.is_hidden(launch) for launch in range(12)] == [launch < first for launch in range(12)]


def test_launches_before_a_pause_are_not_compressed():
    """Compressing the first launch would make its own communication shorter and the step longer."""
    times = changes(np.array([1.0, 5.0, 0.5]), table_of(3, 0.1, (2.0, 1.0)), [0, 0, 0])
    choose_options(times, [9, 5, 5])
    assert times.choice[0] == 0 and 1 in times.choice[1:]


def test_options_that_a_launch_may_not_use_are_not_used():
    table = table_of(2, 0.0, (5.0, 1.0))
    table.seconds[0, 1, 0] = UNUSABLE_S
    times = changes(np.array([1.0, 1.0]), table, [0, 0])
    choose_options(times, [1, 1])
    assert times.choice == [0, 1]


def test_the_largest_comes_first_and_between_equals_the_last_of_backward():
    """With one launch compressed the link is no longer the limit, so the second one would only delay backward."""
    times = changes(np.array([1.0, 1.0, 1.0]), table_of(3, 0.5, (2.0, 0.1)), [0, 0, 0])
    seen = []
    choose = times.choose
    times.choose = lambda launch, option: (seen.append(launch), choose(launch, option))  # type: ignore[method-assign]
    choose_options(times, [7, 7, 9])
    assert seen[:2] == [2, 1]


@pytest.mark.parametrize("seed", range(10))
def test_options_are_never_slower_than_none_and_close_to_the_best(seed):
    rng = np.random.default_rng(seed)
    launches, options = 5, 4
    table = random_table(rng, launches, options)
    gaps_s = rng.exponential(0.5, launches)
    times = changes(gaps_s, table, [0] * launches)
    none_s = times.step_s()
    choose_options(times, [3, 1, 2, 2, 1])
    best_s = min(simulated(gaps_s, table, choice) for choice in itertools.product(range(options), repeat=launches))
    assert best_s <= times.step_s() * (1 + 1e-12) <= none_s * (1 + 1e-12)


def offload_instance(rng, launches=8):
    """Launches of two sizes with an option on the device, which delays backward, and the same on the host.

    Lanes: backward, device to host, host, host to device, link.
    """
    sizes = rng.choice([1.0, 4.0], launches)
    device, host = rng.uniform(0.2, 1.0), rng.uniform(0.2, 3.0)
    copy, send = rng.uniform(0.02, 0.3), rng.uniform(0.1, 1.0)
    to_host, host, to_device = LANES[1:4]
    lanes = np.array([[BACKWARD, LINK, NOWHERE, NOWHERE], [to_host, host, to_device, LINK]])
    seconds = np.zeros((launches, 2, 4))
    seconds[:, 0, 0], seconds[:, 0, 1] = device * sizes, send * sizes
    for stage, each in enumerate((copy, host, copy, send)):
        seconds[:, 1, stage] = each * sizes
    table = Table(lanes, seconds, np.zeros((launches, 2, 0)))
    return rng.exponential(0.5, launches), table, sizes.tolist()


def test_the_first_of_a_group_are_the_best_to_move():
    """Lemma 1 of Espresso, by trying all sets. The paper argues for it without a proof, and there are exceptions: here
    one instance in eight, by up to 6 percent."""
    rng = np.random.default_rng(0)
    exact, worst = 0, 1.0
    for _ in range(60):
        gaps_s, table, sizes = offload_instance(rng)
        times = changes(gaps_s, table, [0] * len(sizes))
        offload(times, sizes, {0: 1}, max_traversed=10**6)
        best_s = min(simulated(gaps_s, table, choice) for choice in itertools.product((0, 1), repeat=len(sizes)))
        exact += times.step_s() <= best_s * (1 + 1e-9)
        worst = max(worst, times.step_s() / best_s)
    assert exact >= 50 and worst < 1.07


def test_few_combinations_tried_are_nearly_as_good_as_all():
    rng = np.random.default_rng(1)
    for _ in range(20):
        gaps_s, table, sizes = offload_instance(rng, launches=12)
        found = []
        for limit in (10**6, 1):
            times = changes(gaps_s, table, [0] * len(sizes))
            before_s = times.step_s()
            offload(times, sizes, {0: 1}, limit)
            assert times.step_s() <= before_s * (1 + 1e-12)
            found.append(times.step_s())
        assert found[1] <= found[0] * 1.05


def test_groups_have_one_size_and_option_in_the_order_of_backward():
    groups = offload_groups([0, 0, 2, 0, 2, 1], [5, 7, 5, 5, 5, 5], {0: 3, 2: 4})
    assert groups == [[0, 3], [1], [2, 4]]
