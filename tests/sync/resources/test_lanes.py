"""Lanes: the order of work, waiting, and collectives on their way."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial

import pytest

from gckernels.sync.programs.stages import Resource
from gckernels.sync.resources.workers import LaneFailure, Pool, Queue, Task, Token
from lane_threads import LONG_S, every, finished

pytestmark = pytest.mark.usefixtures("no_thread_stays")


def test_lanes_have_names_and_stay_the_same(lanes):
    assert every(lanes) == every(lanes)
    assert [lane.name for lane in every(lanes)] == [
        "compute-0",
        "compute-1",
        "compute-2",
        "communicate-0-0",
        "communicate-0-1",
        "communicate-1-0",
        "communicate-1-1",
    ]


def test_a_lane_runs_in_order_of_submission(lanes):
    done: list[int] = []
    tokens = [lanes.lane(Resource.COMPUTE, 0).submit(lambda index=index: done.append(index)) for index in range(200)]
    finished(tokens[-1])
    assert done == list(range(200))
    assert all(token.is_done for token in tokens)


def test_lanes_work_beside_each_other(lanes):
    threads, everyone = [], threading.Barrier(len(every(lanes)))

    def work() -> None:
        everyone.wait(LONG_S)  # broken unless all lanes work at the same time
        threads.append(threading.current_thread())

    tokens = [lane.submit(work) for lane in every(lanes)]
    for token in tokens:
        finished(token)
    assert lanes.error is None and len(set(threads)) == 7
    assert threading.current_thread() not in threads
    assert all(thread.daemon and thread.name.startswith("gckernels-") for thread in threads)


def test_what_waits_for_a_stage_runs_on_its_thread(lanes):
    threads: list[threading.Thread] = []
    gate = threading.Event()
    token = lanes.lane(Resource.COMPUTE, 0).submit(
        lambda: (gate.wait(LONG_S), threads.append(threading.current_thread()))
    )
    for phase in range(4):
        for resource in (Resource.COMMUNICATE, Resource.COMPUTE):
            token = lanes.lane(resource, phase + (resource is Resource.COMPUTE)).submit(
                lambda: threads.append(threading.current_thread()), (token,)
            )
    gate.set()
    finished(token)
    assert len(threads) == 9 and len(set(threads)) == 1


@pytest.mark.parametrize("resource", [Resource.COMMUNICATE, Resource.COMPUTE])
def test_a_thread_that_communicates_goes_on_with_the_next_collective(lanes, resource):
    """No link is idle until another thread is awake. A thread that computes goes on with the same message."""
    gate, threads = threading.Event(), {}

    def note(name: str) -> None:
        gate.wait(LONG_S)
        threads[name] = threading.current_thread()

    first = lanes.lane(resource, 0).submit(lambda: note("first"))
    behind = lanes.lane(resource, 0).submit(lambda: note("behind"))
    after = lanes.lane(Resource.COMPUTE, 1).submit(lambda: note("after"), (first,))
    gate.set()
    finished(behind)
    finished(after)
    same = "behind" if resource is Resource.COMMUNICATE else "after"
    assert [name for name in ("behind", "after") if threads[name] is threads["first"]] == [same]


def test_there_are_no_more_threads_than_lanes(lanes):
    """Threads that have nothing to do are used again, whoever wakes them."""
    before, computing = threading.active_count(), [lanes.lane(Resource.COMPUTE, phase) for phase in range(3)]
    most = 0
    for number in range(300):
        token = computing[number % 3].submit(lambda: None)
        token = computing[(number + 1) % 3].submit(lambda: None, (token,))
        if number % 3:
            finished(token)
        most = max(most, threading.active_count() - before)
    assert 0 < most <= 3


def test_work_waits_for_its_tokens(lanes):
    gate = threading.Event()
    done: list[str] = []
    first = lanes.lane(Resource.COMPUTE, 0).submit(lambda: (gate.wait(LONG_S), done.append("first")))
    second = lanes.lane(Resource.COMPUTE, 1).submit(lambda: done.append("second"))
    both = lanes.lane(Resource.COMPUTE, 2).submit(lambda: done.append("both"), (first, second))
    behind = lanes.lane(Resource.COMPUTE, 2).submit(
        lambda: done.append("behind")
    )  # it keeps the order, though it waits for no token itself
    finished(second)
    assert done == ["second"] and not both.is_done and not behind.is_done
    gate.set()
    finished(behind)
    assert done == ["second", "first", "both", "behind"]


def test_here_is_done_already(lanes):
    assert lanes.here().is_done


def test_a_chain_across_lanes_overlaps_with_the_next_one(lanes):
    """A unit in its second phase does not hold up the next unit's first phase."""
    gate, reached = threading.Event(), threading.Event()
    token = lanes.lane(Resource.COMPUTE, 0).submit(lambda: None)
    token = lanes.lane(Resource.COMMUNICATE, 0, 0).submit(lambda: None, (token,))
    stuck = lanes.lane(Resource.COMMUNICATE, 1, 0).submit(lambda: gate.wait(LONG_S), (token,))
    token = lanes.lane(Resource.COMPUTE, 0).submit(lambda: None)
    lanes.lane(Resource.COMMUNICATE, 0, 0).submit(reached.set, (token,))
    assert reached.wait(LONG_S)
    assert not stuck.is_done
    gate.set()
    finished(stuck)


