"""Plans that one rank cannot build, such as for want of memory: the plan from before goes on, and nothing is lost."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from conservation import Training, plans
from gckernels.sync.engine import runtime
from gckernels.sync.plans.grouping import MessageSpec
from gckernels.sync.programs.stages import MessageKind
from ranks import run_ranks, values_of

build_message = runtime.build_message


def without_room(spec: MessageSpec, *more: Any, **named: Any) -> Any:
    """A message, unless it compresses on rank 1."""
    if spec.kind is not MessageKind.IN_PLACE and dist.get_rank():
        raise MemoryError("no room")
    return build_message(spec, *more, **named)


def followed(front: str, before: str) -> None:
    """A change that fails, and the same change when there is room again."""
    training, failures = Training(front), list[str]()
    known = plans(training.model, (2, 1))
    handle: Any = training.handle
    training.train(2)
    handle.change_plan(known[before])
    training.train(3)
    groups = len(dist.distributed_c10d._world.pg_map)
    with mock.patch.object(runtime, "build_message", without_room):
        handle._changes.follow(known["8 bits"], fail=failures.append)
        assert handle.is_changing and not failures
        training.train(1)
        training.check()
    assert failures == ["MemoryError: no room (rank 1)"]
    assert handle.plan == known[before] and not handle.is_changing
    assert len(dist.distributed_c10d._world.pg_map) == groups
    training.train(2)
    training.check()
    handle._changes.follow(known["8 bits"], fail=failures.append)
    training.train(1)
    assert handle.plan == known["8 bits"] and not handle.is_changing and len(failures) == 1
    training.train(2)
    training.check()
    handle.close()


def raised(front: str) -> str:
    """The error of a change that users have asked for."""
    training = Training(front)
    known = plans(training.model, (2, 1))
    training.handle.change_plan(known["signs"])
    training.train(3)
    training.handle.change_plan(known["8 bits"])
    with mock.patch.object(runtime, "build_message", without_room), pytest.raises(RuntimeError) as caught:
        training.train(1)
    assert training.handle.plan == known["signs"] and not training.handle.is_changing
    training.train(2)
    training.handle.close()
    return str(caught.value)


def changes(front: str) -> str:
    for before in ("none", "signs") if front == "attach" else ("signs",):
        followed(front, before)
    return raised(front)


@pytest.mark.parametrize("front", [pytest.param("attach", marks=pytest.mark.slow), "module"])
def test_a_plan_that_one_rank_cannot_build_leaves_all_with_the_plan_from_before(front):
    first, second = values_of(run_ranks(2, changes, front))
    assert first == second == "change_plan: MemoryError: no room (rank 1); the plan from before goes on"
