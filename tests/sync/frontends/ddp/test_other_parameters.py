"""Parameters that appear, vanish, are frozen or thawed after a model was wrapped: errors name them, on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gckernels import sync
from gckernels.sync.programs import ALLREDUCE
from models import SMALL_BUCKETS
from ranks import run_ranks, values_of


class Net(nn.Module):
    """A trunk with a frozen layer, and whatever heads there are."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.frozen = nn.Linear(12, 20), nn.Linear(20, 20).requires_grad_(False)
        self.heads = nn.ModuleList([nn.Linear(20, 4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.frozen(torch.tanh(self.trunk(x))))
        return sum(head(hidden).square().mean() for head in self.heads)


def _replace(net: Net) -> None:
    net.trunk.weight = nn.Parameter(net.trunk.weight.detach().clone())


def _swap(net: Net) -> None:
    net.trunk.requires_grad_(False)
    net.frozen.requires_grad_(True)


BETWEEN: dict[str, tuple[Callable[[Net], object], str]] = {
    "replaced": (_replace, r"does not average trunk\.weight, added or replaced"),
    "swapped": (_swap, r"averages .*trunk\.(weight|bias).* frozen or replaced"),
}
"""Changes between wrapping and attaching, and the error that names them, at the latest in the first backward."""


def _warm(net: Net) -> None:
    net.frozen.requires_grad_(True)


def _head(net: Net) -> None:
    net.heads.append(nn.Linear(20, 4))


def _normed(net: Net) -> None:
    nn.utils.parametrizations.weight_norm(net.trunk)


LATER: dict[str, tuple[Callable[[Net], object], str]] = {
    "thawed": (_warm, r"gradient of frozen\.weight, frozen\.bias, added or thawed"),
    "a head": (_head, r"gradient of heads\.1\.weight, heads\.1\.bias, added"),
    "replaced": (_replace, r"gradient of trunk\.weight, added"),
    "weight_norm": (_normed, r"gradient of trunk\.parametrizations\.weight\.original0, .*original1, added"),
}
"""Changes while the model is trained, and the error."""


def wrapped(net: Net, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(net, find_unused_parameters=True, **{"bucket_cap_mb": SMALL_BUCKETS} | options)


def backward(model: DistributedDataParallel) -> None:
    model(torch.ones(3, 12) + dist.get_rank()).backward()


def changed_between() -> None:
    for change, message in BETWEEN.values():
        net = Net()
        model = wrapped(net)
        change(net)
        with pytest.raises((ValueError, RuntimeError), match=message):
            sync.attach(model, "EFSignSGD")
            backward(model)


def changed_later(compresses: bool) -> None:
    for change, message in LATER.values():
        net = Net()
        model = wrapped(net)
        plan = (
            sync.uniform_plan(model, "EFSignSGD")
            if compresses
            else sync.uniform_plan(model, "Identity", program=ALLREDUCE)
        )
        attachment = sync.attach(model, plan)
        attachment.on_step_end(lambda: None)
        backward(model)
        backward(model)
        change(net)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=message):
                backward(model)
        assert attachment.steps == 4
        attachment.close()
        backward(model)  # as without an attachment


def changed() -> None:
    changed_between()
    for compresses in (False, True):
        changed_later(compresses)


def test_parameters_that_are_not_averaged_are_named():
    values_of(run_ranks(2, changed))


def harmless() -> None:
    """Parameters that DDP is to ignore, that get no gradient, or that are in another module."""
    net = Net()
    names = [f"frozen.{name}" for name in ("weight", "bias")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, names)
    model = wrapped(net)
    attachment = sync.attach(model, "EFSignSGD")
    backward(model)
    net.frozen.requires_grad_(True)
    net.spare = nn.Linear(3, 3)
    nn.Linear(3, 3).requires_grad_(True)
    backward(model)
    assert net.frozen.weight.grad is not None
    attachment.close()


def test_other_parameters_need_not_be_averaged():
    values_of(run_ranks(2, harmless))


def frozen_since() -> None:
    """A plan for an attached model has what DDP averages, whatever has been frozen or thawed since."""
    net = Net()
    model = wrapped(net)
    attachment = sync.attach(model, "EFSignSGD")
    expected = [name for name, each in net.named_parameters() if each.requires_grad]
    backward(model)
    net.heads.requires_grad_(False)
    net.frozen.requires_grad_(True)
    plan = sync.uniform_plan(model, "BlockQuant")
    assert [unit.key for unit in plan.units] == expected
    net.frozen.requires_grad_(False)
    attachment.change_plan(plan)
    for _ in range(3):
        backward(model)
    net.heads.requires_grad_(True)
    backward(model)
    attachment.close()
    net.heads.requires_grad_(False)
    assert [unit.key for unit in sync.uniform_plan(model, "BlockQuant").units] == ["trunk.weight", "trunk.bias"]


def test_a_plan_has_what_was_frozen_since_the_model_was_attached():
    values_of(run_ranks(2, frozen_since))


def refused() -> None:
    net = Net()
    model: Any = wrapped(net)
    model.lazy_bucket_allocation = True  # torch 2.15 has this option
    with pytest.raises(ValueError, match="lazy_bucket_allocation"):
        sync.attach(model)
    head = net.heads[0].weight
    late = {"delay_all_reduce_named_params": [("heads.0.weight", head)], "param_to_hook_all_reduce": net.trunk.weight}
    with pytest.raises(ValueError, match="delay_all_reduce_named_params"):
        sync.attach(wrapped(net, bucket_cap_mb=25, **late), "EFSignSGD")  # torch 2.11 takes no fraction beside it


def test_options_of_ddp_that_do_not_go_together_with_an_attachment():
    values_of(run_ranks(2, refused))
