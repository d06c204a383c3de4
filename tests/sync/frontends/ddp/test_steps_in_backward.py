"""An optimizer that a hook of a parameter calls in backward uses gradients that are not averaged, and is named."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as torch_optimizer

from gckernels import sync
from gckernels.sync.frontends.ddp.step_ends import call_after_backward
from ranks import run_ranks, values_of


def train(attached: str, compressor: Any, steps_in: str) -> list[str]:
    """The warnings of a training whose optimizer is called in hooks, in callbacks of backward, or around backward."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(23, 67), torch.nn.Tanh(), torch.nn.Linear(67, 7))
    model = module if attached == "bare" else DistributedDataParallel(module)
    optimizers = [torch.optim.SGD([parameter], lr=0.1) for parameter in module.parameters()]

    def step_all() -> None:
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def hook() -> None:
        for optimizer, parameter in zip(optimizers, module.parameters(), strict=True):
            parameter.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())

    hooks = set(torch_optimizer._global_optimizer_pre_hooks)  # earlier tests in this process may have left some
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if steps_in == "hooks before":
            hook()
        handle = sync.attach(model, *(() if compressor is None else (compressor,)))
        if steps_in == "hooks after":
            hook()
        for step in range(3):
            loss = model(torch.full((2, 23), float(step + 1))).sum()
            if steps_in == "callbacks":
                loss.register_hook(lambda _: call_after_backward(step_all))
            if steps_in == "closures":
                lbfgs = torch.optim.LBFGS(module.parameters(), max_iter=1)
                lbfgs.step(lambda loss=loss: (loss.backward(), loss)[1])
            else:
                loss.backward()
                if steps_in == "training":
                    step_all()
        handle.close()
        assert torch_optimizer._global_optimizer_pre_hooks.keys() <= hooks
    return [str(one.message) for one in caught if "calls SGD.step in backward" in str(one.message)]


FRONT_ENDS = [
    ("ddp", "EFSignSGD()"),
    ("ddp", "Identity()"),
    ("ddp", None),
    ("bare", "EFSignSGD()"),
    ("bare", "Identity()"),
]


@pytest.mark.parametrize(("attached", "compressor"), FRONT_ENDS)
@pytest.mark.parametrize("steps_in", ["hooks before", "hooks after"])
def test_steps_in_hooks_are_warned_of_once(attached: str, compressor: Any, steps_in: str):
    for found in values_of(run_ranks(2, train, attached, compressor, steps_in)):
        assert len(found) == 1


@pytest.mark.parametrize("attached", ["ddp", "bare"])
@pytest.mark.parametrize("steps_in", ["training", "callbacks", "closures"])
def test_other_steps_are_not_warned_of(attached: str, steps_in: str):
    assert values_of(run_ranks(2, train, attached, "EFSignSGD()", steps_in)) == [[], []]
