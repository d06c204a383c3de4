"""The arguments of ``average_updates``, and their checks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import torch
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel

from ...plans.plan import Plan
from ..checks.models import sharded_frontend
from ..module.module_checks import frozen_lines, parameters_of, planned_of
from ..ownership import refuse_claimed, refuse_wrapped
from ..request import Request

Outer: TypeAlias = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
"""A function that makes an optimizer of parameters."""


@dataclass(frozen=True)
class UpdatesRequest(Request):
    """The arguments of ``average_updates``, which documents them, beside those that ``attach`` has as well."""

    caller: ClassVar[str] = "average_updates"
    alternatives: ClassVar[str] = "a Plan"

    optimizer: torch.optim.Optimizer
    every: int
    outer: Outer
    scaler: GradScaler | None

    def check(self, parameters: dict[str, torch.nn.Parameter]) -> str:
        """A summary of the arguments, which must be the same on all ranks.

        Args:
            parameters: the parameters of the model, by name.

        Raises:
            TypeError, ValueError: an argument is not valid.
        """
        optimizer, every, decay, scaler = self.optimizer, self.every, self.decay, self.scaler
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"{self.caller}: optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
        if type(optimizer).__name__ == "ZeroRedundancyOptimizer":
            raise TypeError(
                f"{self.caller}: optimizer must step all parameters on every rank, got ZeroRedundancyOptimizer"
            )
        stepped = {id(each) for group in optimizer.param_groups for each in group["params"]}
        if stepped.isdisjoint(map(id, parameters.values())):
            raise ValueError(f"{self.caller}: optimizer must have parameters of the model, and has none of them")
        if type(every) is not int or every < 1:
            raise ValueError(f"{self.caller}: every must be an int from 1 up, got {every!r}")
        if not isinstance(decay, int | float) or not 0 <= decay <= 1:
            raise ValueError(f"{self.caller}: decay must be a number from 0 to 1, got {decay!r}")
        if not (scaler is None or isinstance(scaler, GradScaler)):
            got = type(scaler).__name__
            raise TypeError(f"{self.caller}: grad_scaler must be a torch.amp.GradScaler or None, got {got}")
        probe = torch.nn.Parameter(torch.zeros(1, 1, dtype=torch.float32, device=self.device))
        made: Any = self.outer([probe]) if callable(self.outer) else self.outer
        if not isinstance(made, torch.optim.Optimizer) or made is self.outer:
            raise TypeError(
                f"{self.caller}: outer must be None or a function that makes a torch.optim.Optimizer of parameters, "
                f"such as functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True), got "
                f"{type(self.outer if made is self.outer else made).__name__}"
            )
        return f"every {every}, decay {decay}, outer {' '.join(repr(made).split())}"


def checked_plan(model: torch.nn.Module, request: Request) -> tuple[Plan, list[str]]:
    """The plan of a request for a model, and the texts that must be the same on all ranks."""
    caller = request.caller
    if any(isinstance(each, DistributedDataParallel) for each in model.modules()):
        raise TypeError(
            f"{caller}: model must not be in DistributedDataParallel, which averages gradients in every step; give the "
            "module itself, without that wrapper"
        )
    if sharded_frontend(model) is not None:
        raise TypeError(
            f"{caller}: model must not be of fully_shard or replicate, whose gradients are averaged in every step"
        )
    parameters = parameters_of(caller, model)
    refuse_claimed(caller, parameters)
    refuse_wrapped(caller, parameters)
    return fitting(request, parameters)


def fitting(request: Request, parameters: dict[str, torch.nn.Parameter]) -> tuple[Plan, list[str]]:
    """The plan of a request for some parameters, and the texts that must be the same on all ranks."""
    assert isinstance(request, UpdatesRequest)
    settings = request.check(parameters)
    plan, summary = request.checked(planned_of(request.plan, parameters))
    for unit in plan.units:
        if not unit.compressor.traits.averages or unit.compressor.traits.applies_momentum:
            raise ValueError(
                f"{request.caller}: plan must have compressors whose result is the mean of what they are given, got "
                f"{unit.compressor} for {unit.key}"
            )
    return plan, [f"{summary}, {settings}", *plan.lines(), *frozen_lines(parameters)]
