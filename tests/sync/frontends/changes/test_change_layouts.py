"""Nothing is lost when plans follow one another that lay gradients out in different ways, in any dtype."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gckernels import DGC, EFSignSGD, Identity, sync
from gckernels.sync import Plan, attach
from gckernels.sync.programs import ALLREDUCE, ALLTOALL
from ranks import run_ranks, values_of
from workloads import launched, mass_of, summed


class Kinds(nn.Module):
    """Parameters of several dtypes and sizes, whose gradients are random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.zeros(40, 13))
        self.tall = nn.Parameter(torch.zeros(7, 50))
        self.bf16 = nn.Parameter(torch.zeros(20, 9, dtype=torch.bfloat16))
        self.wave = nn.Parameter(torch.zeros(11, 6, dtype=torch.complex64))
        self.fp64 = nn.Parameter(torch.zeros(5, dtype=torch.float64))
        self.scalar = nn.Parameter(torch.zeros(()))

    def forward(self, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(2 * step + dist.get_rank())
        products = [each * torch.randn(each.shape, generator=generator).to(each.dtype) for each in self.parameters()]
        return torch.stack([torch.abs(each.sum() - 1).float() for each in products]).sum()


def plans(model: nn.Module, front: str) -> list[Plan]:
    """Plans that part, merge, launch and leave alone the same parameters."""
    signs, nothing = (
        sync.uniform_plan(model, EFSignSGD(), program=ALLTOALL),
        sync.uniform_plan(model, Identity(), program=ALLREDUCE),
    )
    sparse = sync.uniform_plan(model, DGC(momentum=0.0, clip=None), exempt=None)
    if front == "attach":
        return [signs, nothing, signs.parted(128), sparse, nothing]
    wide, tall, *others = signs.units
    merged = replace(wide, numel=wide.numel + tall.numel, also=(tall.parameter,))
    return [signs, launched(sparse, "each"), signs.with_units([merged, *others]), nothing, launched(signs, "backwards")]


def in_reals(tensor: torch.Tensor) -> torch.Tensor:
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).flatten().double()


def walk(front: str) -> None:
    module: Any = Kinds()
    model: Any = module
    if front == "attach":
        model = DistributedDataParallel(module, bucket_cap_mb=1e-3)
        handle: Any = attach(model, sync.uniform_plan(model, Identity(), program=ALLREDUCE))
    else:
        handle = attach(module, sync.uniform_plan(module, Identity(), program=ALLREDUCE))
    parameters = dict(module.named_parameters())
    missing = {name: torch.zeros(in_reals(each.detach()).numel()).double() for name, each in parameters.items()}
    step = 0

    def train(steps: int) -> None:
        nonlocal step
        for _ in range(steps):
            mine = torch.autograd.grad(module(step), list(parameters.values()))
            model(step).backward()
            for (name, parameter), gradient in zip(parameters.items(), mine, strict=True):
                missing[name] += summed(in_reals(gradient)) / dist.get_world_size() - in_reals(parameter.grad)
            step += 1
            model.zero_grad(set_to_none=step % 2 == 0)

    def check() -> None:
        held = mass_of(handle)
        for unit in handle.plan.units:
            start = 0
            for name in unit.parameters:
                numel = min(missing[name].numel(), unit.numel)
                own = missing[name][unit.start or 0 :][:numel]
                atol = 0.2 if parameters[name].dtype == torch.bfloat16 else 1e-4  # roundings of all steps
                torch.testing.assert_close(held[unit.key][-1][start : start + numel], own, rtol=0, atol=atol)
                start += numel

    train(2)
    for plan in plans(model, front):
        handle.change_plan(plan)
        train(1)
        assert handle.plan == plan
        check()
        train(2)
        check()
    handle.close()


@pytest.mark.parametrize("front", ["attach", pytest.param("module", marks=pytest.mark.slow)])
def test_nothing_is_lost_between_layouts(front):
    values_of(run_ranks(2, walk, front))


def compiled() -> None:
    """A compiled model runs the hooks that come and go with the plans."""
    ddp_model: Any = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)))
    model = torch.compile(ddp_model, backend="eager")
    nothing, signs = (
        sync.uniform_plan(ddp_model, Identity(), program=ALLREDUCE),
        sync.uniform_plan(ddp_model, EFSignSGD()),
    )
    attachment, ends = attach(ddp_model, nothing), 0

    def count() -> None:
        nonlocal ends
        ends += 1

    attachment.on_step_end(count)
    for number, plan in enumerate((nothing, signs, nothing, signs, nothing)):
        attachment.change_plan(plan)
        for _ in range(3):
            model(torch.ones(4, 8) + dist.get_rank()).square().mean().backward()
            ddp_model.zero_grad()
        assert ends == 3 * (number + 1) and attachment.plan == plan and not attachment.is_changing
    assert ddp_model._get_ddp_logging_data().get("comm_hook") is None
    attachment.close()


@pytest.mark.host_only("torch.compile cannot trace the simulated groups")
@pytest.mark.slow
def test_plans_of_a_compiled_model_can_change():
    values_of(run_ranks(2, compiled))
