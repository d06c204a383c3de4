"""The room that a device has for a plan beside the steps of a training."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from conservation import Training, plans
from gckernels.sync.frontends import changes
from gckernels.sync.frontends.room import Room, require_room
from ranks import run_ranks, values_of

MB = 10**6


@pytest.mark.parametrize(("plan_mb", "fits"), [(0, True), (20, True), (21, False), (-5, True)])
def test_a_plan_must_leave_room_for_the_largest_step(plan_mb, fits):
    """Tensors have taken 70 MB in some step, and can take 90."""
    before, after = Room(40 * MB, 70 * MB, 91 * MB), Room((40 + plan_mb) * MB, 75 * MB, 90 * MB)
    if fits:
        require_room(before, after)
    else:
        with pytest.raises(MemoryError, match=r"takes 21.* MB, and the largest step so far leaves 20.* MB"):
            require_room(before, after)


def test_devices_that_do_not_tell_have_room():
    require_room(None, Room(0, 0, 0))
    require_room(Room(0, 0, 0), None)
    assert Room.of(torch.device("cpu")) is None
    with mock.patch.object(torch.cuda, "memory_allocated", side_effect=RuntimeError("no statistics")):
        assert Room.of(torch.device("cuda")) is None


def crowded() -> list[str]:
    """The failure of a change when rank 1 has no room for a step."""
    training, failures = Training("attach"), list[str]()
    handle: Any = training.handle
    training.train(3)
    rooms = [Room(0, 50, 100), Room(60 if dist.get_rank() else 10, 50, 100)]
    with mock.patch.object(changes.Room, "of", lambda _: rooms.pop(0)):
        handle._changes.follow(plans(training.model, (2, 1))["signs"], fail=failures.append)
        training.train(1)
    assert not rooms and not handle.is_changing
    training.train(2)
    training.check()
    handle.close()
    return failures


def test_no_rank_takes_a_plan_that_leaves_one_without_room():
    for (failure,) in values_of(run_ranks(2, crowded)):
        assert "the largest step so far leaves" in failure and "(rank 1)" in failure
