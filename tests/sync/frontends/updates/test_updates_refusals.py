"""Arguments that cannot be served are refused by name on all ranks, before anything has changed."""

from __future__ import annotations

import copy
import dataclasses
import functools
import re
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from gckernels import EFSignSGD, sync
from models import build
from ranks import run_ranks, values_of
from workloads import digest_of

FIELDS = {each.name for each in dataclasses.fields(sync.Updates)}
OF_GRADIENTS = (
    ("memory_budget_mb", None, 1.0),
    ("can_discard", False, True),
    ("bucket_cap_mb", None, 1.0),
    ("find_unused_parameters", False, True),
)
"""The arguments of ``attach`` that are for gradients alone, with their defaults and another value."""
NESTEROV = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)


def raises(kind: type[Exception], text: str, function: Any, *arguments: Any, **named: Any) -> None:
    try:
        function(*arguments, **named)
    except kind as error:
        assert re.search(text, str(error)), error
    else:
        raise AssertionError(f"no error with {text!r}")


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(model.batch(0, dist.get_rank())).backward()
    optimizer.step()


def arguments() -> None:
    model = build("Mlp", seed=dist.get_rank())
    before = digest_of(model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def refused(kind: type[Exception], text: str, *changed: Any, **named: Any) -> None:
        target, *of_updates = [*changed, *[model, optimizer, EFSignSGD()][len(changed) :]]
        own = {name: named.pop(name) for name in FIELDS & named.keys()}
        raises(kind, f"^(attach|Updates): {text}", sync.attach, target, sync.Updates(*of_updates, **own), **named)

    refused(TypeError, "model must be a torch.nn.Module, got int", 3)
    refused(ValueError, "model has no parameters", nn.Module())
    refused(ValueError, "optimizer must have parameters of the model", nn.Sequential(build("Mlp")))
    refused(TypeError, "optimizer must be a torch.optim.Optimizer, got str", model, "SGD")
    refused(
        ValueError, "optimizer must have parameters of the model", model, torch.optim.SGD([nn.Parameter(torch.ones(1))])
    )
    refused(TypeError, "plan must be a Plan, an Auto, a compressor", model, optimizer, 4)
    refused(ValueError, "plan must have compressors whose result is the mean", model, optimizer, "SignSGD")
    of_ddp = sync.uniform_plan(model, EFSignSGD()).for_frontend(sync.Frontend.DDP)
    refused(sync.PlanError, "the plan is for Dist", model, optimizer, of_ddp)
    for every in (0, 1.0, True, "2"):
        refused(ValueError, "every must be an int from 1 up", every=every)
    for decay in (-0.1, 1.5, "1", torch.nan):
        refused(ValueError, "decay must be None or a number from 0 to 1", decay=decay)
    for scaler in (1.0, [torch.amp.GradScaler("cpu"), 1.0]):
        refused(TypeError, "grad_scaler must be a torch.amp.GradScaler, .* got float", grad_scaler=scaler)
    refused(ValueError, "anchor_device must be None or a device .*, got 'moon'", anchor_device="moon")
    for name, default, wrong in OF_GRADIENTS:
        refused(ValueError, f"{name} must be {default} with Updates, got {wrong}", **{name: wrong})
    refused(
        ValueError, "residual_bits must be 32 for a plan without residuals", model, optimizer, "Cast16", residual_bits=8
    )
    refused(ValueError, "start_step must be an int from 0 up", start_step=-1)
    refused(TypeError, "outer must be None or a function .* got SGD", outer=optimizer)
    refused(TypeError, "outer must be None or a function .* got list", outer=list)
    own = [2, NESTEROV, 0.5] if dist.get_rank() else [3, None, 1.0]
    for name, value in zip(("every", "outer", "decay"), own, strict=True):
        refused(RuntimeError, f"the ranks do not have the same settings:[\\s\\S]*{name}", **{name: value})
    if dist.get_rank():
        refused(ValueError, "every must be", every=0)
    else:
        refused(RuntimeError, "failed on rank 1.*every must be", every=3)
    assert digest_of(model.parameters()) == before
    other = DistributedDataParallel(model)
    refused(ValueError, "parameter .* is averaged by a DistributedDataParallel model")
    del other
    attachment = sync.attach(model, sync.Updates(optimizer, EFSignSGD(), every=2))
    refused(ValueError, "parameter .* is synchronised by another attachment")
    raises(ValueError, "is synchronised by another attachment", sync.attach, model)
    raises(TypeError, "^attach: grad_scaler .* got list", sync.attach, model, grad_scaler=[torch.amp.GradScaler("cpu")])
    raises(RuntimeError, "cannot be discarded", attachment.discard_step)
    with attachment.no_sync():
        step(model, optimizer)
    assert digest_of(copy.deepcopy(model).parameters()) == digest_of(model.parameters())
    attachment.close()
    step(model, optimizer)  # it steps as before
    wrapped = DistributedDataParallel(model)
    refused(ValueError, "parameter .* over all ranks that average updates", nn.Sequential(wrapped))


def sharded() -> None:
    model = nn.Sequential(build("Mlp"))
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    raises(ValueError, "process_group must have one rank", sync.attach, model, sync.Updates(optimizer, EFSignSGD()))


def test_arguments():
    values_of(run_ranks(2, arguments))


def test_models_of_fsdp2():
    values_of(run_ranks(2, sharded, fresh=True, exits=False))


def loads() -> None:
    model = build("Mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attachment = sync.attach(model, sync.Updates(optimizer, EFSignSGD(), every=2))
    first = copy.deepcopy(model.state_dict())
    step(model, optimizer)
    step(model, optimizer)
    own = copy.deepcopy(model.state_dict())
    model.load_state_dict(first)
    model.load_state_dict(own)  # as before, after an evaluation of other parameters
    step(model, optimizer)
    state = attachment.state_dict()
    model.load_state_dict(own)
    raises(RuntimeError, "has loaded a state_dict since", step, model, optimizer)
    attachment.load_state_dict(state)
    step(model, optimizer)
    model.layers[0].load_state_dict({name: each + 1 for name, each in model.layers[0].state_dict().items()})
    raises(RuntimeError, "has loaded a state_dict since", step, model, optimizer)
    attachment.close()
    step(model, optimizer)
    model.extra = nn.Linear(3, 3)
    attachment = sync.attach(model, sync.Updates(optimizer, EFSignSGD()))
    model.more = nn.Linear(3, 3)
    raises(RuntimeError, "more.bias, more.weight; attach to it again", step, model, optimizer)


def test_parameters_that_come_from_elsewhere():
    """A model that loads a ``state_dict`` inside a round, or another one, stops the training with an error, and so do
    new parameters."""
    values_of(run_ranks(2, loads))
