"""The front end of models that FSDP2 shards over all ranks.

:class:`FullyShardedFrontend` takes the place of FSDP's reduce-scatter of each group of parameters. FSDP copies the
gradients of a group into rows, one for each rank, with the shards that the rank will have; the runtime encodes the rows
and sends each to its rank, which decodes the mean. Residuals are of whole parameters.

On the host the result of a group is awaited when backward ends, or its memory is needed for another one, if FSDP does
nothing with it before. Where it does, the result is awaited at once. On a device, streams wait, and not the host.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Work

from gckernels.codec import GRAD_DTYPES, Codec
from gckernels.ops import Identity

from ...communication.agreement import named
from ...engine.runtime import Runtime
from ...messages.gathers import GatheredParameter
from ...messages.shards import add_to_rows
from ...plans.arguments import sends_differences
from ...plans.builders import exempt_vectors
from ...plans.grouping import PlacedUnit
from ...plans.plan import Frontend, Plan, PlanError, UnitPlan
from ...programs.named import default_program, exact_program
from ...programs.spans import SHARD_OF_LEVELS
from ...programs.topology import Topology
from ...states.parts import ModelPart
from ..abilities import Before
from ..checks.hooks import weakly
from ..request import Request
from .gathers import Gathers
from .machine_levels import MachineLevels
from .shard_groups import Shard, ShardGroup
from .sharded_frontend import ShardBucket, ShardedFrontend
from .stand_ins import ShardComm, factor_of


class FullyShardedFrontend(ShardedFrontend):
    """The groups of parameters of a model whose shards are on all ranks. Construction is collective."""

    kind = Frontend.FSDP
    _levels: MachineLevels | None = None
    _gathers: Gathers | None = None
    _gathered_by: Codec | None = None

    def __init__(self, model: torch.nn.Module, plan: Plan, request: Request) -> None:
        if plan.span == SHARD_OF_LEVELS:
            assert plan.topology is not None
            self._levels = MachineLevels(plan.topology, request.group)
        super().__init__(model, plan, request)
        parts = self.numels()
        self.averaged_nbytes = sum(parts[name] * each.element_size() for name, each in self.parameters().items())
        self._gathered_nbytes = 0.0
        if dist.get_world_size(self.request.group) > 1 and (
            self.device.type == "cpu" or plan.weights or request.weights
        ):
            try:
                self._gathers = Gathers(self.request.group, self.device, self._groups)
            except BaseException:
                self.runtime.close()
                raise
            self._encode_gathers()

    def register(self) -> list[torch.nn.Module]:
        modules: list[Any] = super().register()
        self._on_load = modules[0].register_load_state_dict_post_hook(weakly(self._loaded))
        return modules

    def _stand_in(self, index: int, group: ShardGroup) -> None:
        reduce, gather, names = weakly(self.reduce), weakly(self.gather), [*group.parameters()]

        def reduced(call: Callable[[], Any], given: Mapping[str, Any]) -> Any:
            if reduce(index, given["output_tensor"], given["input_tensor"], given["op"]):
                return None
            with named(given["group"], "FSDP's own reduction", names):
                return call()

        def gathered(call: Callable[[], Any], given: Mapping[str, Any]) -> Any:
            return call() if (work := gather(index, given["output_tensor"])) is None else work

        room, gather_room = (functools.partial(weakly(each), index) for each in (self.room, self.gather_room))
        group.reduce_scatter = ShardComm(group.reduce_scatter, reduced, room)
        group.all_gather = ShardComm(group.all_gather, gathered, gather_room)

    def unregister(self) -> None:
        super().unregister()
        self._on_load.remove()

    def _loaded(self, *_: object) -> None:
        if self._gathers is not None:
            self._gathers.forget()

    def close(self) -> None:
        super().close()
        if self._gathers is not None:
            self._gathers.close()

    def _fail(self, error: RuntimeError) -> None:
        super()._fail(error)
        if self._gathers is not None:
            self._gathers.fail(error)

    @property
    def _rows_of_bucket(self) -> int:
        return dist.get_world_size(self.request.group)

    def _rows(self) -> dict[str, int]:
        """The elements that each parameter takes in a row."""
        return {
            name: row for group in self._groups for name, row in zip(group.parameters(), group.rows(), strict=False)
        }

    def numels(self) -> dict[str, int]:
        whole = {name: each.numel() for name, each in self.parameters().items()}
        if (levels := self._levels) is None:
            return whole
        return {name: levels.numel(whole[name], row) for name, row in self._rows().items()}

    def new_runtime(self, plan: Plan) -> Runtime:
        if (levels := self._levels) is None:
            return self.request.runtime(plan, self.parameters(), synchronises=plan.sends)
        local = _on_ranks(plan, self.numels(), None)
        between = replace(self.request, group=levels.between)
        runtime = between.runtime(local, self.parameters(), synchronises=plan.sends)
        runtime.common_plan = plan
        runtime.part = ModelPart(levels.device, levels.topology.devices, rows=self._rows())
        return runtime

    def common(self, plan: Plan) -> Plan:
        if (levels := self._levels) is None:
            return plan
        return _on_ranks(plan, {name: each.numel() for name, each in self.parameters().items()}, levels.topology)

    def checked(self, request: Request) -> tuple[Plan, list[str]]:
        plan, lines = super().checked(request)
        topology = None if self._levels is None else self._levels.topology
        if plan.span != Frontend.FSDP.span(topology) and any(not unit.in_place for unit in plan.units):
            raise PlanError(f"plan is for {plan.topology}, and the model was attached with one for {topology}")
        if plan.weights is not None and self._gathers is None and self._rows_of_bucket > 1:
            raise PlanError("plan encodes parameters, for which weights must be given to attach")
        return plan, lines

    def _take(self, runtime: Runtime, buckets: Mapping[int, ShardBucket]) -> None:
        super()._take(runtime, buckets)
        self._encode_gathers()

    def _encode_gathers(self) -> None:
        """Let parameters be gathered from now on as the plan says. All ranks call it between the same two gathers."""
        codec = self.plan.weights
        if self._gathers is None or codec == self._gathered_by:
            return
        assert codec is None or isinstance(codec, Codec)
        self._gathered_by = codec
        keeps_copy = codec is not None and sends_differences(codec)
        self._gathers.encode([_encoded(group, codec) for group in self._groups], keeps_copy)

    def _placed(self, plan: UnitPlan, shard: Shard) -> PlacedUnit:
        return PlacedUnit(plan.sent_to_shards(), shard.start, shard.row)

    # ---------------------------------------------------------------- steps

    def room(self, index: int, numel: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Memory for the gradients of a group; ``None`` if FSDP reduces them itself, or some have none."""
        runtime = self.runtime
        if not (self.is_open and runtime.synchronises) or runtime.is_exact or not self._fits(index, numel, dtype):
            return None
        return self._buffer_of(index).rows(numel, dtype)

    def gather_room(self, index: int, numel: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Memory for all parameters of a group; ``None`` if FSDP gathers them itself.

        It does so unless they are to be encoded, or gradients are sent by the runtime on the host, where gathers then
        run beside the computation."""
        gathers = self._gathers
        overlaps = self.runtime.synchronises and self.device.type == "cpu"
        if gathers is None or not self.is_open or not (self.plan.weights or overlaps):
            return None
        return gathers.room(index, numel, dtype)

    def gather(self, index: int, output: torch.Tensor) -> Work | None:
        """Begin to gather the parameters of a group; ``None`` if FSDP shall do so."""
        if self._gathers is None:
            return None
        return self._gathers.gather(index, output, functools.partial(weakly(self._check), self._announced))

    def reduce(self, index: int, output: torch.Tensor, vector: torch.Tensor, operation: Any) -> bool:
        """Give ``output`` the shards of this rank in the mean of a group, or FSDP's multiple of it.

        Returns:
            ``False`` if FSDP shall do so itself, because nothing of the group is compressed or can be, or some of its
            parameters have no gradient.
        """
        if not self.is_open:
            return False
        buffer = self._buffer_of(index)
        with buffer.filled(vector):
            runtime, sends = self._begun(index), buffer.holds(vector)
            self._announce(index)
            if not sends:
                self._check()
                if not self._fits(index, vector.numel(), vector.dtype):
                    return False
            rows, copies = self._own_rows(vector, sends)
            if self._delivers or runtime.is_draining:
                units = self._units(runtime, index)
                self._deliver(units, rows, copies)
                runtime.add_unsent(rows, units, copies)
            if not sends:
                return False
            factor = factor_of(operation, self._rows_of_bucket)
            self._send(index, rows, functools.partial(torch.mul, rows[runtime.rank], factor, out=output))
        self._finish(index, output)
        return True

    def _own_rows(self, vector: torch.Tensor, sends: bool) -> tuple[torch.Tensor, int]:
        """The rows that the runtime sends, and the number of ranks over whose means of these rows FSDP takes another
        mean.

        Args:
            vector: the rows of all ranks.
            sends: whether the runtime sends them now; otherwise FSDP does.
        """
        if (levels := self._levels) is None:
            return vector.view(self.runtime.world_size, -1), 1
        return (levels.reduce(vector), 1) if sends else (levels.own_rows(vector), levels.topology.devices)

    def _deliver(self, units: Sequence[PlacedUnit], rows: torch.Tensor, copies: int) -> None:
        """Add what plans have left behind to the gradients of a group, times ``copies``."""
        for unit in units:
            if unit.plan.parameter in self._delivers:
                holder = torch.empty(unit.plan.numel, dtype=torch.float32, device=rows.device)
                holder.grad = torch.zeros_like(holder)
                self.calls.deliver(unit.plan.parameter, holder)
                add_to_rows(unit, holder.grad, rows, copies)

    @torch.no_grad()
    def _end_step(self) -> None:
        if self._gathers is not None:
            self._gathered_nbytes = self._gathers.end_step()
        super()._end_step()

    @property
    def traceable(self) -> FullyShardedFrontend:
        return self

    @property
    def groups_to_trace(self) -> Sequence[ShardGroup]:
        return self._groups

    def launch_late(self, before: Before | None) -> None:
        pass  # a recording lets FSDP send one group after the other

    def gather_stats(self) -> dict[str, float]:
        copied = 0 if self._gathers is None else self._gathers.copied_nbytes()
        found = {"gathered_nbytes": self._gathered_nbytes, "copied_nbytes": float(copied)}
        return {name: value for name, value in found.items() if value}


def _on_ranks(plan: Plan, numels: Mapping[str, int], topology: Topology | None) -> Plan:
    """The plan for parameters with other numbers of elements, on ranks with another topology."""
    span = Frontend.FSDP.span(topology)
    programs = exact_program(span), default_program(Identity(), 1, span)
    units = (
        replace(unit, numel=numels.get(unit.parameter, unit.numel), program=programs[not unit.in_place])
        for unit in plan.units
    )
    return replace(plan, units=tuple(units), topology=topology, prediction=None)


def _encoded(group: ShardGroup, codec: Codec | None) -> list[GatheredParameter]:
    """The parameters of a group as they are gathered; none if they are sent as they are."""
    if codec is None or group.gathered_in not in GRAD_DTYPES:
        return []
    starts = accumulate(group.rows(), initial=0)
    return [
        GatheredParameter(name, start, row, Identity() if exempt_vectors(name, parameter) else codec)
        for (name, parameter), start, row in zip(group.parameters().items(), starts, group.rows(), strict=False)
    ]
