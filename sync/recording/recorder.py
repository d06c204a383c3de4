"""The measurement of some steps of a model, and the trace of them.

A recorder makes no trace by itself. Its owner knows when all ranks are done, measures errors where that may fail, and
makes the trace when it suits: :class:`~gckernels.sync.recording.recording.Recording` in the backward of the last step,
and :mod:`gckernels.sync.tuning` between two steps.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gckernels.method import Method

from ..attach.reducer import can_rebuild, will_rebuild_buckets
from ..attach.step_ends import in_join
from ..planner.trace import Trace
from .averaging import LateAveraging
from .clocks import clock_of
from .combining import Ranks, combined
from .gradients import KeptGradients
from .watch import Listener, Watch, WatchedStep

IN_PARTS = "the gradients of one forward come in several backwards, after each of which others would be averaged"
"""Why the steps of some models cannot be measured."""
MAX_NUMEL = 1 << 16
"""The elements of a tensor on which errors are measured at most, because the training waits for it. Compressors in
blocks have the same error on more of them to about 2 %."""


class Recorder:
    """Measures some of the next steps of a model. Constructed on every rank between the same two steps.

    The model keeps what measures, and a recorder does not keep the model.

    Args:
        model: the DDP model, without a communication hook; or a module.
        parameters: the parameters that are averaged, by name.
        group: the ranks; ``None`` for a process alone.
        device: the device of the gradients.
        steps: the number of steps that are recorded.
        warmup: the number of steps before them. There are more if DDP has not rebuilt its buckets.
        max_numel: the number of elements of a tensor on which errors are measured at most.
        listener: receives what is seen in place of the recorder, and passes it on.

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
        listener: Listener | None = None,
    ) -> None:
        if isinstance(model, DistributedDataParallel):
            refuse_unrecordable(model)
        self._model = weakref.ref(model)
        self._parameters, self._steps, self._warmup = dict(parameters), steps, warmup
        rank, ranks = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        self._ranks = Ranks(group, ranks, device)
        self._kept = KeptGradients(self._parameters, rank, ranks, max_numel)
        self._measured: list[WatchedStep] = []
        self._is_measured = False
        self._buckets: tuple[tuple[str, ...], ...] = ()
        self._watch = weakref.ref(Watch(model, self._parameters, clock_of(device), listener or self))

    @property
    def steps(self) -> int:
        """The number of steps that have been recorded."""
        return len(self._measured)

    @property
    def done(self) -> bool:
        """Whether all steps have been recorded on this rank."""
        return len(self._measured) >= self._steps

    @property
    def has_parts(self) -> bool:
        """Whether a step has had several backwards. Then no step is recorded."""
        watch = self._watch()
        return watch is not None and watch.has_parts

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

    def trace(
        self,
        errors: Mapping[str, tuple[float, Mapping[str, float]]],
        methods: Sequence[Method],
        name: str | None = None,
    ) -> Trace | None:
        """The trace, the same on all ranks; ``None`` if the model is gone. Collective.

        Args:
            errors: what :meth:`errors` has returned on this rank.
            methods: the methods it was given.
            name: the name of the model; by default that of its class.
        """
        model = self._model()
        if model is None:
            return None
        ddp_model = model if isinstance(model, DistributedDataParallel) else None
        module = model if ddp_model is None else ddp_model.module
        name, specs = name or type(module).__name__, [str(method) for method in methods]
        found = combined(module, name, self._parameters, self._measured, errors, specs, self._buckets, self._ranks)
        return replace(found, copies_gradients=ddp_model is not None and not ddp_model.gradient_as_bucket_view)

    # ---------------------------------------------------------------- what the watch calls

    def on_forward(self) -> bool:
        """Return whether the step is recorded."""
        model = self._model()
        is_unfit = isinstance(model, DistributedDataParallel) and (will_rebuild_buckets(model) or in_join(model))
        self._is_measured = self._warmup <= 0 and not is_unfit and not self.has_parts and not self.done
        return self._is_measured

    def on_backward(self, step: WatchedStep | None) -> None:
        """Take the times of a step."""
        if not self._is_measured or step is None:
            self._warmup -= 1
            return
        self._measured.append(step)
        self._kept.keep(self._parameters)
        watch = self._watch()
        if self.done and watch is not None:
            self._buckets = () if watch.averaging is None else watch.averaging.buckets
            watch.end()


def refuse_unrecordable(model: DistributedDataParallel) -> None:
    """Check that the steps of a DDP model can be measured without its communication.

    Raises:
        ValueError: they cannot.
    """
    if model.mixed_precision is not None or in_join(model):
        raise ValueError("record: model must be a DDP model without mixed_precision and outside of join()")
    if not LateAveraging.is_possible(model):
        raise ValueError("record: this release of torch does not show DDP's buckets; record ddp_model.module alone")
    if model.find_unused_parameters and not can_rebuild(model):
        raise ValueError("record: model must be without find_unused_parameters with this release of torch")
