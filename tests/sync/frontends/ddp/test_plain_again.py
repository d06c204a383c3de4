"""A closed attachment leaves plain DDP, and a plan that compresses nothing never touches it."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from gckernels import BlockQuant, EFSignSGD, Identity, sync
from gckernels.sync import attach
from gckernels.sync.frontends.ddp import reducer
from gckernels.sync.programs import ALLGATHER, ALLREDUCE
from models import SMALL_BUCKETS, build
from ranks import run_ranks, values_of

NEVER = 10**9  # a start_step: all gradients go through the hook, and none is compressed
MODES: dict[str, tuple[str, dict[str, bool]]] = {
    "default": ("Mlp", {}),
    "gradient_as_bucket_view": ("Mlp", {"gradient_as_bucket_view": True}),
    "static_graph": ("Partly", {"static_graph": True}),
    "find_unused_parameters": ("Branches", {"find_unused_parameters": True}),
}


class Training:
    """A DDP model in training."""

    def __init__(self, model: str = "Mlp", **settings: bool) -> None:
        self.ddp_model = DistributedDataParallel(build(model), bucket_cap_mb=SMALL_BUCKETS, **settings)
        self.optimizer = torch.optim.SGD(self.ddp_model.parameters(), lr=0.05, momentum=0.9)
        self.step = 0

    def batch(self) -> Any:
        return self.ddp_model.module.batch(self.step, dist.get_rank())

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.ddp_model(self.batch()).backward()
            self.update()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=self.step % 2 == 0)
        self.step += 1

    @property
    def hook(self) -> str | None:
        return self.ddp_model._get_ddp_logging_data().get("comm_hook")


def assert_same(first: Training, second: Training) -> None:
    pairs = zip(first.ddp_model.parameters(), second.ddp_model.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("gckernels")]


# -------------------------------------------------------------------- plain DDP again


def there_and_back(mode: str) -> None:
    """Attach in mid-training and close, twice; the bits are those of plain DDP all the time."""
    model, settings = MODES[mode]
    plain, ours = Training(model, **settings), Training(model, **settings)

    def train(steps: int) -> None:
        for _ in range(steps):
            plain.train()
            ours.train()
            assert_same(plain, ours)

    train(3)
    for _ in range(2):
        attachment = attach(ours.ddp_model, EFSignSGD(), start_step=NEVER)
        assert ours.hook is not None
        train(3)
        attachment.close()
        assert not threads()
        train(4)
        assert ours.hook is None
    for each in (plain, ours):
        each.ddp_model.register_comm_hook(None, allreduce_hook)
    train(2)
    # it averages again, so nobody else may
    with pytest.raises(ValueError, match="averaged by a DistributedDataParallel model"):
        attach(ours.ddp_model.module, BlockQuant())


@pytest.mark.parametrize("mode", MODES)
def test_a_closed_attachment_leaves_plain_ddp(mode):
    """With three ranks, the order of addition shows that the buckets are those of plain DDP."""
    values_of(run_ranks(3 if mode == "default" else 2, there_and_back, mode))


def compressed_before() -> None:
    """A compressed part of the training leaves nothing behind."""
    ours, plain = Training(), Training()
    attachment = attach(ours.ddp_model, BlockQuant())
    ours.train(3)
    attachment.close()
    attachment.close()  # a second close does nothing
    plain.train(3)
    plain.ddp_model.load_state_dict(ours.ddp_model.state_dict())
    plain.optimizer.load_state_dict(copy.deepcopy(ours.optimizer.state_dict()))
    for _ in range(4):
        plain.train()
        ours.train()
        assert_same(plain, ours)


def frozen_while_rebuilt() -> None:
    """A parameter that is frozen when the reducer is rebuilt is averaged when it has thawed, as in plain DDP."""
    settings = {"find_unused_parameters": True}
    pair = Training("Branches", **settings), Training("Branches", **settings)
    attachment = attach(pair[1].ddp_model, EFSignSGD(), start_step=NEVER)
    for each in pair:
        each.train(3)
        each.ddp_model.module.trunk.bias.requires_grad_(False)
    attachment.close()
    for each in pair:
        each.train(2)
        each.ddp_model.module.trunk.bias.requires_grad_(True)
        each.train(3)
    assert_same(*pair)


def test_a_new_reducer_averages_the_parameters_of_the_old_one():
    values_of(run_ranks(2, compressed_before))
    values_of(run_ranks(2, frozen_while_rebuilt))


# -------------------------------------------------------------------- closed within a step


def closed_within_a_step() -> None:
    plain, ours = Training(), Training()
    attachment = attach(ours.ddp_model, EFSignSGD(), start_step=NEVER)
    for each in (plain, ours):
        each.train(2)
    loss = ours.ddp_model(ours.batch())
    attachment.close()
    with torch.no_grad():
        ours.ddp_model(ours.batch())  # rebuilds nothing: the backward is still to come
    loss.backward()
    ours.update()
    plain.train(1)
    for each in (plain, ours):
        each.train(3)
        assert each.hook is None
    assert_same(plain, ours)


def closed_while_accumulating() -> None:
    plain, ours = Training(), Training()
    attachment = attach(ours.ddp_model, EFSignSGD(), start_step=NEVER)
    for each in (plain, ours):
        each.train(2)
        with each.ddp_model.no_sync():
            loss = each.ddp_model(each.batch())
            if each is ours:
                attachment.close()
            loss.backward()
            each.ddp_model(each.batch()).backward()
        each.train(3)
    assert_same(plain, ours)


def test_closed_between_forward_and_backward():
    values_of(run_ranks(2, closed_within_a_step))
    values_of(run_ranks(2, closed_while_accumulating))


def attached_before_the_next_forward() -> None:
    """An attachment that follows another one immediately compresses its first step: DDP has kept its buckets."""
    plain, ours = Training(), Training()
    for each in (plain, ours):
        each.train(2)
    attach(ours.ddp_model, BlockQuant()).close()
    attachment = attach(ours.ddp_model, BlockQuant())
    for each in (plain, ours):
        each.train()
    assert attachment.residual_nbytes() > 0 and attachment.state_dict()["step"] == 1
    with pytest.raises(AssertionError):
        assert_same(plain, ours)
    attachment.close()


def test_attached_again_before_the_next_forward():
    values_of(run_ranks(2, attached_before_the_next_forward))


def without_the_private_functions() -> None:
    plain, ours = Training(), Training()
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(DistributedDataParallel, "_ddp_init_helper")
        attachment = attach(ours.ddp_model, EFSignSGD(), start_step=NEVER)
        for each in (plain, ours):
            each.train(2)
        attachment.close()
        for each in (plain, ours):
            each.train(2)
        assert_same(plain, ours)
        assert ours.hook is not None
        nothing = sync.uniform_plan(ours.ddp_model, Identity(), program=ALLREDUCE)  # it needs a hook here
        for compresses in (EFSignSGD(), nothing):
            again = attach(ours.ddp_model, compresses, start_step=NEVER)
            for each in (plain, ours):
                each.train(2)
            assert_same(plain, ours)
            again.close()


def test_without_the_private_functions_a_hook_averages_and_it_can_be_attached_again():
    values_of(run_ranks(2, without_the_private_functions))


# -------------------------------------------------------------------- plans that compress nothing


def left_alone(mode: str) -> None:
    model, settings = MODES[mode]
    plain, ours = Training(model, **settings), Training(model, **settings)
    nothing = sync.uniform_plan(ours.ddp_model, Identity(), program=ALLREDUCE)
    attachment = attach(ours.ddp_model, nothing)
    before = next(ours.ddp_model.parameters())._post_accumulate_grad_hooks
    assert ours.hook is None and not threads() and not before and not ours.ddp_model._forward_pre_hooks
    for each in (plain, ours):
        each.train(3)
    assert_same(plain, ours)
    total = sum(parameter.nbytes for parameter in ours.ddp_model.parameters())
    assert attachment.sent_nbytes_per_step() == total  # each of the two ranks sends half of it twice
    assert attachment.residual_nbytes() == 0 and attachment.state_dict()["units"] == []
    attachment.load_state_dict(attachment.state_dict() | {"step": 7})
    assert attachment.state_dict()["step"] == 7
    with pytest.raises(ValueError, match="has a gckernels attachment already"):
        attach(ours.ddp_model, nothing)
    attachment.close()
    exact = attach(ours.ddp_model, sync.uniform_plan(ours.ddp_model, Identity(), program=ALLGATHER))
    assert ours.hook is not None
    for each in (plain, ours):
        each.train(2)
    exact.close()
    for each in (plain, ours):
        each.train(2)
    assert_same(plain, ours)


@pytest.mark.parametrize("mode", ["default", "static_graph"])
def test_a_plan_that_compresses_nothing_leaves_the_model_to_ddp(mode):
    values_of(run_ranks(2, left_alone, mode))


def test_private_functions_of_ddp():
    """The names by which a reducer is rebuilt are those of the torch that is installed."""
    assert all(hasattr(DistributedDataParallel, name) for name in reducer._BUILD)
