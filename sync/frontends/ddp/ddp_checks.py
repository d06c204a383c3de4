"""Checks of DDP models and of the plans that are attached to them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ...plans.plan import Plan, PlanError
from ..checks.models import (
    ddp_parameters,
    refuse_sparse_parameters,
    refuse_without_memory,
    sparse_parameter,
)
from ..checks.optimizer_checks import refuse_steps_in_backward
from ..ownership import attached, recorded, refuse_claimed
from ..request import Request
from .averages import will_rebuild_buckets
from .ddp_buckets import listed
from .reducer import comm_hook


def checked_plan(ddp_model: DistributedDataParallel, request: Request) -> tuple[Plan, list[str]]:
    """The plan of a request for a DDP model, and the texts that must be the same on all ranks."""
    request.options.refuse()
    if ddp_model in attached:
        raise ValueError("attach: model has a gckernels attachment already; a model can have one")
    if ddp_model in recorded:
        raise ValueError("attach: model is being traced; let the tracing end, or close() it")
    _refuse_options(ddp_model)
    logged = refuse_foreign_hook("attach", ddp_model)
    parameters = ddp_parameters(ddp_model)
    known = set(map(id, getattr(ddp_model, "_module_parameters", parameters.values())))
    if new := [name for name, parameter in parameters.items() if id(parameter) not in known]:
        raise ValueError(
            f"attach: model does not average {listed(new)}, added or replaced since it was made; wrap the module "
            "in a new DistributedDataParallel"
        )
    if (averaged := logged.get("num_parameter_tensors", len(parameters))) != len(parameters):
        raise ValueError(
            f"attach: model averages {averaged} parameters since it was made, and {len(parameters)} need gradients "
            "now; freeze and thaw before wrapping, and attach before the first forward of a model of DTensors"
        )
    refuse_claimed("attach", parameters)
    refuse_without_memory("attach", parameters)
    refuse_steps_in_backward("attach", parameters)
    plan, summary = fitting("attach", ddp_model, request, parameters)
    buckets = "its first buckets" if will_rebuild_buckets(ddp_model) else "its last buckets"
    return plan, [f"{summary}, DDP with {buckets}", *plan.lines()]


def _refuse_options(ddp_model: Any) -> None:
    """Raise a ValueError if the model has an option of DDP with which nobody can send its gradients."""
    if getattr(ddp_model, "lazy_bucket_allocation", False):
        raise ValueError(
            "attach: model frees its buckets after every backward (lazy_bucket_allocation=True), and messages are "
            "bound to their memory; wrap the module without it"
        )
    if getattr(ddp_model, "_delay_all_reduce_params", ()):
        raise ValueError(
            "attach: model averages some parameters beside its buckets (delay_all_reduce_named_params), and does "
            "not wait for them; wrap the module without it"
        )


def refuse_foreign_hook(caller: str, ddp_model: Any) -> dict[str, Any]:
    """DDP's logging data, if no one else has registered a communication hook."""
    # not from its list of hooks, which lacks the built-in ones
    logged: dict[str, Any] = ddp_model._get_ddp_logging_data()
    if logged.get("comm_hook") and comm_hook(ddp_model) is None:
        raise ValueError(f"{caller}: model has a communication hook already; DDP can have one")
    return logged


def fitting(
    caller: str, ddp_model: DistributedDataParallel, request: Request, parameters: Mapping[str, torch.nn.Parameter]
) -> tuple[Plan, str]:
    """The plan of a request for DDP's buckets, and a summary. A plan that compresses nothing leaves sparse gradients to
    DDP, all others refuse them."""
    plan, summary = request.checked(parameters)
    if merged := [unit.key for unit in plan.units if unit.also]:
        raise PlanError(
            f"plan merges parameters, which DDP's buckets may part; bare modules can have them: {', '.join(merged)}"
        )
    if plan.compresses:
        refuse_sparse_parameters(caller, ddp_model.module, parameters)
    return plan, f"{summary}, sparse gradients of {sparse_parameter(ddp_model.module, parameters) or 'no parameter'}"
