"""The measurement of some steps of a model, and the trace of them.

A recorder neither averages gradients nor makes a trace by itself. Its owner says when gradients will be averaged and
when a step has ended, measures errors where that may fail, and makes the trace when it suits. The owner is
:class:`~gckernels.sync.tracing.model_tracing.ModelTracing` in the backward of the last step, and
:mod:`gckernels.sync.tuning` between two steps.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gckernels.compressor import Compressor

from ..communication.collectives import on_any_rank
from ..frontends.ddp.averages import will_rebuild_buckets
from ..frontends.ddp.step_ends import in_join
from ..frontends.sharded.shard_groups import ShardGroup
from ..traces.model_trace import ModelTrace
from .combining import Averaged, RecordingRanks, combined, refuse_different, with_gathers
from .gradients import KeptGradients, digests
from .shard_watch import MarkedGather, ShardWatch
from .watch import Clock, ModelWatch, StepMarks, recording_clock

MAX_NUMEL = 1 << 16
"""The elements of a tensor on which errors are measured at most, because the training waits for it. Compressors in
blocks have the same error on more of them to about 2 %."""


class ModelTracer:
    """Measures some of the next steps of a model. Constructed on every rank between the same two steps.

    The model keeps what measures, and a recorder does not keep the model.

    Args:
        model: the DDP model, or a module.
        parameters: the parameters that are trained, by name.
        group: the ranks; ``None`` for a process alone.
        device: the device of the gradients.
        steps: the number of steps that are recorded.
        warmup: the number of steps before them. There are more if DDP has not rebuilt its buckets.
        max_numel: the number of elements of a tensor on which errors are measured at most.
        listener: called when a backward has ended, if nobody averages the gradients.
        groups: the groups of parameters of a model of FSDP2, whose gradients are kept when FSDP reduces them.

    Raises:
        ValueError: the model cannot be recorded.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        parameters: Mapping[str, torch.nn.Parameter],
        group: dist.ProcessGroup | None,
        device: torch.device,
        steps: int,
        warmup: int,
        max_numel: int = MAX_NUMEL,
        listener: Callable[[], None] | None = None,
        groups: Sequence[ShardGroup] = (),
    ) -> None:
        if isinstance(model, DistributedDataParallel):
            refuse_unrecordable(model)
        self._model, self._parameters = weakref.ref(model), dict(parameters)
        self._steps, self._warmup, self._averages = steps, warmup, listener is None
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        rank, ranks = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        self._ranks = RecordingRanks(group, ranks, device)
        self._kept = KeptGradients(self._parameters, rank, ranks, max_numel)
        self._groups, self._shards = groups, ShardWatch(groups, device, self._keep) if groups else None
        self._clock: Clock = recording_clock(device) if self._shards is None else self._shards.clock
        self._number = 0  # the number of the step since the beginning
        self._gathers: list[list[MarkedGather]] = []
        self._reduced: list[int] = []
        self._marks: list[StepMarks] = []
        self._averaged: list[Averaged] = []
        self._buckets: list[tuple[str, ...]] = []  # buckets of the step that is recorded, or else the last one
        self._watch = weakref.ref(ModelWatch(model, list(self._parameters.values()), self._clock, listener))
        self._is_recorded = self._is_next_recorded()

    @property
    def steps(self) -> int:
        """The number of steps that have been recorded."""
        return len(self._marks)

    @property
    def done(self) -> bool:
        """Whether all steps have been recorded, the same on all ranks."""
        return len(self._marks) >= self._steps

    def before_averaging(self, buckets: Sequence[Sequence[torch.Tensor]]) -> None:
        """Keep gradients that are averaged next.

        Args:
            buckets: the parameters of every bucket of them.
        """
        watch = self._watch()
        if watch is None or not self._is_recorded:
            return
        for bucket in buckets:
            # DDP also averages parameters that were frozen when the recording began
            self._buckets.append(tuple(self._names[id(each)] for each in bucket if id(each) in self._names))
            for parameter in bucket:
                if parameter.grad is not None and watch.is_used(parameter):
                    self._kept.keep(self._names[id(parameter)], parameter.grad)

    def _keep(self, name: str, gradient: torch.Tensor) -> None:
        if self._is_recorded:
            self._kept.keep(name, gradient)

    def end_step(self) -> bool:
        """Take the times of a step whose gradients have been averaged just now. A step of which some rank has not seen
        everything is not recorded. Collective if gradients are averaged.

        Returns:
            Whether all steps have been recorded.
        """
        watch = self._watch()
        self._number += 1
        if self._is_recorded:
            marks = None if watch is None else watch.marks
            averaged = None
            if watch is not None and self._averages and self._ranks.group is not None and not self._groups:
                used = [watch.is_used(parameter) for parameter in self._parameters.values()]
                averaged = Averaged(self._number, digests(self._parameters.values(), self._ranks.device), used)
            missed, (group, device) = marks is None, (self._ranks.group, self._ranks.device)
            if group is not None and self._averages:  # otherwise nobody waits for others
                (missed,) = on_any_rank(group, device, missed)
            if not missed and marks is not None:
                self._marks.append(marks)
                self._averaged += [] if averaged is None else [averaged]
                if self._shards is not None:
                    self._gathers.append([gather for gather in self._shards.gathers if gather.needed is not None])
                    self._reduced = self._shards.reduced
        if self._shards is not None:
            self._shards.end_step()
        self._warmup -= 1
        self._is_recorded = self._is_next_recorded()
        if self._is_recorded:
            self._buckets = []
        if watch is not None:
            watch.end_step()
        return self.done

    def close(self) -> None:
        """Remove all hooks; without effect if they are gone."""
        if (watch := self._watch()) is not None:
            watch.remove()
        if self._shards is not None:
            self._shards.remove()

    def errors(self, methods: Sequence[Compressor]) -> dict[str, tuple[float, dict[str, float]]]:
        """The norm, and the errors of the methods by their specs, of every tensor that this rank keeps."""
        return self._kept.measured(methods)

    def trace(
        self,
        errors: Mapping[str, tuple[float, Mapping[str, float]]],
        methods: Sequence[Compressor],
        name: str | None = None,
    ) -> ModelTrace | None:
        """The trace, the same on all ranks; ``None`` if the model is gone. Collective.

        Args:
            errors: what :meth:`errors` has returned on this rank.
            methods: the methods it was given.
            name: the name of the model; by default that of its class.

        Raises:
            RuntimeError: gradients were not the same on all ranks when they had been averaged. Every rank raises.
        """
        refuse_different(list(self._parameters), self._averaged, self._ranks)
        model = self._model()
        if model is None:
            return None
        ddp_model = model if isinstance(model, DistributedDataParallel) else None
        module = model if ddp_model is None else ddp_model.module
        kind = type(module).__name__  # FSDP2 gives a model a class of its own
        name = name or (kind.removeprefix("FSDP") if self._groups else kind)
        specs = [str(method) for method in methods]
        steps = [marks.step(self._clock) for marks in self._marks]
        held = sorted(each for bucket in self._buckets for each in bucket)
        buckets = tuple(self._buckets) if ddp_model is not None and held == sorted(self._parameters) else ()
        found = combined(module, name, self._parameters, steps, errors, specs, buckets, self._ranks)
        if self._groups:
            last = [each.group for each in self._gathers[-1]]
            pairs = zip(self._marks, self._gathers, strict=True)
            alike = [(marks.start, each) for marks, each in pairs if [gather.group for gather in each] == last]
            times = [[gather.times(self._clock, start) for gather in each] for start, each in alike]
            return with_gathers(found, self._groups, self._reduced, last, times, self._ranks)
        return replace(found, copies_gradients=ddp_model is not None and not ddp_model.gradient_as_bucket_view)

    def _is_next_recorded(self) -> bool:
        """Whether the next step is recorded: not one in which DDP rebuilds its buckets."""
        model = self._model()
        rebuilds = isinstance(model, DistributedDataParallel) and will_rebuild_buckets(model)
        return self._warmup <= 0 and not rebuilds and not self.done


def refuse_unrecordable(model: DistributedDataParallel) -> None:
    """Check that the steps of a DDP model can be measured.

    Raises:
        ValueError: they cannot.
    """
    if model.mixed_precision is not None or in_join(model):
        raise ValueError("trace_model: model must be a DDP model without mixed_precision and outside of join()")
