"""The engine starts work that is ready immediately, on the submitting thread, and starts nothing after a failure."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from gckernels.sync.engine.engine import Engine
from gckernels.sync.messages.message import Message, Stage
from gckernels.sync.programs.stages import IN_PLACE_STAGES
from gckernels.sync.resources.lanes import DeviceLanes
from gckernels.sync.resources.workers import Token

LONG_S = 30.0
(AVERAGE,) = IN_PLACE_STAGES


@pytest.fixture
def engine() -> Iterator[Engine[Token]]:
    engine = Engine(DeviceLanes(torch.device("cpu")), phases=1)
    yield engine
    engine.close()


def message(log: list[Any], name: str, wait: Callable[[], object] = lambda: None) -> Message:
    """A message of one stage that logs when it begins, when it is waited for, and on which thread."""

    def note(what: str) -> None:
        log.append((name, what, threading.current_thread().name))

    def begin() -> Callable[[], object]:
        note("begun")
        return lambda: (wait(), note("waited"))

    made = Message()
    made.keys = (name,)
    made.stages = (Stage(AVERAGE, lambda step: note("worked"), begin=begin),)
    return made


def test_several_are_begun_before_the_first_has_ended(engine):
    log: list[Any] = []
    gate, here = threading.Event(), threading.current_thread().name
    tokens = [engine.submit(message(log, name, lambda: gate.wait(LONG_S)), 0, [engine.lanes.here()]) for name in "ab"]
    assert log == [("a", "begun", here), ("b", "begun", here)] and not tokens[0].done.is_set()
    gate.set()
    assert tokens[1].done.wait(LONG_S)
    lane = "gckernels-average-0"
    assert log[2:] == [("a", "waited", lane), ("b", "waited", lane)]


def test_what_comes_before_is_waited_for(engine):
    log: list[Any] = []
    before = Token()
    token = engine.submit(message(log, "a"), 0, [before])
    assert not log
    before.done.set()
    assert token.done.wait(LONG_S) and [what for _, what, _ in log] == ["worked"]


def test_after_a_failure_nothing_is_begun_and_it_is_told(engine):
    log, notified = [], []

    def broken() -> None:
        raise ArithmeticError("the wire is broken")

    first = message(log, "a")
    first.stages = (Stage(AVERAGE, lambda step: None, begin=broken),)  # type: ignore[arg-type]
    tokens = [engine.submit(each, 0, [engine.lanes.here()]) for each in (first, message(log, "b"))]
    ended = threading.Event()
    engine.finish(tokens, ended.set, lambda error: (notified.append(str(error)), ended.set()))
    assert ended.wait(LONG_S) and notified == ["the wire is broken"] and not log
    assert isinstance(engine.error, ArithmeticError)
