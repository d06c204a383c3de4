"""Trainings that keep account of their gradients, so that tests see whether anything is lost."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddp_models import attached
from gckernels import BlockQuant, ChunkTopK, EFSignSGD, Identity, PowerSGD, sync
from gckernels.sync import Attachment, Plan
from gckernels.sync.programs import ALLREDUCE, PARAMETER_SERVER, ring
from models import build
from workloads import mass_of, summed


def plans(model: nn.Module, topology: tuple[int, int]) -> dict[str, Plan]:
    """Plans whose residuals differ in kind, weight and unit, for machines and devices on each."""
    world_size = topology[0] * topology[1]

    def made(compressor: Any, **more: Any) -> Plan:
        return sync.uniform_plan(model, compressor, **more)

    return {
        "none": made(Identity(), program=ALLREDUCE),
        "signs": made(EFSignSGD(), program="alltoall"),
        "ring": made(ChunkTopK(), program=ring(world_size)),
        "root": made(EFSignSGD(), program=PARAMETER_SERVER),
        "low rank": made(PowerSGD(rank=1)),
        "parts": made(EFSignSGD(), program="allgather").parted(512),
        "8 bits": made(BlockQuant()),
        "levels": made(EFSignSGD(), program="hierarchical", topology=topology),
    }


class Training:
    """A model whose gradients are set by hand, and what has become of them.

    Attributes:
        given: sum of the mean gradients of all steps, exact, by parameter.
        got: sum of the averaged gradients.
    """

    def __init__(self, front: str) -> None:
        self.module = build("Mlp")
        self.handle: Attachment
        nothing = sync.uniform_plan(self.module, Identity(), program=ALLREDUCE)
        self.model, self.handle = attached(front, self.module, nothing)
        self.parameters = dict(self.module.named_parameters())
        self.given = {name: torch.zeros(each.numel(), dtype=torch.float64) for name, each in self.parameters.items()}
        self.got = copy.deepcopy(self.given)
        self.steps = 0

    def train(self, steps: int) -> None:
        for _ in range(steps):
            own = self.module.batch(self.steps, dist.get_rank())
            mine = torch.autograd.grad(self.module(own), list(self.parameters.values()))
            self.model(own).backward()
            for (name, parameter), gradient in zip(self.parameters.items(), mine, strict=True):
                assert parameter.grad is not None
                self.given[name] += summed(gradient.flatten().double()) / dist.get_world_size()
                self.got[name] += parameter.grad.flatten().double()
            self.model.zero_grad()
            self.steps += 1

    def check(self) -> None:
        """Everything that was given has been got, or is in residuals."""
        masses = mass_of(self.handle)
        held = {name: torch.zeros_like(each) for name, each in self.given.items()}
        for unit in self.handle.plan.units:
            start = unit.start or 0
            held[unit.parameter][start : start + unit.numel] += masses[unit.key][-1]
        for name, given in self.given.items():
            torch.testing.assert_close(self.got[name] + held[name], given, rtol=0, atol=2e-5)
            same = summed(self.got[name].clone()) / dist.get_world_size()
            torch.testing.assert_close(same, self.got[name], rtol=0, atol=0)
