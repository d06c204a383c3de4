"""Traces of models: :func:`trace_model` measures some steps of a training and makes a model trace of them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gckernels.compressor import Compressor

from ..accuracy.accuracy import candidates_by_default
from ..communication.agreement import agreed, device_of
from ..frontends.checks.caller_modes import outside_inference_mode
from ..frontends.checks.models import ddp_parameters, refuse_sharded, refuse_sparse_parameters, refuse_without_memory
from ..frontends.checks.optimizer_checks import refuse_steps_in_backward
from ..frontends.ddp.averages import Averages
from ..frontends.ddp.ddp_checks import refuse_foreign_hook
from ..frontends.ddp.reducer import release_comm_hook, use_comm_hook
from ..frontends.ddp.step_ends import in_join
from ..frontends.ownership import attached, end_spent, recorded, refuse_claimed
from ..frontends.sharded.shard_groups import shard_groups
from ..frontends.sharded.sharded_checks import refuse_unusual_shards
from ..frontends.sharded.sharded_frontend import ShardedFrontend
from ..plans.arguments import as_method, as_named_parameters
from ..traces.model_trace import ModelTrace
from .gradients import MAX_NUMEL
from .model_tracer import ModelTracer, refuse_unrecordable


@outside_inference_mode
def trace_model(
    model: torch.nn.Module,
    steps: int = 10,
    *,
    warmup: int = 3,
    compressors: Iterable[Compressor | str] | None = None,
    name: str | None = None,
) -> ModelTracing:
    """Measure the next steps of a training, which goes on as it would without. Every rank calls it, with the same
    arguments::

        recording = sync.trace_model(ddp_model, steps=10)
        for batch in loader:
            ...  # forward, backward, optimizer.step(), as ever
            if recording.done:
                break
        recording.trace.save("model.trace.json")

    A recorded step is a valid training step with the same result, bit for bit. But communication comes after backward
    instead of during it, so that no time contains it: neither waiting for the network, nor cores that threads of the
    network take from backward. The copy of each gradient into DDP's bucket stays in the times. On a CPU, time in
    which another program had a rank's core is left out, if there is a core for each thread of every rank. With gradient
    accumulation the last backward of a step is measured, and everything before it counts as forward. Work on the
    gradients that are kept is done in the last recorded backward, in seconds.

    A model of FSDP2 sends its parameters and gradients one group after the other in a recorded step, while the clock
    stands still. The trace has its groups, and when FSDP asks for the parameters of each and when they are used.

    Any other model is measured, too. Its gradients are not averaged, so a training that averages them in another way
    goes on doing that, after backward.

    Args:
        model: the DDP model, a model of ``fully_shard`` or ``replicate`` on several ranks, or a module. It may be on a
            CPU or a GPU.
        steps: the number of steps that are recorded.
        warmup: the number of steps before them, which only run. There are more if DDP has not rebuilt its buckets.
        compressors: the compressors whose relative error is measured on the model's gradients; by default all that may
            be chosen for a plan. An empty list leaves errors out.
        name: the name of the model in the trace; by default that of its class.

    Returns:
        The recording. It ends by itself; as a context manager it ends at the latest with its block.

    Raises:
        TypeError, ValueError: an argument is not valid on this rank. Nothing has been changed.
        RuntimeError: an argument is not valid on another rank, or not the same on all of them. Every rank raises.
    """
    ddp_model = model if isinstance(model, DistributedDataParallel) else None

    def check() -> tuple[tuple[Compressor, ...], list[str]]:
        methods = _checked(model, steps, warmup, compressors, name)
        parameters = _parameters(model)
        sizes = [f"{key} {tuple(each.shape)} {each.dtype}" for key, each in parameters.items()]
        return methods, [f"{steps} steps after {warmup}", *map(str, methods), *sizes]

    group = None
    if dist.is_initialized():
        group = dist.distributed_c10d._get_default_group() if ddp_model is None else ddp_model.process_group
    if isinstance(model, torch.nn.Module) and shard_groups(model):
        _, group = ShardedFrontend.groups(model, None)
    methods = check()[0] if group is None else agreed("trace_model", group, device_of(model), check)
    end_spent(model)
    return ModelTracing(model, steps, warmup, methods, name, group)


def _parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    if isinstance(model, DistributedDataParallel):
        return ddp_parameters(model)
    if groups := shard_groups(model):
        found = {name: each for group in groups for name, each in group.parameters().items()}
        return {name: each for name, each in found.items() if each.requires_grad}
    return {name: each for name, each in as_named_parameters("trace_model", model).items() if each.requires_grad}


def _checked(
    model: Any, steps: int, warmup: int, compressors: Iterable[Compressor | str] | None, name: str | None
) -> tuple[Compressor, ...]:
    """The compressors to measure, if all arguments are valid."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"trace_model: model must be a torch.nn.Module, got {type(model).__name__}")
    for argument, value, least in (("steps", steps, 1), ("warmup", warmup, 0)):
        if type(value) is not int or value < least:
            raise ValueError(f"trace_model: {argument} must be an int from {least} up, got {value!r}")
    if name is not None and not isinstance(name, str):
        raise TypeError(f"trace_model: name must be None or a text, got {type(name).__name__}")
    if isinstance(compressors, str) or not isinstance(compressors, Iterable | None):
        raise TypeError(f"trace_model: compressors must be None or a list of compressors, got {compressors!r}")
    if isinstance(getattr(model, "_orig_mod", None), torch.nn.Module):
        raise TypeError("trace_model: model is compiled; trace the module in it, model._orig_mod, before that")
    refuse_sharded("trace_model", model)
    if model in recorded:
        raise ValueError("trace_model: model is being traced already; close() that tracing first")
    parameters = _parameters(model)
    if not parameters:
        raise ValueError("trace_model: model must have a parameter that needs a gradient, got none")
    if isinstance(model, DistributedDataParallel):
        _check_ddp(model)
        refuse_steps_in_backward("trace_model", parameters)
    refuse_claimed("trace_model", parameters)
    if groups := shard_groups(model):
        refuse_unusual_shards("trace_model", groups)
        if groups[0].mesh.size() == 1:
            raise ValueError("trace_model: model has all parameters on one rank; record it on several")
    else:
        refuse_without_memory("trace_model", parameters)
    refuse_sparse_parameters("trace_model", model, parameters)
    given = candidates_by_default() if compressors is None else compressors
    return tuple(dict.fromkeys(as_method("trace_model: an entry of compressors", each) for each in given))


