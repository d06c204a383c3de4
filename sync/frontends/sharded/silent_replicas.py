"""Replicas of FSDP2 that average nothing, because their updates are averaged in place of their gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from .shard_groups import ShardGroup, all_groups
from .stand_ins import ReplicaGroup, factor_of


class SilentReplicas:
    """The silence between the replicas of a model of ``fully_shard`` or ``replicate``, which is not kept.

    FSDP reduces gradients to shards as before. Its average over the replicas is replaced by what that would be if all
    of them had the gradients of this one. So gradients have the same factors as before, however FSDP is told to divide.
    """

    averages = None

    def __init__(self, model: torch.nn.Module) -> None:
        self._groups = [each for each in all_groups(model) if each.is_replicated]
        self.group = _own_group(self._groups[0])

    def check(self, caller: str) -> None:
        own = dist.get_process_group_ranks(self.group)
        for each in self._groups:
            if (ranks := dist.get_process_group_ranks(_own_group(each))) != own:
                raise ValueError(
                    f"{caller}: parameter {each.names[0]} has replicas on ranks {ranks}, and others have theirs on "
                    f"{own}; updates are averaged over the same ranks for all parameters"
                )

    def begin(self) -> None:
        for each in self._groups:
            each.replicas = ReplicaGroup(each.replicas, self._keep)

    def end(self) -> None:
        for each in self._groups:
            each.restore()

    def _keep(self, vector: torch.Tensor, operation: Any) -> bool:
        if (factor := factor_of(operation, dist.get_world_size(self.group))) != 1:
            vector.mul_(factor)
        return True


def _own_group(group: ShardGroup) -> dist.ProcessGroup:
    """FSDP's own group of replicas, in whose place another one may be."""
    found: dist.ProcessGroup = getattr(group.replicas, "inner", group.replicas)
    return found
