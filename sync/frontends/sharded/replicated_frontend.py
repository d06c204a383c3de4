"""The front end of models that FSDP2 averages over replicas: ``fully_shard`` over a mesh of two dimensions, and
``replicate``.

FSDP reduces the gradients of a group of parameters to shards, and then averages the shards over the replicas.
:class:`ReplicatedFrontend` takes the place of the process group of that average: the shards of a group are a bucket,
which the runtime averages over the replicas. The runtime of a rank executes the plan for the shards that the rank has.
Residuals are those of shards.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from ...engine.runtime import Runtime
from ...plans.grouping import PlacedUnit
from ...plans.plan import Frontend, Plan, UnitPlan
from ...states.parts import ModelPart
from ..checks.hooks import weakly
from ..request import Request
from .shard_groups import Shard, ShardGroup
from .sharded_frontend import ShardedFrontend
from .stand_ins import ReplicaGroup


class ReplicatedFrontend(ShardedFrontend):
    """The groups of parameters of a model whose shards are averaged over replicas. Construction is collective.

    Its steps are not recorded, because trials do not measure what the ranks of a machine send one another.
    """

    kind = Frontend.HSDP

    def __init__(self, model: torch.nn.Module, plan: Plan, request: Request) -> None:
        super().__init__(model, plan, request)
        self.averaged_nbytes = sum(group.shards_nbytes() for group in self._groups)

    def _stand_in(self, index: int, group: ShardGroup) -> None:
        group.replicas = ReplicaGroup(group.replicas, functools.partial(weakly(self.average), index))

    @property
    def _rows_of_bucket(self) -> int:
        return 1

    def numels(self) -> dict[str, int]:
        return {name: shape.numel() for name, shape in self._shapes().items()}

    def _shapes(self) -> dict[str, torch.Size]:
        """The shapes of the shards of this rank, by the name of their parameter."""
        return {name: shape for group in self._groups for name, shape in group.shapes().items()}

    def common(self, plan: Plan) -> Plan:
        return plan.with_shapes({name: each.shape for name, each in self.parameters().items()})

    def new_runtime(self, plan: Plan) -> Runtime:
        local = plan.with_shapes(self._shapes())
        runtime = self.request.runtime(local, self.parameters(), synchronises=plan.sends)
        runtime.common_plan = plan
        if (shards := self._groups[0].shard_of()) is not None:
            is_dim0 = all(group.is_dim0 for group in self._groups)
            starts = {name: start for group in self._groups for name, start in group.starts().items()}
            runtime.part = ModelPart(*shards, starts if is_dim0 else None)
        return runtime

    def _placed(self, plan: UnitPlan, shard: Shard) -> PlacedUnit:
        return PlacedUnit(plan, shard.start)

    def average(self, index: int, vector: torch.Tensor, operation: Any) -> bool:
        """Give the shards of a group their means over the replicas, or their sums.

        Returns:
            ``False`` if the replicas shall do so themselves, because nothing of the group is compressed or can be, or
            some of its parameters have no gradient.
        """
        if not self.is_open:
            return False
        runtime, shards = self._begun(index), self._groups[index].shards()
        self._announce(index)
        if not self._fits(index, vector.numel(), vector.dtype):
            self._check()
            return False
        self._deliver(shards, vector)
        if not runtime.synchronises or operation not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
            return False
        gradients = self._buffer_of(index).rows(vector.numel(), vector.dtype)
        gradients.copy_(vector)
        factor = runtime.world_size if operation == dist.ReduceOp.SUM else 1
        self._send(index, gradients, functools.partial(torch.mul, gradients, factor, out=vector))
        self._finish(index, vector)
        return True

    def _deliver(self, shards: Iterable[Shard], vector: torch.Tensor) -> None:
        """Add what plans have left behind to the shards in a vector."""
        for shard in shards:
            if shard.name in self._delivers:
                gradient = vector[shard.start : shard.start + shard.numel]
                holder = torch.empty_like(gradient)
                holder.grad = gradient
                self.calls.deliver(shard.name, holder)
