"""Recording of a model that has an attachment or a synchronizer already: what :mod:`gckernels.sync.tuning` measures.

Unlike :class:`~gckernels.sync.recording.Recording` it makes no trace by itself. Its owner asks all ranks whether they
are done, measures errors where it may fail, and makes the trace when it suits.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gckernels.method import Method

from ..attach.reducer import will_rebuild_buckets
from ..planner.trace import Trace
from .averaging import LateAveraging
from .clocks import clock_of
from .combining import Ranks, combined
from .gradients import KeptGradients
from .watch import Watch, WatchedStep

MAX_NUMEL = 1 << 16
"""The elements of a tensor on which errors are measured at most, because the training waits for it. Compressors in
blocks have the same error on more of them to about 2 %."""


class Recorder:
    """Measures some of the next steps of a model. Constructed on every rank between the same two steps.

    The model keeps what measures, and a recorder does not keep the model.

    Args:
        model: the DDP model, without a communication hook; or a module.
        parameters: the parameters that are averaged, by name.
        group: the ranks.
        device: the device of the gradients.
        steps: the number of steps that are recorded.
        warmup: the number of steps before them. There are more if DDP has not rebuilt its buckets.

    Raises:
        ValueError: the model cannot be recorded.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        parameters: Mapping[str, torch.nn.Parameter],
        group: dist.ProcessGroup,
        device: torch.device,
        steps: int,
        warmup: int,
    ) -> None:
        if isinstance(model, DistributedDataParallel):
            if model.mixed_precision is not None or model._join_config.enable:
                raise ValueError("a DDP model with mixed_precision or in join() cannot be recorded")
            if not LateAveraging.is_possible(model):
                raise ValueError("this release of torch does not show DDP's buckets")
        self._model = weakref.ref(model)
        self._parameters, self._steps, self._warmup = dict(parameters), steps, warmup
        self._ranks = Ranks(group, dist.get_world_size(group), device)
        self._kept = KeptGradients(self._parameters, dist.get_rank(group), self._ranks.count, MAX_NUMEL)
        self._measured: list[WatchedStep] = []
        self._is_measured = False
        self._buckets: tuple[tuple[str, ...], ...] = ()
        self._watch = weakref.ref(Watch(model, self._parameters, clock_of(device), self))

    @property
    def done(self) -> bool:
        """Whether all steps have been recorded on this rank."""
        return len(self._measured) >= self._steps

    def mark_averaged(self) -> None:
        """Say that gradients have been averaged just now, if that was not seen."""
        if (watch := self._watch()) is not None:
            watch.mark_averaged()

    def close(self) -> None:
        """Remove all hooks; without effect if they are gone."""
        if (watch := self._watch()) is not None:
            watch.end()

    def errors(self, methods: Sequence[Method]) -> dict[str, tuple[float, dict[str, float]]]:
        """The norm, and the errors of the methods by their specs, of every tensor that this rank keeps."""
        return self._kept.measured(methods)

    def trace(self, errors: Mapping[str, tuple[float, Mapping[str, float]]], methods: Sequence[Method]) -> Trace | None:
        """The trace, the same on all ranks; ``None`` if the model is gone. Collective.

        Args:
            errors: what :meth:`errors` has returned on this rank.
            methods: the methods it was given.
        """
        model = self._model()
        if model is None:
            return None
        ddp_model = model if isinstance(model, DistributedDataParallel) else None
        module = model if ddp_model is None else ddp_model.module
        name, specs = type(module).__name__, [str(method) for method in methods]
        found = combined(module, name, self._parameters, self._measured, errors, specs, self._buckets, self._ranks)
        return replace(found, copies_gradients=ddp_model is not None and not ddp_model.gradient_as_bucket_view)

    # ---------------------------------------------------------------- what the watch calls

    def on_forward(self) -> bool:
        """Return whether the step is recorded."""
        model = self._model()
        is_cold = isinstance(model, DistributedDataParallel) and will_rebuild_buckets(model)
        self._is_measured = self._warmup <= 0 and not is_cold and not self.done
        return self._is_measured

    def on_backward(self, step: WatchedStep) -> None:
        """Take the times of a step."""
        if not self._is_measured:
            self._warmup -= 1
            return
        self._measured.append(step)
        self._kept.keep(self._parameters)
        watch = self._watch()
        if self.done and watch is not None:
            self._buckets = () if watch.averaging is None else watch.averaging.buckets
            watch.end()
