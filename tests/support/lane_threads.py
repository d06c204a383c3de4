"""Lanes of the CPU for tests of their threads; a plugin of pytest, for its fixtures."""

from __future__ import annotations

import threading

import pytest
import torch

from gckernels.sync.programs.stages import Resource
from gckernels.sync.resources.lane_kinds import Lane
from gckernels.sync.resources.lanes import DeviceLanes

CPU = torch.device("cpu")
LONG_S = 30.0  # how long a test waits for an event that should be immediate


@pytest.fixture
def lanes():
    lanes = DeviceLanes(CPU)
    yield lanes
    lanes.close()


def every(lanes: DeviceLanes) -> list[Lane]:
    """The lanes of two phases and two channels."""
    compute = [lanes.lane(Resource.COMPUTE, phase) for phase in range(3)]
    return [*compute, *(lanes.lane(Resource.COMMUNICATE, phase, channel) for phase in (0, 1) for channel in (0, 1))]


@pytest.fixture
def no_thread_stays():
    before = set(threading.enumerate())
    yield
    new = [thread for thread in threading.enumerate() if thread not in before]
    for thread in new:  # one that has been told to end may take a moment on a loaded machine
        thread.join(LONG_S)
    left = [thread.name for thread in new if thread.is_alive()]
    assert not left


def finished(token) -> None:
    assert token.join(LONG_S)


def fail(text: str):
    def work() -> None:
        raise ValueError(text)

    return work
