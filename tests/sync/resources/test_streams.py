"""Streams that threads feed: their work stays in order, and all ranks launch collectives in one order."""

from __future__ import annotations

import contextlib
import functools
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch

from gckernels.sync.programs.lanes import MAX_PHASES
from gckernels.sync.programs.stages import Resource
from gckernels.sync.resources.lane_kinds import FedStreamLane, ThreadLane
from gckernels.sync.resources.lanes import DeviceLanes
from gckernels.sync.resources.workers import LaneFailure, Pool, Queue, Token

GPU = torch.device("cuda")


@dataclass
class Stream:
    """A fake stream that logs its operations in order."""

    log: list[Any] = field(default_factory=list)
    broken: bool = False
    device: torch.device = GPU

    def wait_event(self, event: Event | str) -> None:
        self.log.append(("wait", event))

    def synchronize(self) -> None:
        self.log.append("synchronize")


@dataclass(eq=False)
class Event:
    """A fake event after the work of a stream. A thread may wait for it only if the event blocks, so that the thread
    sleeps."""

    enable_timing: bool = False
    blocking: bool = False
    where: int = 0

    def record(self, stream: Stream) -> None:
        if stream.broken:
            raise RuntimeError("device-side assert")
        stream.log.append("record")
        self.where = len(stream.log)

    def synchronize(self) -> None:
        assert self.blocking and self.where


@pytest.fixture
def streams() -> Iterator[list[Stream]]:
    """The list of all streams that are created; each logs the events that it records or waits for."""
    made: list[Stream] = []

    def make(device: Any = None) -> Stream:
        made.append(Stream())
        return made[-1]

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch("torch.cuda.stream", lambda stream: contextlib.nullcontext()))
        stack.enter_context(mock.patch("torch.cuda.Event", Event))
        stack.enter_context(mock.patch("torch.cuda.Stream", make))
        stack.enter_context(mock.patch("torch.cuda.current_stream", lambda device: Stream()))
        yield made


@pytest.fixture
def stream(streams: list[Stream]) -> Stream:
    return Stream()


@pytest.fixture
def pools() -> Iterator[list[Pool]]:
    made = [Pool(name, LaneFailure()) for name in ("host", "device")]
    yield made
    for pool in made:
        pool.close()


# -------------------------------------------------------------------- streams fed by threads


def test_a_fed_stream_waits_for_threads_and_lets_the_device_wait_for_events(stream, pools):
    host, lane = (
        ThreadLane("host", LaneFailure(), Queue(pools[0])),
        FedStreamLane("fed", LaneFailure(), Queue(pools[1]), stream),
    )
    gate, threads = threading.Event(), set()
    thread = host.submit(lambda: (gate.wait(10), threads.add(threading.current_thread())))
    device = Token("other stream", is_done=True)  # type: ignore[arg-type]
    first = lane.submit(lambda: (stream.log.append("first"), threads.add(threading.current_thread())), (thread, device))
    second = lane.submit(lambda: stream.log.append("second"))
    assert not second.join(0.05) and stream.log == []  # work stays in order, and submitting does not wait
    gate.set()
    assert second.join(10) and first.is_done
    assert stream.log == [("wait", "other stream"), "first", "record", "second", "record"]
    assert (first.event.where, second.event.where) == (3, 5)  # type: ignore[union-attr]
    first.wait()  # allowed, because the event blocks
    assert len(threads) == 2  # the stream keeps a thread of its own


def test_a_device_that_fails_is_told_of(stream, pools):
    lane, notified = FedStreamLane("fed", LaneFailure(), Queue(pools[1]), stream), set()
    stream.broken = True
    token = lane.submit(lambda: None, (), lambda error: notified.add(("first", str(error))))
    after = lane.submit(lambda: None, (token,), lambda error: notified.add(("second", str(error))))
    assert after.join(10) and token.is_done
    assert notified == {("first", "device-side assert"), ("second", "device-side assert")}


# -------------------------------------------------------------------- collectives of several communicators

MESSAGES = 7
PHASES = (  # for each phase, whether its collective is on the host
    (False, True, True, False),
    (False, False),
    (True, False, True),
    (False, *[True] * 8, False, False),  # more phases than lanes
    (False,),
)


def launched(streams: list[Stream], seed: int, steps: int) -> list[tuple[int, int]]:
    """The order in which a device's collectives are launched when the host takes its time, as ``(message, phase)``.
    Each collective of a message depends on the ones before it."""
    lanes, choose, order = DeviceLanes(torch.device("cuda"), offloads=True), random.Random(seed), []
    for step in range(steps):
        tokens = []
        for number in range(step * MESSAGES, (step + 1) * MESSAGES):
            token = lanes.here()
            phases = PHASES[number % len(PHASES)]
            lanes.next_message(len(phases) - 1)
            for phase, on_host in enumerate(phases):
                pause_s = choose.random() * 0.004
                token = lanes.lane(Resource.HOST_COMPUTE, phase).submit(lambda s=pause_s: time.sleep(s), (token,))
                if on_host:
                    token = lanes.lane(Resource.HOST_COMMUNICATE, phase).submit(lambda: None, (token,))
                else:
                    resource = Resource.COMMUNICATE if phase else Resource.AVERAGE
                    launch = functools.partial(order.append, (number, phase))
                    token = lanes.lane(resource, phase, number % 2).submit(launch, (token,))
            tokens.append(token)
        lanes.end_step()
        assert all(token.join(30) for token in tokens)
    lanes.close()
    assert lanes.failure.error is None
    return order


def test_collectives_of_different_communicators_are_launched_in_one_order(streams):
    orders = [launched(streams, seed, steps=2) for seed in range(6)]
    assert all(order == orders[0] for order in orders)
    assert len(orders[0]) == len(set(orders[0]))
    for lane in range(MAX_PHASES):
        of_lane = [launch for launch in orders[0] if launch[1] % MAX_PHASES == lane]
        assert of_lane == sorted(of_lane)  # each communicator follows the order of the messages


def test_messages_overlap_on_their_way_through_the_host(streams):
    """A message's last collective is launched after the first ones of the messages behind it."""
    order = launched(streams, 0, steps=1)
    assert order.index((1, 0)) < order.index((1, 1)) < order.index((0, 3))


def test_closing_waits_for_the_device(streams):
    lanes = DeviceLanes(torch.device("cuda"))
    lanes.lane(Resource.COMPUTE, 0).submit(lambda: None)
    lanes.close()
    assert streams[0].log == ["record", "synchronize"]


def test_closing_after_a_failure_waits_for_no_device(streams):
    lanes = DeviceLanes(torch.device("cuda"), offloads=True)
    lanes.lane(Resource.COMMUNICATE, 0).submit(lambda: None)
    lanes.failure.set(RuntimeError("another rank is gone"))
    lanes.close()
    assert "synchronize" not in streams[0].log
