"""The parameters of a model that is trained by several ranks of a site, and whose updates are averaged between sites.

Inside a site DistributedDataParallel may average gradients, or ``fully_shard`` may shard the parameters. Then each rank
averages its shards with the ranks of other sites that have the same ones.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.nn.parameter import is_lazy

from ...plans.arguments import plain_name
from ..module.module_checks import averaged_of


def _dtensor() -> Any:
    """The class ``DTensor`` if it has been imported, which takes half a second; otherwise no class."""
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())


def values_of(parameter: torch.Tensor) -> torch.Tensor:
    """The values that this rank has of a parameter, without gradient: its shard, or all of it."""
    shard = cast(Any, parameter).to_local() if isinstance(parameter, _dtensor()) else parameter
    return cast(torch.Tensor, shard).detach()


def own_parameters(model: torch.nn.Module, left_out: Collection[str]) -> dict[str, torch.nn.Parameter]:
    """The parameters that can have a gradient, of which this rank has elements, and that are not left out, by their
    plain names."""
    return with_elements(averaged_of(model, left_out))


def without_elements(model: object) -> frozenset[str]:
    """The plain names of the parameters of a model of which this rank has no elements, and which are never sent."""
    named = model.named_parameters() if isinstance(model, torch.nn.Module) else ()
    return frozenset(plain_name(name) for name, each in named if not is_lazy(each) and not values_of(each).numel())


def with_elements(parameters: Mapping[str, torch.nn.Parameter]) -> dict[str, torch.nn.Parameter]:
    """The parameters of which this rank has elements."""
    return {name: each for name, each in parameters.items() if values_of(each).numel()}


def reshard(modules: Iterable[torch.nn.Module]) -> None:
    """Let FSDP2 gather the parameters of some modules, and of those inside, anew, because their shards have changed."""
    kind: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    for each in {inner for module in modules for inner in module.modules() if isinstance(inner, kind)}:
        each.reshard()


def shard_lines(
    caller: str,
    parameters: Mapping[str, torch.nn.Parameter],
    process_group: dist.ProcessGroup,
    has_replicas: bool = False,
) -> list[str]:
    """Texts about the shards of parameters, which must be the same on all ranks that average their updates.

    Args:
        caller: the function that was called, for errors.
        parameters: the parameters, by name.
        process_group: the ranks.
        has_replicas: whether these may be replicas of the same shards, because FSDP averages nothing over them.

    Raises:
        ValueError: some of these ranks have other shards than this one.
    """
    ranks, lines = set(dist.get_process_group_ranks(process_group)), set()
    for name, parameter in parameters.items():
        if not isinstance(parameter, _dtensor()):
            continue
        mesh, placements = cast(Any, parameter).device_mesh, cast(Any, parameter).placements
        own = mesh.get_coordinate()
        sharding = [dim for dim, each in enumerate(placements) if not each.is_replicate()]
        replicas = mesh.mesh[tuple(own[dim] if dim in sharding else slice(None) for dim in range(mesh.ndim))]
        allowed = set(replicas.flatten().tolist()) if has_replicas else {dist.get_rank()}
        if shared := sorted(ranks.intersection(mesh.mesh.flatten().tolist()) - allowed):
            raise ValueError(
                f"{caller}: process_group must have one rank of each site, which have the same shards, but {name} is "
                f"sharded over rank {shared[0]} as well, which is in process_group"
            )
        lines.add("shard " + ", ".join(f"{own[dim]} of {mesh.shape[dim]}, {placements[dim]}" for dim in sharding))
    return sorted(lines)
