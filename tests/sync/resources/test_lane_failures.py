"""Lanes after a failure: nothing runs any more, and the first error is heard."""

from __future__ import annotations

import threading

import pytest

from gckernels.sync.programs.stages import Resource
from gckernels.sync.resources.workers import LaneFailure
from lane_threads import LONG_S, every, fail, finished

pytestmark = pytest.mark.usefixtures("no_thread_stays")


def test_after_a_failure_nothing_runs_and_the_first_error_is_told(lanes):
    ran, notified = [], []
    first = lanes.lane(Resource.COMMUNICATE, 0, 0).submit(fail("first"))
    finished(first)
    tokens = [
        lane.submit(lambda: ran.append("ran"), (first,), notified.append) for lane in every(lanes) for _ in range(3)
    ]
    tokens.append(lanes.lane(Resource.COMPUTE, 0).submit(fail("second"), (), notified.append))
    for token in tokens:
        finished(token)
    assert not ran
    assert [str(error) for error in notified] == ["first"] * 22
    assert isinstance(lanes.failure.error, ValueError)


def test_work_that_was_queued_before_the_failure_is_told_too(lanes):
    gate = threading.Event()
    notified = []
    failing = lanes.lane(Resource.COMMUNICATE, 0, 0).submit(lambda: (gate.wait(LONG_S), fail("late")()))
    waiting = lanes.lane(Resource.COMPUTE, 2).submit(lambda: notified.append("ran"), (failing,), notified.append)
    gate.set()
    finished(waiting)
    assert [str(error) for error in notified] == ["late"]


def test_work_that_fails_is_told_its_own_error(lanes):
    notified = []
    finished(lanes.lane(Resource.COMPUTE, 0).submit(fail("own"), (), notified.append))
    assert [str(error) for error in notified] == ["own"]


def test_no_error_nothing_told(lanes):
    notified = []
    finished(lanes.lane(Resource.COMPUTE, 0).submit(lambda: None, (), notified.append))
    assert not notified and lanes.failure.error is None


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), GeneratorExit(), MemoryError()])
def test_whatever_was_raised_is_told(lanes, error):
    notified = []

    def work() -> None:
        raise error

    finished(lanes.lane(Resource.COMPUTE, 0).submit(work, (), notified.append))
    assert notified == [error]
    finished(lanes.lane(Resource.COMPUTE, 0).submit(lambda: None))  # the lane survives


def test_a_failure_that_cannot_be_told_does_not_stop_the_lane(lanes):
    def cannot(error: BaseException) -> None:
        raise RuntimeError("nobody listens")

    notified = []
    finished(lanes.lane(Resource.COMPUTE, 0).submit(fail("first"), (), cannot))
    finished(lanes.lane(Resource.COMPUTE, 0).submit(lambda: None, (), notified.append))
    assert [str(error) for error in notified] == ["first"]


def test_the_first_error_stays(lanes):
    failure = LaneFailure()
    errors = [ValueError("0"), ValueError("1")]
    for error in errors:
        failure.set(error)
    assert failure.error is errors[0]


def test_an_error_that_explains_others_takes_their_place_and_is_told():
    failure, heard = LaneFailure(), []
    failure.tell = lambda error, stage: heard.append(error)
    errors = [ValueError("consequence"), ValueError("cause"), ValueError("later")]
    failure.set(errors[0])
    failure.explain(errors[1])
    failure.set(errors[2])
    assert failure.error is errors[1] and heard == errors[:2]