def test_submitting_never_blocks(lanes):
    gate = threading.Event()
    never = lanes.lane(Resource.COMPUTE, 0).submit(lambda: gate.wait(LONG_S))
    submitted = threading.Event()

    def submit() -> None:
        for _ in range(1000):
            for lane in every(lanes):
                lane.submit(lambda: None, (never,))
        submitted.set()

    thread = threading.Thread(target=submit)
    thread.start()
    assert submitted.wait(LONG_S)
    assert not never.is_done
    gate.set()
    thread.join()


@pytest.fixture
def impatient() -> Iterator[None]:
    """Lets threads take turns as often as possible."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.parametrize("seed", range(5))
def test_any_graph_of_work_is_done_once_and_in_order(impatient, lanes, seed):
    """Work that nobody takes up would never be done."""
    choose, everything = random.Random(seed), every(lanes)
    places: list[int] = []  # the lane of each piece of work
    begun: list[int] = []
    faults: list[tuple[int, int]] = []
    tokens: list[Token] = []

    def work(number: int, after: list[int]) -> None:
        faults.extend((number, before) for before in after if not tokens[before].is_done)
        begun.append(number)

    for number in range(1500):
        after = sorted(
            {choose.randrange(max(0, number - 10), number) for _ in range(choose.randrange(3))} if number else ()
        )
        places.append(choose.randrange(len(everything)))
        tokens.append(everything[places[-1]].submit(partial(work, number, after), [tokens[each] for each in after]))
    for token in tokens:
        finished(token)
    assert sorted(begun) == list(range(1500)) and not faults
    for place in range(len(everything)):
        of_lane = [number for number in begun if places[number] == place]
        assert of_lane == sorted(of_lane)
    assert len({thread for thread in threading.enumerate() if thread.name.startswith("gckernels-lanes-")}) <= len(
        everything
    )


def test_work_that_comes_while_a_thread_looks_for_work_is_taken_up():
    """The thread that comes with it finds the queue taken, and the looking thread has just seen nothing."""
    pool, done = Pool("own", LaneFailure()), []

    class Interrupted(Queue):
        comes: Task | None = None

        def _first_is_ready(self) -> bool:
            found = super()._first_is_ready()
            comes, self.comes = self.comes, None
            if comes is not None:
                self.put(comes)
            return found

    queue = Interrupted(pool)
    queue.comes = Task(queue, lambda task: done.append(task), lambda: None, (), None)
    found = queue.take()
    assert found is not None and queue.take() is None
    pool.start(found)
    finished(found)
    assert done == [found]
    pool.close()


def test_what_follows_work_that_no_lane_has_done(lanes):
    """A collective that the submitting thread has begun ends on a thread that must not go on with anything."""
    ends = Token()
    threads: list[threading.Thread] = []
    token = lanes.lane(Resource.COMPUTE, 0).submit(lambda: threads.append(threading.current_thread()), (ends,))
    assert not token.join(0.02)
    ends.end()
    finished(token)
    assert threads != [threading.current_thread()]


# -------------------------------------------------------------------- collectives on their way


class Collective:
    """A stage whose collective ends when the test says so; ``events`` has what has happened to all of them."""

    begin = None

    def __init__(self, name: str, events: list[str]) -> None:
        self.name, self.events = name, events
        self.may_end = threading.Event()

    def issue(self):
        self.events.append(f"{self.name} issued")
        return self.wait

    def wait(self) -> None:
        assert self.may_end.wait(LONG_S)
        self.events.append(f"{self.name} ended")


def test_two_collectives_of_a_lane_are_on_their_way(lanes):
    events: list[str] = []
    lane, stages = lanes.lane(Resource.COMMUNICATE, 0), [Collective(name, events) for name in "abcd"]
    tokens = [lane.submit_stage(stage, ()) for stage in stages]
    for number, stage in enumerate(stages):
        while len(events) < min(2 + 2 * number, 4 + number):
            time.sleep(0.001)
        time.sleep(0.01)  # for more than may happen
        issued = [each for each in events if each.endswith("issued")]
        assert len(issued) == min(2 + number, 4) and not tokens[number].is_done
        stage.may_end.set()
        finished(tokens[number])
    assert [each for each in events if each.endswith("ended")] == [f"{name} ended" for name in "abcd"]
    assert [each for each in events if each.endswith("issued")] == [f"{name} issued" for name in "abcd"]


def test_collectives_are_issued_in_order_when_a_later_one_is_ready_first(lanes):
    events: list[str] = []
    lane, compute, ready = lanes.lane(Resource.COMMUNICATE, 0), lanes.lane(Resource.COMPUTE, 0), threading.Event()
    first, second = Collective("a", events), Collective("b", events)
    first.may_end.set()
    second.may_end.set()
    token = lane.submit_stage(first, (compute.submit(lambda: ready.wait(LONG_S)),))
    last = lane.submit_stage(second, ())
    time.sleep(0.01)
    assert not events
    ready.set()
    finished(token)
    finished(last)
    assert events.index("a issued") < events.index("b issued")


def test_a_collective_that_cannot_be_issued_is_not_waited_for(lanes):
    events: list[str] = []
    lane = lanes.lane(Resource.COMMUNICATE, 0)

    class Broken(Collective):
        def issue(self):
            raise RuntimeError("no link")

    tokens = [lane.submit_stage(stage, ()) for stage in (Broken("a", events), Collective("b", events))]
    for token in tokens:
        finished(token)
    assert str(lanes.error) == "no link" and not events
