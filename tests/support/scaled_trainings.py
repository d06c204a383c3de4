"""Trainings with a gradient scaler, which skips the steps that have an infinite gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import gckernels
from ddp_models import attached
from gckernels import sync
from gckernels.sync.programs import PROGRAMS
from models import build
from workloads import topology, with_feedback

FRONTS = ("attach", "module")
SKIPPED = {2: 0, 3: -1, 6: 0, 7: 0, 10: -1}
"""The steps with an infinite gradient, and the rank that has it."""
STEPS = 13


def scaler_of(init: float = 2.0**14) -> torch.amp.GradScaler:
    return torch.amp.GradScaler(torch.get_default_device().type, init_scale=init, growth_interval=2)


class Training:
    """A model under one of the two front ends, trained with some steps that the scaler is to skip."""

    def __init__(
        self,
        front: str,
        spec: str,
        program: str,
        scaler: torch.amp.GradScaler | None,
        notified: bool = True,
        optimizers: Callable[[Any], list[torch.optim.Optimizer]] = lambda p: [torch.optim.SGD(p, lr=0.05)],
        can_discard: bool = False,
        residual_bits: int = 32,
    ) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.module = build("Mlp")
        self.parameters = dict(self.module.named_parameters())
        compressor, where = gckernels.from_spec(spec), topology(self.world_size)
        plan = sync.uniform_plan(
            self.parameters.items(), compressor, program=PROGRAMS[program], topology=where, world_size=self.world_size
        )
        settings: dict[str, Any] = {"grad_scaler": scaler} if notified else {}
        settings |= {"can_discard": can_discard, "residual_bits": residual_bits}
        self.poisoned = ""
        for name, parameter in self.parameters.items():
            parameter.register_hook(lambda grad, name=name: self._poison(name, grad))
        self.model, self.attachment = attached(front, self.module, with_feedback(plan), **settings)
        self.optimizers, self.scaler = optimizers(self.module.parameters()), scaler

    def _poison(self, name: str, grad: torch.Tensor) -> torch.Tensor:
        return torch.full_like(grad, torch.inf) if name == self.poisoned else grad

    def backward(self, number: int, poisoned: str = "") -> None:
        self.poisoned = poisoned
        self.module.zero_grad()
        loss = self.model(self.module.batch(number, self.rank))
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def step(self, number: int, poisoned: str = "") -> None:
        self.backward(number, poisoned)
        for optimizer in self.optimizers:
            optimizer.step() if self.scaler is None else self.scaler.step(optimizer)
        if self.scaler is not None:
            self.scaler.update()

    def skipped(self, number: int) -> str:
        """The name of the parameter whose gradient this rank spoils, so that the step is skipped; empty if it spoils
        none."""
        where = SKIPPED.get(number)
        return "layers.2.weight" if where is not None and self.rank == where % self.world_size else ""

    def residuals(self) -> dict[tuple[str, str], torch.Tensor]:
        feedback = self.attachment.state_dict()["feedback"]
        return {(kind, name): values for kind in feedback for name, values in feedback[kind].items()}


def same(first: dict[Any, torch.Tensor], second: dict[Any, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)
