"""Plans follow one another while a training runs, and nothing is lost: not in any order, nor with checkpoints."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from conservation import Training, plans
from gckernels import EFSignSGD, Identity, sync
from gckernels.sync import Plan, attach
from gckernels.sync.programs import ALLREDUCE
from leftovers import lanes
from models import SMALL_BUCKETS, build
from ranks import run_ranks, values_of
from workloads import mass_of

MODES: dict[str, tuple[str, dict[str, bool]]] = {
    "default": ("Mlp", {}),
    "gradient_as_bucket_view": ("Mlp", {"gradient_as_bucket_view": True}),
    "static_graph": ("Partly", {"static_graph": True}),
    "find_unused_parameters": ("Branches", {"find_unused_parameters": True}),
}


# -------------------------------------------------------------------- any plan after any other


def walk(front: str, topology: tuple[int, int], order: list[str]) -> None:
    """Change the plan after every other step, and check all the time that nothing is lost."""
    training = Training(front)
    known = plans(training.model, topology)
    training.train(2)
    for name in order:
        before = training.handle.plan
        training.handle.change_plan(known[name])
        changing = training.handle.is_changing
        assert training.handle.plan == (before if changing else known[name])
        training.check()
        training.train(1)
        assert not training.handle.is_changing and training.handle.plan == known[name]
        training.check()
        if changing:
            assert not any(bool(each.any()) for each in mass_of(training.handle).values())
        training.train(1 + changing)
        training.check()
    assert training.handle.state_dict()["step"] == training.steps or front == "attach"
    training.handle.close()


def walks(topology: tuple[int, int], orders: list[list[str]]) -> None:
    for front in ("attach", "module"):
        for order in orders:
            walk(front, topology, order)


def test_nothing_is_lost_when_plans_follow_one_another():
    order = ["signs", "ring", "none", "root", "low rank", "parts"]
    values_of(run_ranks(2, walks, (2, 1), [order]))


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize("topology", [(2, 1), (3, 1), (2, 2)])
def test_nothing_is_lost_in_any_order(topology):
    orders = []
    names = ["none", "signs", "ring", "root", "low rank", "parts", "8 bits", "levels"]
    for stride in (1, 3, 5, 7):  # every name after many others
        orders.append([names[index * stride % 8] for index in range(9)])
        orders.append(orders[-1][::-1])
    values_of(run_ranks(topology[0] * topology[1], walks, topology, orders, timeout_s=400))


# -------------------------------------------------------------------- back to plain DDP


def there_and_back(mode: str) -> None:
    """After a plan that compresses and a change back, the bits are those of plain DDP, which has no hook."""
    model, settings = MODES[mode]
    pair = []
    for _ in range(2):
        ddp_model: Any = DistributedDataParallel(build(model), bucket_cap_mb=SMALL_BUCKETS, **settings)
        pair.append((ddp_model, torch.optim.SGD(ddp_model.parameters(), lr=0.05, momentum=0.9)))
    (plain, plain_optimizer), (ours, optimizer) = pair
    step = 0

    def train(steps: int) -> None:
        nonlocal step
        for _ in range(steps):
            for each, its_optimizer in pair:
                each(each.module.batch(step, dist.get_rank())).backward()
                its_optimizer.step()
                its_optimizer.zero_grad()
            step += 1

    def same() -> bool:
        pairs = zip(plain.parameters(), ours.parameters(), strict=True)
        return all(torch.equal(one, other) for one, other in pairs)

    nothing = sync.uniform_plan(ours, Identity(), program=ALLREDUCE)
    attachment = attach(ours, nothing)
    ends: list[int] = []
    attachment.on_step_end(lambda: ends.append(step))
    train(3)
    for _ in range(2):
        assert same()
        attachment.change_plan(sync.uniform_plan(ours, EFSignSGD()))
        train(3)
        assert not same()
        attachment.change_plan(nothing)
        steps = 0
        while attachment.is_changing:
            train(1)
            steps += 1
            assert steps < 9  # until a step has used every parameter
        train(1)
        assert ours._get_ddp_logging_data().get("comm_hook") is None
        plain.load_state_dict(ours.state_dict())
        plain_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        train(4)
    assert same() and ends == [*range(step)] and attachment.state_dict()["step"] == step
    attachment.close()


@pytest.mark.parametrize("mode", MODES)
def test_the_plan_that_compresses_nothing_is_plain_ddp_again(mode):
    values_of(run_ranks(2, there_and_back, mode))


def left_behind(front: str) -> None:
    training = Training(front)
    known = plans(training.model, (2, 1))
    groups = len(dist.distributed_c10d._world.pg_map)
    for name in ("ring", "low rank", "8 bits", "none"):
        old = weakref.ref(training.handle._frontend.runtime)
        training.handle.change_plan(known[name])
        training.train(2)
        gc.collect()
        assert old() is None
    assert len(dist.distributed_c10d._world.pg_map) == groups
    if front == "attach":
        assert not lanes()
    training.handle.close()


@pytest.mark.parametrize("front", ["attach", pytest.param("module", marks=pytest.mark.slow)])
def test_an_old_plan_leaves_nothing_behind(front):
    values_of(run_ranks(2, left_behind, front))


# -------------------------------------------------------------------- changes of mind, and errors


def changes_of_mind() -> None:
    training = Training("attach")
    known = plans(training.model, (2, 1))
    handle = training.handle
    handle.change_plan(known["signs"])
    assert handle.plan == known["signs"] and not handle.is_changing  # nothing was unsent
    training.train(2)
    handle.change_plan(known["root"])
    handle.change_plan(known["ring"])  # instead
    assert handle.is_changing and handle.plan == known["signs"]
    training.train(2)
    assert handle.plan == known["ring"]
    handle.change_plan(known["none"])
    handle.change_plan(known["ring"])  # as it was
    assert not handle.is_changing
    training.train(2)
    assert handle.plan == known["ring"]
    training.check()

    from_listener: list[Plan] = [known["8 bits"], known["none"], known["signs"]]

    def change() -> None:
        if from_listener and not handle.is_changing:
            handle.change_plan(from_listener.pop())

    handle.on_step_end(change)
    training.train(9)
    training.check()
    assert handle.plan == known["8 bits"]
    handle.change_plan(known["none"])
    handle.close()  # in the middle of a change
    training.train(2)


def test_plans_can_change_before_a_change_is_complete():
    values_of(run_ranks(2, changes_of_mind))


def disagree(front: str) -> list[str]:
    training = Training(front)
    known, rank = plans(training.model, (2, 1)), dist.get_rank()
    training.train(1)
    training.handle.change_plan(known["signs"])
    training.train(2)
    errors = []
    for wrong in (
        known["ring" if rank else "root"],
        known["ring"] if rank else "EFSignSGD",
        sync.uniform_plan(nn.Linear(3, 3), EFSignSGD(), world_size=2),
    ):
        with pytest.raises((RuntimeError, TypeError, ValueError)) as caught:
            training.handle.change_plan(wrong)
        errors.append(f"{type(caught.value).__name__}: {caught.value}")
    assert training.handle.plan == known["signs"] and not training.handle.is_changing
    training.train(2)
    training.check()
    training.handle.close()
    with pytest.raises(RuntimeError, match="change_plan: the attachment is closed"):
        training.handle.change_plan(known["ring"])
    return errors


@pytest.mark.parametrize("front", ["attach", "module"])
def test_ranks_that_disagree_all_raise(front):
    for rank, (other, kind, unfit) in enumerate(values_of(run_ranks(2, disagree, front))):
        assert other.startswith("Disagreement: change_plan: the ranks do not have the same settings")
        assert kind.startswith(
            "RuntimeError: change_plan: failed on rank 0: change_plan: plan must be a Plan, got str"
            if rank
            else "TypeError: change_plan: plan must be a Plan, got str"
        )
        assert unfit.startswith("PlanError: ")
