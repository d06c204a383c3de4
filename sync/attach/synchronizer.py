"""Synchronise a model without DistributedDataParallel, in the plan's units.

:class:`PlanSynchronizer` registers a hook on every parameter. When all gradients of a bucket have been accumulated, it
is launched, in an order that is the same on all ranks and in all steps; when backward ends, gradients are the means.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.amp import GradScaler
from torch.distributed.utils import _sync_module_states

from gckernels.method import Method

from ..engine.runtime import Runtime
from ..plans.parameters import differentiable
from ..plans.plan import Attached, Plan
from .agreement import agreed, device_of
from .backward import Backward
from .buckets import make_buckets
from .claims import Claim, keep_alive, refuse_claimed, refuse_wrapped
from .handle import Handle
from .models import refuse_sharded, refuse_without_dense_gradients
from .optimizer_checks import refuse_steps_in_backward, watch_optimizers
from .request import Request

_MIB = 2**20
_BUCKET_CAP_MB = 25.0
_BROADCAST_NBYTES = 250 * _MIB


class PlanSynchronizer(Handle):
    """Averages the gradients of a model over the ranks, compressed as a plan says, from the next backward on.

    :class:`~gckernels.sync.Synchronizer` derives from it, and documents its arguments.
    """

    attached = Attached.SYNCHRONIZER

    def __init__(
        self,
        model: torch.nn.Module,
        plan: Plan | Method | str,
        *,
        strict: bool = True,
        memory_budget_mb: float | None = None,
        grad_scaler: GradScaler | None = None,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        seed: int = 0,
        start_step: int = 0,
    ) -> None:
        if not dist.is_initialized():
            raise RuntimeError("Synchronizer: torch.distributed is not initialised; call init_process_group first")
        group = process_group or dist.distributed_c10d._get_default_group()
        request = Request(Attached.SYNCHRONIZER, plan, strict, memory_budget_mb, grad_scaler, seed, start_step)

        def check() -> tuple[Plan, list[str]]:
            parameters = _checked_parameters(model)
            if isinstance(plan, Plan):
                named = {name for unit in plan.units for name in unit.parameters}
                parameters = {name: p for name, p in parameters.items() if p.requires_grad or name in named}
            refuse_claimed("Synchronizer", parameters)
            refuse_wrapped("Synchronizer", parameters)
            if not (bucket_cap_mb is None or (isinstance(bucket_cap_mb, int | float) and bucket_cap_mb > 0)):
                raise ValueError(f"Synchronizer: bucket_cap_mb must be None or a number above 0, got {bucket_cap_mb!r}")
            if bucket_cap_mb is not None and isinstance(plan, Plan) and plan.has_launches:
                raise ValueError(
                    f"Synchronizer: bucket_cap_mb must be None for a plan with launches, got {bucket_cap_mb}"
                )
            if type(find_unused_parameters) is not bool:
                value = repr(find_unused_parameters)
                raise TypeError(f"Synchronizer: find_unused_parameters must be True or False, got {value}")
            checked, summary = request.checked(parameters, dist.get_world_size(group))
            settings = f"bucket_cap_mb {bucket_cap_mb}, find_unused_parameters {find_unused_parameters}"
            return checked, [f"{summary}, {settings}", *checked.lines()]

        device = device_of(model)
        self.plan = agreed("Synchronizer", group, device, check)
        parameters = differentiable(model.named_parameters())
        self._parameters = {name: weakref.ref(parameter) for name, parameter in parameters.items()}
        _sync_module_states(model, group, _BROADCAST_NBYTES, 0, set())
        scaler = request.enabled_scaler
        self._runtime = Runtime(self.plan, group, device, seed, start_step, find_unused_parameters, scaler, parameters)
        buckets = make_buckets(self.plan, parameters, (bucket_cap_mb or _BUCKET_CAP_MB) * _MIB)
        self._averaged_nbytes = sum(bucket.vector.nbytes for bucket in buckets)
        planned = {slot.name: parameters[slot.name] for bucket in buckets for slot in bucket.slots}
        left_out = {name: weakref.ref(each) for name, each in parameters.items() if name not in planned}
        self._backward = Backward(self._runtime, buckets, left_out, find_unused_parameters, _end_of_step(self))
        self._watches = watch_optimizers(self.plan, planned, scaler)
        self._is_open, weak = True, weakref.ref(self)
        self._hooks = [_register(parameter, _hook(weak, name)) for name, parameter in planned.items()]
        self._claim = Claim(planned.values())
        self._let_go = keep_alive(_owners(model, planned.values()), self._end)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context in which gradients are accumulated without being synchronised; the first backward outside
        synchronises the sum."""
        before, self._backward.accumulates_only = self._backward.accumulates_only, True
        try:
            yield
        finally:
            self._backward.accumulates_only = before

    def close(self) -> None:
        """Remove the hooks, end the lanes and the process groups. Gradients are local from then on, and another
        synchronizer can be constructed for the same model."""
        for hook in self._hooks:
            hook.remove()
        self._let_go()
        self._end()

    def _end(self) -> None:
        """Release everything but the hooks, which raise from then on. Called also when the model is gone, because its
        parameters may still be in use."""
        self._is_open = False
        self._claim.release()
        for watch in self._watches:
            watch.remove()
        self._runtime.close()
        self._backward.close()


