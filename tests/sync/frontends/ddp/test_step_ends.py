"""Listeners are called on every rank at the end of a backward that synchronises, when gradients have been averaged."""

from __future__ import annotations

import pickle
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from gckernels import EFSignSGD, Identity, sync
from gckernels.sync import Frontend, attach
from gckernels.sync.frontends.ddp import step_ends
from gckernels.sync.programs import ALLREDUCE
from models import SMALL_BUCKETS, Halves, Mlp, build
from ranks import run_ranks, values_of

MODES: dict[str, tuple[str, dict[str, bool]]] = {
    "default": ("Mlp", {}),
    "gradient_as_bucket_view": ("Mlp", {"gradient_as_bucket_view": True}),
    "static_graph": ("Partly", {"static_graph": True}),
    "find_unused_parameters": ("Branches", {"find_unused_parameters": True}),
}


class Heard:
    """A listener that counts its calls, and checks in each that all ranks have the same gradients."""

    def __init__(self, model: nn.Module) -> None:
        self.times = 0
        self._model = model

    def __call__(self) -> None:
        self.times += 1
        mine = torch.cat([each.grad.flatten() for each in self._model.parameters() if each.grad is not None])
        total = mine.clone()
        dist.all_reduce(total)
        assert torch.equal(total, 2 * mine)


def in_ddp(mode: str, compresses: bool) -> None:
    name, settings = MODES[mode]
    ddp_model: Any = DistributedDataParallel(build(name), bucket_cap_mb=SMALL_BUCKETS, **settings)
    attachment = attach(ddp_model, EFSignSGD() if compresses else nothing(ddp_model))
    heard = Heard(ddp_model)
    attachment.on_step_end(heard)
    rank = dist.get_rank()
    for step in range(4):
        ddp_model(ddp_model.module.batch(step, rank)).backward()
        assert heard.times == step + 1
        ddp_model.zero_grad()
    with torch.no_grad():
        ddp_model(ddp_model.module.batch(4, rank))
    if rank == 0:
        ddp_model.module(ddp_model.module.batch(4, rank)).detach()
    if mode != "static_graph":  # which DDP does not allow there
        with ddp_model.no_sync():
            ddp_model(ddp_model.module.batch(4, rank)).backward()
    assert heard.times == 4
    ddp_model(ddp_model.module.batch(5, rank)).backward()
    assert heard.times == 5
    attachment.ignore_step_end(heard)
    assert not ddp_model._forward_hooks
    ddp_model(ddp_model.module.batch(6, rank)).backward()
    assert heard.times == 5
    assert attachment._frontend.kind is Frontend.DDP and not attachment.is_changing
    assert attachment.parameters() == dict(ddp_model.module.named_parameters())
    frontend = attachment._frontend
    assert frontend.group == ddp_model.process_group and frontend.device == next(ddp_model.parameters()).device
    attachment.close()


def nothing(ddp_model: nn.Module) -> sync.Plan:
    return sync.uniform_plan(ddp_model, Identity(), program=ALLREDUCE)


def in_ddp_both(mode: str) -> None:
    for compresses in (False, True):
        in_ddp(mode, compresses)


@pytest.mark.parametrize("mode", MODES)
def test_every_step_of_ddp_ends_once(mode):
    values_of(run_ranks(2, in_ddp_both, mode))


class Answer:
    """An output in which nobody finds tensors."""

    def __init__(self, loss: torch.Tensor) -> None:
        self.loss = loss


class Hiding(Mlp):
    def forward(self, batch: dict[str, Any]) -> Any:
        return Answer(super().forward(batch))


def unusual() -> None:
    """Outputs without tensors, one forward with two backwards, and a model that is pickled while it is watched."""
    ddp_model: Any = DistributedDataParallel(Hiding())
    attachment, heard = attach(ddp_model, nothing(ddp_model)), Heard(ddp_model)
    attachment.on_step_end(heard)
    for step in range(3):
        ddp_model(ddp_model.module.batch(step, dist.get_rank())).loss.backward()
    assert heard.times == 3
    attachment.close()
    assert not any(each._post_accumulate_grad_hooks for each in ddp_model.parameters())

    ddp_model = DistributedDataParallel(Halves())
    attachment, heard = attach(ddp_model, nothing(ddp_model)), Heard(ddp_model)
    attachment.on_step_end(heard)
    for step in range(3):
        losses = ddp_model(torch.ones(2, 5) + dist.get_rank())
        losses["1"].backward()
        assert heard.times == step
        losses["0"].backward()
        assert heard.times == step + 1
    copied = pickle.loads(pickle.dumps(ddp_model))
    copied(torch.ones(2, 5))["0"].detach()
    attachment.close()
    losses = ddp_model(torch.ones(2, 5))
    (losses["0"] + losses["1"]).backward()
    assert heard.times == 3


def test_unusual_steps_end_once():
    values_of(run_ranks(2, unusual))


