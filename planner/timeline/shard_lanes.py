"""Collectives that FSDP2 begins itself, beside the messages of a plan, on virtual lanes.

FSDP gathers the parameters of a group before they are used, in forward and again in backward, and reduces its gradients
to shards. On a device it begins these collectives and goes on. On hosts it waits for each of them at once, and the
reduction of Gloo is an all-reduce, which sends twice as many bytes. An attachment to a model whose shards are on all
ranks gathers on lanes of its own, and awaits the parameters when they are used.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from gckernels.codec import Codec
from gckernels.sync.plans.arguments import sends_differences
from gckernels.sync.plans.plan import Plan
from gckernels.sync.programs.spans import MEAN
from gckernels.sync.programs.steps import Place
from gckernels.sync.traces.model_trace import ModelTrace
from gckernels.sync.traces.traced_tensors import TracedGather, TracedTensor

from ..machines.machine import MachineError, Sharding, Shared
from .priced_stages import PricedStage, need_of
from .pricing import Pricer
from .simulator import Need
from .virtual_lanes import VirtualLanes


class GatherTasks(NamedTuple):
    """A gather that is sent."""

    names: tuple[str, ...]  # the parameters
    first: int  # first, last: the numbers of its first and its last task
    last: int


class ShardLanes:
    """The lanes of FSDP's own collectives in one step.

    Args:
        sharding: the shards.
        lanes: the lanes of the step.
        pricer: the prices.

    Attributes:
        blocks: whether FSDP waits for its own collectives at once.
        gathers: the gathers that have been sent.
    """

    def __init__(
        self,
        sharding: Sharding,
        lanes: VirtualLanes[PricedStage],
        trace: ModelTrace,
        pricer: Pricer,
        plan: Plan,
    ) -> None:
        self._sharding, self._lanes, self._pricer, self._machine = sharding, lanes, pricer, pricer.machine
        self._tensors = trace.by_name
        assert plan.weights is None or isinstance(plan.weights, Codec)
        self._weights = plan.weights
        self._ranks = sharding.inside or self._machine.topology.world_size
        self.blocks = self._machine.computes_on == Shared.CORES
        overlaps = sharding.inside is None and self.blocks and plan.compresses
        self._gathers_on_lanes = overlaps or self._weights is not None
        self._reduces = sharding.span == MEAN or not plan.compresses
        self.gathers: list[GatherTasks] = []
        self._on_way: dict[TracedGather, int] = {}
        self._known: set[tuple[str, ...]] = set()  # parameters whose copy is up to date

    def wait_for(self, tokens: Sequence[int]) -> None:
        """Let the training wait for work."""
        self._lanes.wait_for([self._lanes.here(), *tokens])

    def reduce(self, nbytes: float) -> tuple[int, ...]:
        """Let FSDP reduce a group with ``nbytes`` bytes on this rank, if it does so itself, and return tokens of the
        end. There is none if the training has waited for it."""
        if not self._reduces:
            return ()
        nbytes *= self._sharding.inside or 1
        token = self._lanes.elsewhere("reduce", self._reduction(nbytes), (self._lanes.here(),))
        if not self.blocks:
            return (token,)
        self.wait_for([token])
        return ()

    def ask(self, gather: TracedGather) -> None:
        """Let FSDP ask for parameters."""
        tensors, weights, lanes = self._tensors_of(gather), self._weights, self._lanes
        numel = sum(tensor.numel for tensor in tensors)
        if self._ranks == 1 or not numel:
            return
        differs = weights is not None and sends_differences(weights)
        if differs and gather.names in self._known:
            lanes.compute(self._copied_s(numel))  # nothing has changed since forward
            return
        self._known.add(gather.names)
        if weights is None:
            needs = {
                "gather": self._need("AllGather", 1, numel * tensors[0].dtype.itemsize * (self._sharding.inside or 1))
            }
        else:
            stages = self._pricer.gather(tensors, weights)
            needs = {f"{stage.spec.name} of parameters": stage.need for stage in stages}
        if differs:
            needs["copy of parameters"] = Need(0.0, self._copied_s(numel), {self._machine.computes_on: 1.0})
        after: tuple[int, ...] = (lanes.here(),)
        first = len(lanes.tasks)
        for lane, need in needs.items():
            after = (lanes.elsewhere(lane, need, after),)
        self.gathers.append(GatherTasks(gather.names, first, after[0]))
        self._on_way[gather] = after[0]
        if not self._gathers_on_lanes and self.blocks:
            self.wait(gather)

    def wait(self, gather: TracedGather) -> None:
        """Let the training wait for parameters."""
        if (token := self._on_way.pop(gather, None)) is not None:
            self.wait_for([token])

    def _tensors_of(self, gather: TracedGather) -> list[TracedTensor]:
        """The parameters of a gather; the frozen ones as one."""
        tensors = [self._tensors[name] for name in gather.names]
        if gather.frozen_numel:
            dtype = tensors[0].dtype if tensors else next(iter(self._tensors.values())).dtype
            tensors.append(TracedTensor("frozen", gather.frozen_numel, 0.0, dtype=dtype))
        return tensors

    def _copied_s(self, numel: int) -> float:
        """The seconds in which parameters are copied, in fp32."""
        return float(self._machine.copy(self._machine.computes_on, np.array([4.0 * numel])).alone_s[0])

    def _reduction(self, nbytes: float) -> Need:
        """The needs of FSDP's own reduction of ``nbytes`` bytes. On hosts it sends as much as an all-reduce. If it was
        measured, and takes longer than that, it takes as long as it did."""
        if not self.blocks:
            return self._need("ReduceScatter", 1, nbytes)
        needs = [self._need("AllReduce", 2, nbytes)]
        with contextlib.suppress(MachineError):
            needs.append(self._need("ReduceScatter", 1, nbytes))
        return max(needs, key=lambda need: need.latency_s + need.loaded_s)

    def _need(self, step: str, passes: int, nbytes: float) -> Need:
        """The needs of a collective of the ranks that have the shards together, which sends ``nbytes`` bytes in each
        pass, less the own part."""
        if self._ranks == 1:
            return Need()
        sent = np.array([passes * nbytes * (self._ranks - 1) / self._ranks])
        return need_of(self._machine.collective(step, self._sharding.level, Place.DEVICE, sent))
