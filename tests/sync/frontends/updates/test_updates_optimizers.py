"""Several optimizers, several gradient scalers, and wrappers of optimizers: a step of the training ends behind the last
one, and ranks are the same after rounds."""

from __future__ import annotations

import copy
import functools
import gc
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gckernels import sync
from models import build
from ranks import run_ranks, values_of
from workloads import digest_of


def on_all(*modules: nn.Module) -> bool:
    """Whether all ranks have the same parameters."""
    texts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, digest_of(each for module in modules for each in module.parameters()))
    return len(set(texts)) == 1


def split(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for matrices, AdamW for vectors."""
    matrices, vectors = (
        [each for each in model.parameters() if (each.dim() == 2) is is_two] for is_two in (True, False)
    )
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(vectors, lr=1e-2)]


def gradients(model: nn.Module, step: int) -> None:
    model.zero_grad()
    model(model.batch(step, dist.get_rank())).backward()


# -------------------------------------------------------------------- several optimizers


def both() -> None:
    """The parameters are those of plain local SGD with both optimizers, whichever steps first."""
    for order, every in (((0, 1), 1), ((1, 0), 2)):
        model = build("Mlp")
        other = copy.deepcopy(model)
        mine, plain = split(model), split(other)
        # plain local SGD has no factors of steps
        attachment = sync.attach(model, sync.Updates(mine, "Identity", every=every, scale_steps=False))
        anchors = [each.detach().clone() for each in other.parameters()]
        for step in range(6):
            gradients(model, step)
            gradients(other, step)
            for number in order:
                mine[number].step()
                plain[number].step()
            if (step + 1) % every == 0:
                with torch.no_grad():
                    for anchor, parameter in zip(anchors, other.parameters(), strict=True):
                        update = (anchor - parameter) * (1 / dist.get_world_size())
                        dist.all_reduce(update)
                        parameter.copy_(anchor.sub_(update))
                assert on_all(model)
            assert digest_of(model.parameters()) == digest_of(other.parameters()), (order, step)
        assert attachment.steps == 6 // every
        resumed(model, mine, attachment)
        attachment.close()


def resumed(model: nn.Module, optimizers: list[torch.optim.Optimizer], attachment: sync.Attachment) -> None:
    """A state is taken between the steps of two optimizers."""
    found = []
    gradients(model, 7)
    optimizers[0].step()
    state, grads = attachment.state_dict(), [each.grad for each in model.parameters()]
    for _ in range(2):
        for parameter, grad in zip(model.parameters(), grads, strict=True):
            parameter.grad = grad.clone()
        optimizers[1].step()
        for step in range(8, 11):
            gradients(model, step)
            for each in optimizers:
                each.step()
        found.append((digest_of(model.parameters()), attachment.steps))
        attachment.load_state_dict(state)
    assert len(set(found)) == 1
    optimizers[1].step()


def refused() -> None:
    model = build("Mlp")
    first, second = split(model)
    for given, text in (([], "must be one or a list"), ([first, first], "a list of different ones")):
        with pytest.raises(ValueError, match=f"Updates: optimizer .*{text}"):
            sync.attach(model, sync.Updates(given, "Identity"))
    with pytest.raises(TypeError, match=r"optimizer must be a torch.optim.Optimizer, got int"):
        sync.attach(model, sync.Updates([first, 3], "Identity"))
    attachment = sync.attach(model, sync.Updates([first, second], "Identity", every=3))
    gradients(model, 0)
    first.step()
    with pytest.raises(RuntimeError, match=r"optimizer 0 \(Muon\) makes a second step, and optimizer 1 \(AdamW\)"):
        first.step()
    with pytest.raises(RuntimeError, match=r"regroup: .* call it between two rounds"):
        attachment.regroup([0, 1])
    second.step()
    first.step()
    second.step()
    other = torch.optim.SGD(model.layers[0].parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match=r"SGD steps layers.0.bias, layers.0.weight, and Updates was not"):
        other.step()
    attachment.close()
    other.step()
    with pytest.warns(UserWarning, match=r"no optimizer was given that has layers.0.bias, .*list of all optimizers"):
        attachment = sync.attach(model, sync.Updates(first, "Identity"))
    gradients(model, 1)
    first.step()
    assert on_all(model)
    with pytest.raises(RuntimeError, match=r"AdamW steps layers.0.bias.* list of all optimizers"):
        second.step()
    attachment.close()


class Container(torch.optim.Optimizer):
    """An optimizer that steps others, as torchtitan has one."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        super().__init__([each for one in optimizers for group in one.param_groups for each in group["params"]], {})
        self.optimizers = optimizers

    def step(self, closure: Any = None) -> None:
        for each in self.optimizers:
            each.step()


def contained() -> None:
    model = build("Mlp")
    optimizers = split(model)
    container = Container([*optimizers])
    attachment = sync.attach(model, sync.Updates([*optimizers], "Identity", every=2))
    for step in range(4):
        gradients(model, step)
        container.step()
    assert attachment.steps == 2 and on_all(model)
    attachment.close()
    with pytest.warns(UserWarning, match="no optimizer was given that has"):
        attachment = sync.attach(model, sync.Updates(optimizers[0], "Identity"))
    with pytest.raises(RuntimeError, match=r"Container steps .* and Updates was not given it"):
        container.step()
    attachment.close()


def kinds() -> None:
    both()
    contained()
    refused()
    keyword()
    one_scaler()
    closed_in_any_order()
    wrapped()


def test_optimizers_and_scalers():
    values_of(run_ranks(2, kinds))


# -------------------------------------------------------------------- gradient scalers


def scaled(scaler: Any, model: nn.Module, step: int, overflows: bool) -> None:
    model.zero_grad()
    scaler.scale(model(model.batch(step, dist.get_rank()))).backward()
    if overflows:
        next(model.parameters()).grad.fill_(torch.inf)


def keyword() -> None:
    """As plain torch takes it."""
    model, scaler = build("Mlp"), torch.amp.GradScaler(torch.get_default_device().type, init_scale=4.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attachment = sync.attach(model, sync.Updates(optimizer, "Identity", every=2), grad_scaler=scaler)
    for step in range(4):
        scaled(scaler, model, step, step == 1 and dist.get_rank() == 1)
        scaler.step(optimizer=optimizer)
        scaler.update()
    assert on_all(model) and attachment.steps == 2
    attachment.close()


def one_scaler() -> None:
    """Two models share a scaler, and one model has two optimizers, of which one is skipped on one rank."""
    models = [build("Mlp", seed=seed) for seed in range(2)]
    optimizers: list[Any] = [split(models[0]), [torch.optim.SGD(models[1].parameters(), lr=0.1)]]
    scaler = torch.amp.GradScaler(torch.get_default_device().type, init_scale=4.0)
    attachments = [
        sync.attach(model, sync.Updates(each, "Identity", every=2), grad_scaler=[scaler])
        for model, each in zip(models, optimizers, strict=True)
    ]
    for step in range(8):
        for number, model in enumerate(models):
            scaled(scaler, model, step, dist.get_rank() == 1 and step == 1 + number)
        for each in (*optimizers[0], *optimizers[1]):
            scaler.step(each)
        scaler.update()
    assert on_all(*models) and [each.steps for each in attachments] == [4, 4]
    attachments[1].close()  # the first one still counts
    for step in range(8, 10):
        scaled(scaler, models[0], step, dist.get_rank() == 1 and step == 8)
        for each in optimizers[0]:
            scaler.step(each)
        scaler.update()
    assert on_all(models[0]) and attachments[0].steps == 5
    attachments[0].close()
    assert "step" not in vars(scaler)


def closed_in_any_order() -> None:
    models = [build("Mlp", seed=seed) for seed in range(3)]
    scaler, seen = torch.amp.GradScaler(torch.get_default_device().type, init_scale=4.0), []
    own = functools.partial(type(scaler).step, scaler)

    def of_the_user(*given: Any) -> Any:
        seen.append(given)
        return own(*given)

    scaler.step = of_the_user
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    attachments = [
        sync.attach(model, sync.Updates(each, "Identity"), grad_scaler=scaler)
        for model, each in zip(models, optimizers, strict=True)
    ]
    for number in (1, 0, 2):
        for each, model in enumerate(models):
            scaled(scaler, model, 0, overflows=False)
            scaler.step(optimizers[each])
            scaler.update()
        attachments[number].close()
    assert scaler.step is of_the_user and len(seen) == 9
    assert [each.steps for each in attachments] == [2, 1, 3]
    gc.collect()


# -------------------------------------------------------------------- wrappers


class Prepared(torch.optim.Optimizer):
    """A wrapper like Accelerate's: it is an optimizer that calls no hooks of its own."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    def step(self, closure: Any = None) -> None:
        self.optimizer.step()


class Accelerated(Prepared):
    __module__ = "accelerate.optimizer"


def wrapped() -> None:
    model = build("Mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"must call the hooks .*Prepared has none; give it the optimizer inside"):
        sync.attach(model, sync.Updates(Prepared(optimizer), "Identity"))
    prepared = Accelerated(optimizer)
    attachment = sync.attach(model, sync.Updates(prepared, "Identity", every=2))
    for step in range(4):
        gradients(model, step)
        prepared.step()
    assert on_all(model) and attachment.steps == 2
    sync.AdamDirection(model, prepared).remove()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attachment.load_state_dict(attachment.state_dict())
    attachment.close()
