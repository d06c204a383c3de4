"""Lanes that are closed or settled: what their threads finish, and what they no longer hold."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest
import torch

from gckernels.sync.programs.stages import Resource
from gckernels.sync.resources.lanes import DeviceLanes
from lane_threads import CPU, LONG_S, fail, finished
from ranks import run_ranks, values_of

pytestmark = pytest.mark.usefixtures("no_thread_stays")


def test_close_finishes_what_is_queued_and_ends_the_threads():
    lanes = DeviceLanes(CPU)
    gate = threading.Event()
    done: list[int] = []
    token = lanes.lane(Resource.COMPUTE, 0).submit(lambda: gate.wait(LONG_S))
    for index in range(20):
        token = lanes.lane(Resource.COMPUTE, index % 3).submit(lambda index=index: done.append(index), (token,))
    timer = threading.Timer(0.05, gate.set)
    timer.start()
    lanes.close()
    timer.join()
    assert done == list(range(20))
    lanes.close()  # a second close does nothing


def changed_before_close() -> float:
    lanes, values = DeviceLanes(torch.get_default_device()), torch.zeros(1000)
    lanes.lane(Resource.COMPUTE, 0).submit(lambda: values.add_(1), (lanes.here(),))
    lanes.close()
    return float(values.sum())


def test_close_finishes_what_a_device_has_to_do():
    assert values_of(run_ranks(1, changed_before_close)) == [1000]


def test_close_after_a_failure():
    lanes = DeviceLanes(CPU)
    notified = []
    token = lanes.lane(Resource.COMMUNICATE, 1, 0).submit(fail("first"))
    lanes.lane(Resource.COMPUTE, 2).submit(lambda: None, (token,), notified.append)
    lanes.close()
    assert [str(error) for error in notified] == ["first"]


def test_close_does_not_wait_for_a_stuck_collective_after_a_failure():
    before, lanes = set(threading.enumerate()), DeviceLanes(CPU)
    begun, gate = threading.Event(), threading.Event()
    stuck = lanes.lane(Resource.COMMUNICATE, 1, 0).submit(lambda: (begun.set(), gate.wait(LONG_S)))
    assert begun.wait(LONG_S)
    finished(lanes.lane(Resource.COMMUNICATE, 0, 0).submit(fail("first")))
    lanes.close()
    assert not stuck.is_done  # close has returned before LONG_S is over
    gate.set()
    finished(stuck)
    for thread in set(threading.enumerate()) - before:  # another test may have left lanes, which do not end
        if thread.is_alive():
            thread.join(LONG_S)


def test_close_from_a_lane_does_not_wait_for_itself():
    """Garbage collection may close lanes on one of their threads."""
    lanes, done = DeviceLanes(CPU), threading.Event()
    token = lanes.lane(Resource.COMPUTE, 0).submit(lanes.close)
    lanes.lane(Resource.COMPUTE, 1).submit(done.set, (token,))
    assert done.wait(LONG_S) and lanes.error is None
    lanes.close()


def test_a_waiting_lane_holds_nothing_of_what_it_has_run(lanes):
    class Held:
        pass

    held = Held()
    gone = weakref.ref(held)
    finished(lanes.lane(Resource.COMPUTE, 0).submit(lambda held=held: None))
    del held
    for _ in range(200):  # the token is set before the lane waits for more work
        gc.collect()
        if gone() is None:
            return
        time.sleep(0.01)
    pytest.fail("the lane holds on to its last work")


def test_settling_waits_for_what_computes_and_for_no_collective(lanes):
    gates = {name: (threading.Event(), threading.Event()) for name in ("compute", "communicate")}

    def stay(name: str) -> None:
        begun, gate = gates[name]
        begun.set()
        gate.wait(LONG_S)

    working = lanes.lane(Resource.COMPUTE, 1).submit(lambda: stay("compute"))
    lanes.lane(Resource.COMMUNICATE, 0).submit(lambda: stay("communicate"))
    assert all(begun.wait(LONG_S) for begun, _ in gates.values())
    lanes.failure.set(RuntimeError("on another lane"))
    settled = threading.Thread(target=lanes.settle)
    settled.start()
    settled.join(0.05)
    assert settled.is_alive()
    gates["compute"][1].set()
    settled.join(LONG_S)
    assert not settled.is_alive() and working.join(LONG_S)
    gates["communicate"][1].set()


_KEPT: list[DeviceLanes] = []


def exits_while_a_lane_computes(seconds: float) -> None:
    """Leave a lane that calls torch, and has more to run, on a thread that nobody waits for."""
    lanes, begun = DeviceLanes(CPU), threading.Event()
    _KEPT.append(lanes)  # or else garbage collection would close them

    def compute() -> None:
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            torch.ones(1000).sum()
            begun.set()

    token = lanes.lane(Resource.COMPUTE, 0).submit(compute)
    lanes.lane(Resource.COMPUTE, 1).submit(compute, (token,))
    assert begun.wait(LONG_S)


def test_a_program_that_exits_while_a_lane_computes_ends_well():
    (outcome,) = run_ranks(1, exits_while_a_lane_computes, 0.2, fresh=True)
    assert (outcome.error_type, outcome.exit_code) == ("ThreadsLeft", 0), outcome.output


def exits_while_a_lane_is_stuck() -> None:
    """Leave a lane that waits for what will never happen."""
    lanes, begun = DeviceLanes(CPU), threading.Event()
    _KEPT.append(lanes)
    lanes.lane(Resource.COMMUNICATE, 0).submit(lambda: (begun.set(), threading.Event().wait()))
    assert begun.wait(LONG_S)


def test_a_program_that_exits_while_a_lane_is_stuck_ends_all_the_same():
    (outcome,) = run_ranks(1, exits_while_a_lane_is_stuck, fresh=True, timeout_s=LONG_S)
    assert (outcome.error_type, outcome.exit_code) == ("ThreadsLeft", 0), outcome.output
