"""Adam's directions in place of gradients: a training by them is one by AdamW, compressed or not."""

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

from gckernels import sync
from models import build
from ranks import run_ranks, values_of
from workloads import digest_of

BETAS, LR, WEIGHT_DECAY = (0.9, 0.95), 1e-2, 0.1
SIGNS = "EFSignSGD(block=1024, magnitude='projection')"


def sgd(model: nn.Module, **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY, **settings)


def trained(model: Any, optimizer: torch.optim.Optimizer, steps: range, rank: int = 0) -> None:
    """Train a model, which may be in DDP, on batches that differ between ranks."""
    bare = model.module if isinstance(model, DistributedDataParallel) else model
    for step in steps:
        optimizer.zero_grad()
        model(bare.batch(step, rank)).backward()
        optimizer.step()


@pytest.mark.parametrize("name", ["Mlp", "Branches", "Zoo"])
def test_a_rank_alone_trains_as_with_adamw(name: str):
    """Models have tied, frozen, unused and channels-last parameters; the rounding of weight decay differs."""
    mine, other = build(name), build(name)
    optimizer = sgd(mine)
    sync.AdamDirection(mine, optimizer, BETAS)
    trained(mine, optimizer, range(20))
    adamw = torch.optim.AdamW(other.parameters(), lr=LR, betas=BETAS, weight_decay=WEIGHT_DECAY)
    trained(other, adamw, range(20))
    for found, expected in zip(mine.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


# -------------------------------------------------------------------- several ranks


def averaged() -> None:
    """The parameters are those of a loop that averages Adam's directions of all ranks."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = build("Mlp")
    others = [build("Mlp") for _ in range(ranks)]
    ddp, optimizer = DistributedDataParallel(model), sgd(model)
    direction = sync.AdamDirection(ddp, optimizer, BETAS)
    attachment = sync.attach(ddp, "Identity")
    loops = [torch.optim.SGD(each.parameters(), lr=LR, weight_decay=WEIGHT_DECAY) for each in others]
    local = [sync.AdamDirection(each, loop, BETAS) for each, loop in zip(others, loops, strict=True)]
    for step in range(8):
        trained(ddp, optimizer, range(step, step + 1), rank)
        for number, each in enumerate(others):
            each.zero_grad()
            each(each.batch(step, number)).backward()
        for same in zip(*(each.parameters() for each in others), strict=True):
            mean = torch.stack([each.grad for each in same]).mean(0)
            for each in same:
                each.grad = mean.clone()
        for loop in loops:
            loop.step()
    for found, expected in zip(model.parameters(), others[0].parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    attachment.close()
    for each in (direction, *local):
        each.remove()


def compressed(front: str) -> None:
    """Parameters are the same on all ranks, and a resumed training has the same bits as one that went on."""
    rank = dist.get_rank()

    def setup(seed: int) -> tuple[Any, torch.optim.Optimizer, sync.AdamDirection, sync.Attachment]:
        module = build("Mlp", seed=seed)
        model: Any = DistributedDataParallel(module) if front == "ddp" else module
        optimizer = sgd(module)
        direction = sync.AdamDirection(model, optimizer, BETAS)
        plan = sync.uniform_plan(model, SIGNS)
        return (
            model,
            optimizer,
            direction,
            sync.attach(model, plan.with_units(unit.decaying(0.5) for unit in plan.units)),
        )

    model, optimizer, direction, attachment = setup(0)
    trained(model, optimizer, range(5), rank)
    states = copy.deepcopy((model.state_dict(), direction.state_dict(), attachment.state_dict()))
    trained(model, optimizer, range(5, 10), rank)
    expected = digest_of(model.parameters())
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, expected)
    assert len(set(digests)) == 1
    moments: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(moments, digest_of(state["first_moments"] for state in direction.state_dict().values()))
    assert len(set(moments)) > 1  # each rank has its own
    attachment.close()
    direction.remove()

    model, optimizer, direction, attachment = setup(1)
    model.load_state_dict(states[0])
    direction.load_state_dict(states[1])
    attachment.load_state_dict(states[2])
    trained(model, optimizer, range(5, 10), rank)
    assert digest_of(model.parameters()) == expected
    attachment.close()
    direction.remove()


def all_of_them() -> None:
    averaged()
    for front in ("ddp", "module"):
        compressed(front)


def test_directions_are_averaged_over_ranks():
    values_of(run_ranks(2, all_of_them))


# -------------------------------------------------------------------- what would train wrongly


@pytest.mark.parametrize(
    ("optimizer", "error", "text"),
    [
        (torch.optim.AdamW, TypeError, "optimizer must be a torch.optim.SGD, got AdamW"),
        (lambda given: torch.optim.SGD(given, momentum=0.9), ValueError, "no momentum .* momentum 0.9"),
        (lambda given: torch.optim.SGD(given, maximize=True), ValueError, "not maximize"),
    ],
)
def test_optimizers_with_more_than_a_step_are_refused(optimizer: Any, error: type[Exception], text: str):
    model = build("Mlp")
    with pytest.raises(error, match=text):
        sync.AdamDirection(model, optimizer(model.parameters()))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"betas": (0.9, 1.0)}, "betas must be two numbers from 0 to below 1"),
        ({"betas": (0.9,)}, "betas must be two"),
        ({"eps": 0.0}, "eps must be a number above 0"),
    ],
)
def test_refused_settings(arguments: dict[str, Any], text: str):
    model = build("Mlp")
    with pytest.raises(ValueError, match=text):
        sync.AdamDirection(model, sgd(model), **arguments)


def test_gradients_that_accumulate_are_refused():
    model = build("Mlp")
    sync.AdamDirection(model, sgd(model))
    model(model.batch(0, 0)).backward()
    with pytest.raises(RuntimeError, match="a second gradient since the last step"):
        model(model.batch(1, 0)).backward()


def test_a_momentum_that_a_scheduler_cycles_is_refused():
    model = build("Mlp")
    optimizer = sgd(model)
    sync.AdamDirection(model, optimizer)
    optimizer.param_groups[0]["momentum"] = 0.85
    with pytest.raises(ValueError, match="cycle_momentum=False"):
        trained(model, optimizer, range(1))


def test_a_gradient_scaler_is_refused():
    model = build("Mlp")
    optimizer, scaler = sgd(model), torch.amp.GradScaler(torch.get_default_device().type, init_scale=4.0)
    sync.AdamDirection(model, optimizer)
    scaler.scale(model(model.batch(0, 0))).backward()
    with pytest.raises(RuntimeError, match="a GradScaler would divide Adam's directions"):
        scaler.step(optimizer)


def test_a_parameter_without_directions_is_refused():
    model = build("Mlp")
    parameter = next(model.parameters()).requires_grad_(False)
    optimizer = sgd(model)
    sync.AdamDirection(model, optimizer)
    trained(model, optimizer, range(2))
    parameter.requires_grad_(True)
    with pytest.raises(RuntimeError, match="has a plain gradient, because it was frozen"):
        trained(model, optimizer, range(1))


def test_clipping_is_warned_of_at_the_first_step():
    model = build("Mlp")
    optimizer = sgd(model)
    sync.AdamDirection(model, optimizer)
    model(model.batch(0, 0)).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
    with pytest.warns(UserWarning, match="clipped or scaled behind backward, the steps are too short"):
        optimizer.step()


def test_states_of_other_models_are_refused():
    model, other = build("Mlp"), build("Branches")
    optimizer = sgd(other)
    direction = sync.AdamDirection(other, optimizer)
    trained(other, optimizer, range(1))
    with pytest.raises(ValueError, match="state must have moments of the model's parameters"):
        sync.AdamDirection(model, sgd(model)).load_state_dict(direction.state_dict())


def test_directions_live_as_long_as_the_model():
    model = build("Mlp")
    optimizer = sgd(model)
    direction = weakref.ref(sync.AdamDirection(model, optimizer))  # nobody keeps it
    gc.collect()
    trained(model, optimizer, range(1))
    assert direction() is not None
    del model, optimizer
    gc.collect()
    assert direction() is None
