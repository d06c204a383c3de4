"""Checks of bare modules and of the plans that are attached to them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from ...plans.arguments import differentiable
from ...plans.plan import Plan
from ..checks.models import refuse_several_devices, refuse_sharded, refuse_sparse_parameters, refuse_without_memory
from ..checks.optimizer_checks import refuse_steps_in_backward
from ..members import refuse_unknown
from ..ownership import refuse_claimed, refuse_wrapped
from ..request import Request


def checked_plan(model: torch.nn.Module, request: Request) -> tuple[Plan, list[str]]:
    """The plan of a request for a bare module, and the texts that must be the same on all ranks."""
    refuse_unknown("attach", model, request.options.exclude)
    parameters = parameters_of("attach", model, request.left_out)
    refuse_sparse_parameters("attach", model, parameters)
    refuse_steps_in_backward("attach", parameters)
    planned = planned_of(request.plan, parameters)
    refuse_claimed("attach", planned)
    refuse_wrapped("attach", planned)
    request.options.check()
    return fitting(request, parameters)


def fitting(request: Request, parameters: Mapping[str, torch.nn.Parameter]) -> tuple[Plan, list[str]]:
    """The plan of a request for some parameters, and the texts that must be the same on all ranks."""
    plan, options, cap = request.plan, request.options, request.options.bucket_cap_mb
    if cap is not None and isinstance(plan, Plan) and plan.has_launches:
        raise ValueError(f"attach: bucket_cap_mb must be None for a plan with launches, got {cap}")
    checked, summary = request.checked(planned_of(plan, parameters))
    settings = f"bucket_cap_mb {cap}, find_unused_parameters {options.find_unused_parameters}"
    return checked, [f"{summary}, {settings}", *checked.lines(), *frozen_lines(parameters)]


def parameters_of(caller: str, model: torch.nn.Module, left_out: Collection[str] = ()) -> dict[str, torch.nn.Parameter]:
    """The parameters of a bare module that can have a gradient and are not left out, by their plain names.

    Raises:
        TypeError, ValueError: it has none, or some are sharded, without memory, or on several devices.
    """
    refuse_sharded(caller, model)
    parameters = averaged_of(model, left_out)
    if not parameters:
        raise ValueError(f"{caller}: model has no parameters that can have a gradient")
    refuse_without_memory(caller, parameters)
    refuse_several_devices(caller, parameters)
    return parameters


def averaged_of(model: torch.nn.Module, left_out: Collection[str]) -> dict[str, torch.nn.Parameter]:
    """The parameters that can have a gradient and are not left out, by their plain names."""
    named = differentiable(model.named_parameters())
    return {name: each for name, each in named.items() if name not in left_out}


def frozen_lines(parameters: Mapping[str, torch.nn.Parameter]) -> list[str]:
    """A text for each frozen parameter, which must be frozen on all ranks."""
    return [f"{name} is frozen" for name, parameter in parameters.items() if not parameter.requires_grad]


def planned_of(plan: Any, parameters: Mapping[str, torch.nn.Parameter]) -> Mapping[str, torch.nn.Parameter]:
    """The parameters for which there must be a unit: a plan may leave out frozen ones."""
    if not isinstance(plan, Plan):
        return parameters
    named = {name for unit in plan.units for name in unit.parameters}
    return {name: each for name, each in parameters.items() if each.requires_grad or name in named}
