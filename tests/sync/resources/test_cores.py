"""Cores of ranks, and the time for which a thread waits for one."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

from gckernels.sync.communication import cores
from gckernels.sync.communication.cores import Cores, Moment, own_cores, running_s
from ranks import run_ranks, values_of

CPU = torch.device("cpu")
ONE_AND_TWO = 0b11


@pytest.mark.parametrize(
    ("ranks", "own"),
    [
        ([ONE_AND_TWO, ONE_AND_TWO], [1.0, 1.0]),
        ([0b01, 0b10], [1.0, 1.0]),
        ([ONE_AND_TWO, 0b10], [1.5, 0.5]),
        ([0b1000] * 4, [0.25] * 4),
    ],
)
def test_ranks_share_the_cores_that_they_may_run_on(ranks: list[int], own: list[float]):
    assert [own_cores(mine, ranks) for mine in ranks] == own


def cores_of_ranks() -> list[tuple[float, int, bool]]:
    found, before = [], os.sched_getaffinity(0)
    for mine in (before, {min(before)}):
        os.sched_setaffinity(0, mine)
        shared = Cores.of(dist.group.WORLD, CPU)
        found.append((round(shared.least * 2, 6), shared.threads, shared.suffice))
    os.sched_setaffinity(0, before)
    return found


def test_ranks_know_whether_they_have_cores_enough():
    threads, count = 1, len(os.sched_getaffinity(0))
    everywhere, on_one = values_of(run_ranks(2, cores_of_ranks))[0]
    assert everywhere[0] == pytest.approx(count) and everywhere[2] == (count / 2 >= everywhere[1])
    assert on_one == (1.0, max(everywhere[1], threads), False)


@pytest.mark.parametrize(("least", "threads", "slowdown"), [(2.0, 1, 1.0), (1.0, 1, 1.0), (0.5, 1, 2.0), (1.5, 3, 2.0)])
def test_ranks_with_too_few_cores_slow_down_each_other(least: float, threads: int, slowdown: float):
    shared = Cores(least, threads)
    assert shared.slowdown == slowdown and shared.suffice == (slowdown == 1.0)


def test_a_process_alone_has_all_of_its_cores():
    assert Cores.of(None, CPU).least == len(os.sched_getaffinity(0))


@pytest.mark.skipif(not os.path.exists(cores._ACCOUNT), reason="this system does not say how long a thread has waited")
def test_waiting_for_a_core_that_another_process_has_is_known():
    """Two processes that never sleep share a core: whatever the other one gets, this one has waited for."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        first, first_s, begun_s = Moment.now(), running_s(), time.thread_time()
        while Moment.now().waiting_s(first) < 0.02:
            pass
        last, running, computed = Moment.now(), running_s() - first_s, time.thread_time() - begun_s
    finally:
        other.kill()
        other.wait()
        os.sched_setaffinity(0, before)
    assert last.waiting_s(first) >= 0.02 and last.elapsed_s(first) > last.waiting_s(first)
    assert running == pytest.approx(computed, rel=0.2, abs=1e-2)  # not the time of the other process


def test_a_system_that_does_not_tell_lets_nobody_wait(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cores, "_ACCOUNT", "/proc/nothing")
    found: list[Moment] = []
    thread = threading.Thread(target=lambda: found.append(Moment.now()))
    thread.start()
    thread.join()
    assert found[0].waited_s == 0.0


def test_waits_of_different_threads_are_not_subtracted():
    assert Moment(2.0, 5.0, 1).waiting_s(Moment(1.0, 0.5, 2)) == 0.0