class Returning(nn.Module):
    """Returns one of its parameters beside a tensor that depends on others, and one that it has computed once."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.bias = nn.Linear(5, 3), nn.Parameter(torch.zeros(3))
        self.doubled: Any = None

    def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.doubled is None:
            self.doubled = 2 * self.bias
        return {"features": self.layer(inputs), "bias": self.bias, "doubled": self.doubled}


def returned() -> None:
    ddp_model: Any = DistributedDataParallel(Returning())
    attachment, heard = attach(ddp_model, nothing(ddp_model)), Heard(ddp_model)
    attachment.on_step_end(heard)
    for step in range(4):
        output = ddp_model(torch.ones(2, 5) + dist.get_rank())
        (output["features"] + output["bias"] + output["doubled"]).square().sum().backward(retain_graph=True)
        assert heard.times == step + 1
        assert not output["bias"]._backward_hooks and len(output["doubled"]._backward_hooks) == 1
    attachment.close()


def test_hooks_do_not_gather_on_tensors_that_outlive_a_step():
    values_of(run_ranks(2, returned))


class Recomputing(Mlp):
    """A network that computes its activations once more in a backward of their own."""

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        inputs = batch["x"].clone().requires_grad_()
        hidden = checkpoint(self.layers, inputs, use_reentrant=True)
        return F.cross_entropy(hidden, batch["y"])


def backwards_in_backwards() -> None:
    """Activations that are computed once more, and penalties for gradients of inputs."""
    ddp_model: Any = DistributedDataParallel(Recomputing())
    attachment, heard = attach(ddp_model, nothing(ddp_model)), Heard(ddp_model)
    attachment.on_step_end(heard)
    for step in range(3):
        ddp_model(ddp_model.module.batch(step, dist.get_rank())).backward()
        assert heard.times == step + 1
    attachment.close()

    ddp_model = DistributedDataParallel(nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 1, bias=False)))
    attachment, heard = attach(ddp_model, nothing(ddp_model)), Heard(ddp_model)
    attachment.on_step_end(heard)
    for step in range(4):
        inputs = (torch.ones(2, 5) + dist.get_rank()).requires_grad_()
        loss = ddp_model(inputs).sum()
        (gradient,) = torch.autograd.grad(loss, inputs, create_graph=True)
        if step % 2:
            torch.autograd.grad(loss, ddp_model.module[0].weight, create_graph=True)
        assert heard.times == step
        (loss + gradient.square().sum()).backward()
        assert heard.times == step + 1
        ddp_model.zero_grad(set_to_none=step < 2)
    attachment.close()


def test_a_backward_that_gives_no_parameter_its_gradient_ends_no_step():
    values_of(run_ranks(2, backwards_in_backwards))


def without_the_check() -> None:
    """A release of torch that does not say whether everything has been averaged."""
    with mock.patch.object(step_ends, "_IS_FINALIZED", "_is_no_function"):
        in_ddp("default", False)
        in_ddp("find_unused_parameters", False)


def test_steps_end_once_without_the_private_check_of_torch():
    values_of(run_ranks(2, without_the_check))


def in_module(name: str, unused: bool) -> None:
    module = build(name)
    attachment = attach(module, EFSignSGD(), bucket_cap_mb=SMALL_BUCKETS, find_unused_parameters=unused)
    heard = Heard(module)
    attachment.on_step_end(heard)
    for step in range(3):
        with attachment.no_sync():
            module(module.batch(step, dist.get_rank())).backward()
        assert heard.times == step
        module(module.batch(step, dist.get_rank())).backward()
        assert heard.times == step + 1
        module.zero_grad()
    assert attachment._frontend.kind is Frontend.MODULE
    assert attachment.parameters() == dict(module.named_parameters())
    attachment.close()


def in_modules() -> None:
    in_module("Mlp", False)
    in_module("Branches", True)


def test_every_step_of_a_module_ends_once():
    values_of(run_ranks(2, in_modules))


def raising(by_hook: bool) -> None:
    """The training gets the error of a listener, and can go on."""
    ddp_model: Any = DistributedDataParallel(build("Mlp"), bucket_cap_mb=SMALL_BUCKETS)
    attachment = attach(ddp_model, EFSignSGD() if by_hook else nothing(ddp_model))
    heard = Heard(ddp_model)

    def complain() -> None:
        raise KeyError("no")

    attachment.on_step_end(complain)
    attachment.on_step_end(heard)
    with pytest.raises(KeyError, match="no"):
        ddp_model(ddp_model.module.batch(0, dist.get_rank())).backward()
    attachment.ignore_step_end(complain)
    ddp_model(ddp_model.module.batch(1, dist.get_rank())).backward()
    assert heard.times == 1
    attachment.close()


@pytest.mark.parametrize("by_hook", [False, True])
def test_errors_of_listeners_reach_the_training(by_hook):
    values_of(run_ranks(2, raising, by_hook))