def _checked_parameters(model: Any) -> dict[str, torch.nn.Parameter]:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"Synchronizer: model must be a torch.nn.Module, got {type(model).__name__}")
    if isinstance(getattr(model, "_orig_mod", model), torch.nn.parallel.DistributedDataParallel):
        raise TypeError("Synchronizer: model is wrapped in DistributedDataParallel, to which attach() belongs")
    refuse_sharded("Synchronizer", model)
    parameters = differentiable(model.named_parameters())
    if not parameters:
        raise ValueError("Synchronizer: model has no parameters that can have a gradient")
    refuse_without_dense_gradients("Synchronizer", model, parameters)
    devices = {parameter.device for parameter in parameters.values()}
    if len(devices) > 1:
        found = ", ".join(sorted(map(str, devices)))
        raise ValueError(f"Synchronizer: model must be on one device, its parameters are on {found}")
    refuse_steps_in_backward("Synchronizer", parameters)
    return parameters


def _owners(model: torch.nn.Module, parameters: Iterable[torch.nn.Parameter]) -> list[torch.nn.Module]:
    """The modules that the parameters are registered in.

    A module that only holds others, such as a compiled model or a list of modules, may be gone before these are.
    """
    planned = set(map(id, parameters))
    return [each for each in model.modules() if not planned.isdisjoint(map(id, each.parameters(recurse=False)))]


def _end_of_step(synchronizer: PlanSynchronizer) -> Callable[[], None]:
    weak = weakref.ref(synchronizer)

    def end() -> None:
        if (synchronizer := weak()) is not None:
            synchronizer._end_step()

    return end


def _hook(weak: weakref.ref[PlanSynchronizer], name: str) -> Callable[[torch.Tensor], None]:
    """The hook of a parameter. It refers to nothing that refers to the parameter: torch's hooks are in C++, where the
    garbage collector sees no cycle."""

    def hook(parameter: torch.Tensor) -> None:
        synchronizer = weak()
        if synchronizer is None or not synchronizer._is_open:
            raise RuntimeError(
                f"gckernels: the gradient of {name} is not synchronised any more: the model that was given to "
                "Synchronizer is gone; keep the model, or close() the synchronizer before"
            )
        synchronizer._backward.on_gradient(name)

    return hook


def _register(parameter: torch.nn.Parameter, hook: Callable[[torch.Tensor], None]) -> Any:
    """The handle of a hook that is registered now, whether the parameter is frozen at present or not."""
    frozen = not parameter.requires_grad
    parameter.requires_grad_(True)
    handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    parameter.requires_grad_(not frozen)
    return handle
