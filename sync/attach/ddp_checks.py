"""Checks of DDP models and of the plans that are attached to them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ..plans.plan import Plan, PlanError
from .claims import attached, refuse_claimed
from .models import ddp_parameters, refuse_sharded, refuse_without_dense_gradients
from .optimizer_checks import refuse_steps_in_backward
from .reducer import comm_hook
from .request import Request


def checked_plan(ddp_model: Any, request: Request) -> tuple[Plan, str]:
    """The plan, and a summary of the request, which must be the same on all ranks."""
    if isinstance(getattr(ddp_model, "_orig_mod", None), DistributedDataParallel):
        raise TypeError("attach: ddp_model is compiled; attach to the DistributedDataParallel model, then compile that")
    if not isinstance(ddp_model, DistributedDataParallel):
        if isinstance(ddp_model, torch.nn.Module):
            refuse_sharded("attach", ddp_model)
        raise TypeError(f"attach: ddp_model must be a DistributedDataParallel model, got {type(ddp_model).__name__}")
    if ddp_model in attached:
        raise ValueError("attach: ddp_model has a gckernels attachment already; a model can have one")
    logged = refuse_foreign_hook("attach", ddp_model)
    parameters = ddp_parameters(ddp_model)
    if (averaged := logged.get("num_parameter_tensors", len(parameters))) != len(parameters):
        raise ValueError(
            f"attach: ddp_model averages {averaged} parameters since it was made, and {len(parameters)} need gradients "
            "now; freeze and thaw before wrapping, and attach before the first forward of a model of DTensors"
        )
    refuse_claimed("attach", parameters)
    refuse_without_dense_gradients("attach", ddp_model.module, parameters)
    refuse_steps_in_backward("attach", parameters)
    return fitting(request, parameters, dist.get_world_size(ddp_model.process_group))


def refuse_foreign_hook(caller: str, ddp_model: Any) -> dict[str, Any]:
    """DDP's logging data, if no one else has registered a communication hook."""
    # not from its list of hooks, which lacks the built-in ones
    logged: dict[str, Any] = ddp_model._get_ddp_logging_data()
    if logged.get("comm_hook") and comm_hook(ddp_model) is None:
        raise ValueError(f"{caller}: ddp_model has a communication hook already; DDP can have one")
    return logged


def fitting(request: Request, parameters: Mapping[str, torch.nn.Parameter], world_size: int) -> tuple[Plan, str]:
    """The plan of a request for DDP's buckets, and a summary."""
    plan, summary = request.checked(parameters, world_size)
    if merged := [unit.key for unit in plan.units if unit.also]:
        raise PlanError(f"plan merges parameters, which DDP's buckets may part; Synchronizer can: {', '.join(merged)}")
    return plan, summary
