"""The engine starts work that is ready immediately, on the submitting thread, and starts nothing after a failure."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.futures import Future

from gckernels.sync import Topology
from gckernels.sync.communication.communicators import DryCommunicators
from gckernels.sync.engine.engine import Engine
from gckernels.sync.engine.failures import FailedBucket
from gckernels.sync.messages.message import DenseMessage, Message
from gckernels.sync.programs.stages import IN_PLACE_STAGES, Resource
from gckernels.sync.resources.lanes import DeviceLanes
from gckernels.sync.resources.stage import Stage

LONG_S = 30.0
(AVERAGE,) = IN_PLACE_STAGES


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine(DeviceLanes(torch.device("cpu")), phases=1)
    yield engine
    engine.lanes.close()


def message(log: list[Any], name: str, ends: Future[None] | None = None) -> Message:
    """A message of one stage that logs when it begins, or when its lane works, and on which thread.

    When the submitting thread has begun it, it ends with the future ``ends``.
    """

    def note(what: str) -> None:
        log.append((name, what, threading.current_thread().name))

    def begin() -> Future[None]:
        note("begun")
        return ended() if ends is None else ends

    made = Message()
    made.keys = (name,)
    made.stages = (Stage(AVERAGE, lambda: note("worked"), begin=begin),)
    return made


def ended() -> Future[None]:
    future: Future[None] = Future()
    future.set_result(None)
    return future


def test_several_are_begun_by_the_submitting_thread_and_no_lane_waits_for_them(engine):
    log: list[Any] = []
    here, threads, ends = threading.current_thread().name, threading.active_count(), [Future(), Future()]
    tokens = [
        engine.submit(message(log, name, end), 0, [engine.lanes.here()]) for name, end in zip("ab", ends, strict=True)
    ]
    assert log == [("a", "begun", here), ("b", "begun", here)]
    ends[1].set_result(None)
    assert [token.is_done for token in tokens] == [False, True]
    ends[0].set_result(None)
    assert tokens[0].is_done and threading.active_count() == threads


def test_what_comes_before_is_waited_for(engine):
    log: list[Any] = []
    gate = threading.Event()
    before = engine.lanes.lane(Resource.COMPUTE, 0).submit(lambda: gate.wait(LONG_S))
    token = engine.submit(message(log, "a"), 0, [before])
    assert not log
    gate.set()
    assert token.join(LONG_S) and [what for _, what, _ in log] == ["worked"]


def test_after_a_failure_nothing_is_begun_and_it_is_told(engine):
    log, notified = [], []

    def broken() -> Future[None]:
        raise ArithmeticError("the wire is broken")

    first = message(log, "a")
    first.stages = (Stage(AVERAGE, lambda: None, begin=broken),)
    tokens = [engine.submit(each, 0, [engine.lanes.here()]) for each in (first, message(log, "b"))]
    ended = threading.Event()
    engine.finish(tokens, ended.set, lambda error: (notified.append(str(error)), ended.set()))
    assert ended.wait(LONG_S) and notified == ["the wire is broken"] and not log
    assert isinstance(engine.lanes.error, ArithmeticError)


def test_a_failure_of_what_was_begun_ends_all_and_is_told(engine):
    log, notified, end = [], [], Future()
    tokens = [engine.submit(message(log, "a", end), 0, [engine.lanes.here()])]
    ended = threading.Event()
    engine.finish(tokens, ended.set, lambda error: (notified.append(str(error)), ended.set()))
    end.set_exception(ArithmeticError("the wire is broken"))
    assert ended.wait(LONG_S) and notified == ["the wire is broken"]
    engine.submit(message(log, "b"), 0, [engine.lanes.here()])
    assert [name for name, *_ in log] == ["a"]


# -------------------------------------------------------------------- buckets that are one collective


def dense(begin: Callable[[], Future[None]]) -> DenseMessage:
    made = DenseMessage(torch.zeros(4), ["a"], DryCommunicators(0, Topology(2)))
    made.stages = (replace(made.stages[0], begin=begin),)
    return made


def test_a_bucket_of_one_collective_ends_with_it(engine):
    end, outcomes = Future(), []
    future = engine.start_average(dense(lambda: end), 0, lambda error: outcomes.append(error) or "value")
    assert future is not None and not future.done() and not outcomes
    end.set_result(None)
    assert future.done() and future.value() == "value" and outcomes == [None]


@pytest.mark.parametrize("at_once", [True, False])
def test_its_failure_is_one_of_all_lanes(engine, at_once):
    end, outcomes, log = Future(), [], []

    def begin() -> Future[None]:
        if at_once:
            raise ArithmeticError("the wire is broken")
        return end

    future = engine.start_average(dense(begin), 0, lambda error: outcomes.append(error) or "failed")
    if not at_once:
        end.set_exception(ArithmeticError("the wire is broken"))
    assert future.value() == "failed"
    assert isinstance(engine.lanes.error, ArithmeticError) and str(outcomes[0]) == "the wire is broken"
    after = engine.start_average(dense(lambda: log.append("begun")), 0, lambda error: str(error))
    assert after.value() == "the wire is broken" and not log


def test_the_failure_of_a_bucket_can_be_the_value_of_a_future_on_a_device():
    """There torch pickles a value to find the tensors in it."""
    lock = threading.Lock()
    assert torch._jit_internal._extract_tensors(FailedBucket(lambda: RuntimeError(str(lock)))) == []
