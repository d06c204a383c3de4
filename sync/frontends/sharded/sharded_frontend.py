"""The front end of models that FSDP2 averages over replicas: ``fully_shard`` over a mesh of two dimensions, and
``replicate``.

FSDP reduces the gradients of a group of parameters to shards, and then averages the shards over the replicas.
:class:`ShardedFrontend` takes the place of the process group of that average: the shards of a group are a bucket, which
the runtime averages over the replicas. Everything else of FSDP is as it was.

A plan names whole parameters, so it is the same on all ranks. The runtime of a rank executes it for the shards that the
rank has. Residuals are those of shards.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Variable

from ...engine.bucket_messages import BucketMessages
from ...engine.failures import FailedBucket
from ...engine.runtime import Runtime
from ...plans.grouping import PlacedUnit
from ...plans.plan import Frontend, Plan
from ..checks.hooks import weakly
from ..frontend import ModelFrontend
from ..request import Request
from .replica_group import ReplicaGroup
from .shard_groups import Shard, shard_groups
from .shard_groups import is_replicated as is_replicated
from .sharded_checks import checked_plan, fitting

_AFTER = -1  # autograd's number of no backward, while FSDP reduces the last groups at its end


@dataclass
class _Bucket:
    """The shards of a group on their way.

    Attributes:
        shards: the shards.
        buffer: the vector in which they lie.
        messages: the messages that send it.
    """

    shards: tuple[Shard, ...]
    buffer: torch.Tensor
    messages: BucketMessages


class ShardedFrontend(ModelFrontend):
    """The groups of parameters of a model whose shards are averaged over replicas. Construction is collective.

    Args:
        model: the model, which is not kept.
        plan: the plan that runs first, which all ranks have agreed on.
        request: the settings of the attachment.
    """

    kind = Frontend.FSDP
    checked_plan = staticmethod(checked_plan)

    @staticmethod
    def groups(model: torch.nn.Module, _: object, /) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        group = shard_groups(model)[0]
        everyone, ranks = dist.distributed_c10d._get_default_group(), group.mesh.mesh.flatten().tolist()
        if len(ranks) < everyone.size():
            everyone = dist.new_group(ranks, use_local_synchronization=True)
        return group.replicas, everyone

    def __init__(self, model: torch.nn.Module, plan: Plan, request: Request) -> None:
        super().__init__(model, plan, request)
        self._model = weakref.ref(model)
        self._groups = shard_groups(model)
        self._buckets: dict[int, _Bucket] = {}  # by the number of the group
        self._memory: dict[torch.dtype, torch.Tensor] = {}
        self._backward: int | None = None  # the one that runs, as autograd numbers them
        self._sent = 0  # buckets in it
        self._delivers: set[str] = set()  # parameters of which plans have left something behind
        self._take(self.new_runtime(plan))
        self.averaged_nbytes = sum(group.shards_nbytes() for group in self._groups)

    def register(self) -> list[torch.nn.Module]:
        model, weak = self._model(), weakref.ref(self)
        assert model is not None
        for index, group in enumerate(self._groups):
            group.replicas = ReplicaGroup(group.replicas, _average(weak, index))
        return [model]

    def unregister(self) -> None:
        for group in self._groups:
            group.restore_replicas()

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        return {name: each for group in self._groups for name, each in group.parameters().items()}

    def sent_parameters(self) -> dict[str, torch.nn.Parameter]:
        """The parameters that are not frozen."""
        return {name: each for name, each in self.parameters().items() if each.requires_grad}

    def numels(self) -> dict[str, int]:
        return {name: shape.numel() for name, shape in self._shapes().items()}

    def deliver_to(self, names: Iterable[str]) -> None:
        self._delivers.update(names)

    def _shapes(self) -> dict[str, torch.Size]:
        """The shapes of the shards of this rank, by the name of their parameter."""
        return {name: shape for group in self._groups for name, shape in group.shapes().items()}

    # ---------------------------------------------------------------- changes of the plan

    def checked(self, request: Request) -> tuple[Plan, list[str]]:
        return fitting(request, self.parameters())

    def common(self, plan: Plan) -> Plan:
        return _with_shapes(plan, {name: each.shape for name, each in self.parameters().items()})

    def new_runtime(self, plan: Plan) -> Runtime:
        local = _with_shapes(plan, self._shapes())
        runtime = self.request.runtime(local, self.parameters(), synchronises=plan.compresses)
        runtime.common_plan = plan
        return runtime

    def prepared(self, runtime: Runtime) -> Callable[[], None]:
        runtime.follow(self.runtime)
        buckets = {index: self._bound(runtime, index, each.buffer) for index, each in self._buckets.items()}
        if runtime.synchronises:
            for each in buckets.values():
                each.messages.now()

        def install() -> None:
            self._take(runtime)
            self._buckets = buckets

        return install

    def _take(self, runtime: Runtime) -> None:
        """Let a runtime execute its plan."""
        self.runtime, self._buckets = runtime, {}

    def _bound(self, runtime: Runtime, index: int, buffer: torch.Tensor) -> _Bucket:
        """The shards of a group in a buffer, with their messages."""
        units, shards = {unit.parameter: unit for unit in runtime.plan.units}, tuple(self._groups[index].shards())
        placed = [PlacedUnit(units[shard.name], shard.start) for shard in shards]
        return _Bucket(shards, buffer, BucketMessages(runtime, buffer, placed))

    # ---------------------------------------------------------------- steps

    def average(self, index: int, vector: torch.Tensor, operation: Any) -> bool:
        """Give the shards of a group their means over the replicas, or their sums.

        Returns:
            ``False`` if the replicas shall do so themselves, because the plan compresses nothing, or some parameters of
            the group have no gradient.
        """
        runtime, task = self.runtime, torch._C._current_graph_task_id()
        if self._backward is None or task not in (self._backward, _AFTER):  # an earlier one may have been given up
            self._backward, self._sent = task, 0
            runtime.unused.begin()
            Variable._execution_engine.queue_callback(weakly(self._end_step))
        if (problem := runtime.problem) is not None:
            raise problem
        shards = tuple(self._groups[index].shards())
        if vector.numel() != sum(shard.row for shard in shards):
            return False
        self._deliver(shards, vector)
        if not runtime.synchronises or operation not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
            return False
        buffer = self._buffer(vector)
        bucket = self._buckets.get(index)
        if bucket is None or bucket.shards != shards or bucket.buffer.dtype != buffer.dtype:
            bucket = self._buckets[index] = self._bound(runtime, index, buffer)
        bucket.buffer.copy_(vector)
        sent = runtime.submit(bucket.messages.now(), bucket.buffer, first=not self._sent)
        self._sent += 1
        runtime.release()
        if isinstance(outcome := sent.wait(), FailedBucket):
            raise outcome.error
        if operation == dist.ReduceOp.SUM:
            torch.mul(bucket.buffer, runtime.world_size, out=vector)
        else:
            vector.copy_(bucket.buffer)
        return True

    def _deliver(self, shards: Iterable[Shard], vector: torch.Tensor) -> None:
        """Add what plans have left behind to the shards in a vector."""
        for shard in shards:
            if shard.name in self._delivers:
                gradient = vector[shard.start : shard.start + shard.numel]
                holder = torch.empty_like(gradient)
                holder.grad = gradient
                self.calls.deliver(shard.name, holder)

    def _buffer(self, vector: torch.Tensor) -> torch.Tensor:
        """Memory for a vector, which all groups share: the average of one has ended when that of the next begins."""
        if vector.dtype not in self._memory:
            largest = max(sum(group.rows()) for group in self._groups)
            self._memory[vector.dtype] = torch.zeros(largest, dtype=vector.dtype, device=vector.device)
        return self._memory[vector.dtype][: vector.numel()]

    @torch.no_grad()
    def _end_step(self) -> None:
        self._backward = None
        if any(group.is_in_backward for group in self._groups):
            raise RuntimeError(
                "gckernels: a part of backward has ended before the whole, as activation checkpointing with "
                "use_reentrant=True does; use use_reentrant=False"
            )
        if self.runtime.synchronises:
            self.runtime.end_step()
        else:
            self.runtime.step += 1
        self.calls.end_step(True)

    @property
    def can_be_traced(self) -> bool:
        return False  # FSDP reduces gradients as soon as they are there

    @property
    def averages_now(self) -> bool:
        return any(group.averages_now for group in self._groups)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context in which gradients are accumulated without being reduced; the first backward outside reduces the
        sum."""
        model: Any = self._model()
        before = self.averages_now
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(before)


def _with_shapes(plan: Plan, shapes: Mapping[str, torch.Size]) -> Plan:
    """The plan for parameters of other shapes; a parameter that is not among them keeps its own."""
    units = (
        replace(unit, numel=shape.numel(), compressor=unit.compressor.fit(tuple(shape)))
        if (shape := shapes.get(unit.parameter)) is not None
        else unit
        for unit in plan.units
    )
    return replace(plan, units=tuple(units), prediction=None)


def _average(weak: weakref.ref[ShardedFrontend], index: int) -> Callable[[torch.Tensor, Any], bool]:
    def average(vector: torch.Tensor, operation: Any) -> bool:
        frontend = weak()
        return frontend is not None and frontend.is_open and frontend.average(index, vector, operation)

    return average
