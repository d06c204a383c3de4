"""Checks of models of FSDP2, and of the plans that are attached to them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import torch

from gckernels.codec import GRAD_DTYPES

from ...plans.arguments import plain_name
from ...plans.plan import Plan, PlanError
from ...programs.named import REDUCE_SCATTER_OF_LEVELS, SHARDS_OF_LEVELS
from ...programs.spans import SHARD_OF_LEVELS
from ...programs.steps import describe
from ..checks.models import refuse_sparse_parameters, refuse_without_shape, refuse_without_values
from ..checks.optimizer_checks import refuse_steps_in_backward
from ..members import listed
from ..ownership import refuse_claimed
from ..request import Request
from .shard_groups import ShardGroup, shard_groups


def checked_plan(model: torch.nn.Module, request: Request) -> tuple[Plan, list[str]]:
    """The plan of a request for a model of FSDP2, and the texts that must be the same on all ranks."""
    request.options.refuse()
    groups = shard_groups(model)
    if not groups:
        raise ValueError("attach: model has no parameters that can have a gradient")
    parameters = {name: each for group in groups for name, each in group.parameters().items()}
    refuse_unusual_shards("attach", groups)
    if request.memory_budget_mb is not None:
        raise ValueError("attach: memory_budget_mb must be None for a model of fully_shard or replicate")
    if request.grad_scaler is not None or request.can_discard:
        raise ValueError(
            "attach: grad_scaler and can_discard must be None and False for a model of fully_shard or replicate"
        )
    left = [
        name for name, each in model.named_parameters() if each.requires_grad and plain_name(name) not in parameters
    ]
    if left:
        warnings.warn(
            f"gckernels: parameter {left[0]}"
            + (f" and {len(left) - 1} more are" if left[1:] else " is")
            + " in no group of FSDP, or in one with another mesh than the first; without compression, as before",
            stacklevel=2,
        )
    refuse_without_shape("attach", parameters)
    refuse_without_values("attach", parameters)
    refuse_sparse_parameters("attach", model, parameters)
    refuse_steps_in_backward("attach", parameters)
    refuse_claimed("attach", parameters)
    plan, texts = fitting(request, parameters)
    _warn_of_dtypes(groups, plan)
    return plan, texts


def _warn_of_dtypes(groups: Sequence[ShardGroup], plan: Plan) -> None:
    """Warn of parameters for which a plan is in vain, as FSDP sends them in a dtype that no compressor takes."""
    planned = {unit.parameter for unit in plan.units if not unit.in_place}
    for group in groups:
        names = sorted(planned.intersection(group.names))
        if names and group.reduced_in not in GRAD_DTYPES:
            _warn("reduces gradients", group.reduced_in, names)
            break
    for group in groups if plan.weights is not None else ():
        if group.gathered_in not in GRAD_DTYPES:
            _warn("gathers parameters", group.gathered_in, group.names)
            break


def _warn(does: str, dtype: torch.dtype, names: Sequence[str]) -> None:
    has, take = (listed(str(each).removeprefix("torch.") for each in some) for some in ((dtype,), GRAD_DTYPES))
    warnings.warn(
        f"attach: FSDP {does} in {has}, and compressors take {take}; {names[0]}, and all others that are sent so, are "
        "left to FSDP as they are; see the mp_policy of fully_shard",
        stacklevel=2,
    )


def refuse_unusual_shards(caller: str, groups: Sequence[ShardGroup]) -> None:
    """Raise unless all groups have shards of a usual kind: along the first dimension, on the device, of parameters that
    were not distributed before."""
    if nested := [name for group in groups if group.nests for name in group.names]:
        raise TypeError(
            f"{caller}: parameter {nested[0]} was a DTensor before FSDP sharded it, as tensor parallelism makes it; "
            "that is not supported"
        )
    if offloaded := next((group for group in groups if group.offloads), None):
        raise ValueError(
            f"{caller}: parameter {offloaded.names[0]} is offloaded to the CPU, which is not supported; call "
            "fully_shard without an offload_policy"
        )
    if not groups[0].is_replicated and (group := next((each for each in groups if not each.is_dim0), None)):
        raise ValueError(
            f"{caller}: parameter {group.names[0]} or another of its group is sharded along a dimension that is not "
            "the first, which is not supported without replicas"
        )


def fitting(request: Request, parameters: Mapping[str, torch.nn.Parameter]) -> tuple[Plan, list[str]]:
    """The plan of a request for some parameters, and the texts that must be the same on all ranks."""
    plan, summary = request.checked(parameters)
    if parts := [unit.key for unit in plan.units if unit.also or unit.start is not None]:
        raise PlanError(
            f"plan has parts of parameters, or several as one, which FSDP's shards are not: {listed(parts)}"
        )
    served = (SHARDS_OF_LEVELS, REDUCE_SCATTER_OF_LEVELS)
    if plan.span == SHARD_OF_LEVELS and (other := [each for each in plan.units if each.program not in served]):
        raise PlanError(
            f"plan: {other[0].key}: between machines only the program {describe(SHARDS_OF_LEVELS)} is executed, got "
            f"{describe(other[0].program)}"
        )
    return plan, [summary, *plan.lines()]