def _check_ddp(ddp_model: DistributedDataParallel) -> None:
    refuse_unrecordable(ddp_model)
    if ddp_model in attached:
        raise ValueError("trace_model: model has an attachment, and with it a communication hook; close() that first")
    refuse_foreign_hook("trace_model", ddp_model)


class ModelTracing:
    """The measurement that :func:`trace_model` has begun.

    As a context manager it is closed at the end of the block, whether that ends with an error or not.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        steps: int,
        warmup: int,
        methods: Sequence[Compressor],
        name: str | None,
        group: dist.ProcessGroup | None,
    ) -> None:
        self._steps, self._methods, self._name = steps, tuple(methods), name
        self._trace: ModelTrace | None = None
        self._model, parameters = weakref.ref(model), _parameters(model)
        is_ddp, self._is_open = isinstance(model, DistributedDataParallel), True
        settings = (model, parameters, group, device_of(model), steps, warmup, MAX_NUMEL)
        groups = [] if is_ddp else shard_groups(model)
        self._recorder = ModelTracer(*settings, None if is_ddp else self._end_backward, groups)
        if isinstance(model, DistributedDataParallel):
            late = Averages(model, self._recorder.before_averaging, self._end_step)
            use_comm_hook(model, parameters.values(), late)
        recorded.add(model)

    @property
    def trace(self) -> ModelTrace:
        """The trace, the same on all ranks.

        Raises:
            RuntimeError: not all steps have been recorded.
        """
        if self._trace is None:
            ended = "; train on" if self._is_open else "; the recording is closed"
            raise RuntimeError(f"recording: {self._recorder.steps} of {self._steps} steps are recorded{ended}")
        return self._trace

    @property
    def done(self) -> bool:
        """Whether the trace is there."""
        return self._trace is not None

    def close(self) -> None:
        """End the recording; without effect if it has ended. Every rank calls it, between the same two steps.

        The training goes on as before.
        """
        if not self._is_open:
            return
        self._is_open = False
        self._recorder.close()
        if (model := self._model()) is not None:
            recorded.discard(model)
            if isinstance(model, DistributedDataParallel):
                release_comm_hook(model)

    def __enter__(self) -> ModelTracing:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # ---------------------------------------------------------------- the ends of steps

    def _end_backward(self) -> None:
        """Record a step whose gradients nobody averages."""
        if (model := self._model()) is not None:
            if not shard_groups(model):  # FSDP2's gradients are kept when it reduces them
                self._recorder.before_averaging([list(_parameters(model).values())])
            self._end_step()

    def _end_step(self) -> None:
        """Take the times of a step; after the last one make the trace."""
        model = self._model()
        if isinstance(model, DistributedDataParallel) and in_join(model):
            return  # not all ranks are here
        if self._recorder.end_step():
            try:
                errors = self._recorder.errors(self._methods)
                self._trace = self._recorder.trace(errors, self._methods, self._name)
            finally:
                self.close()
