"""Synchronise a model without DistributedDataParallel, in the plan's units.

:class:`PlanSynchronizer` registers a hook on every parameter. When all gradients of a bucket have been accumulated, it
is launched, in an order that is the same on all ranks and in all steps; when backward ends, gradients are the means.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.amp import GradScaler
from torch.distributed.utils import _sync_module_states
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gckernels.compressor import Compressor

from ...communication.agreement import agreed, device_of
from ...engine.runtime import Runtime
from ...plans.parameters import differentiable
from ...plans.plan import Attached, Plan
from ..checks.models import on_accumulated, refuse_sharded, refuse_sparse_parameters, refuse_without_memory
from ..checks.optimizer_checks import refuse_steps_in_backward
from ..handle import Before, Handle
from ..ownership import Claim, end_spent, keep_alive, refuse_claimed, refuse_wrapped
from ..request import Request
from .backward import Backward
from .layouts import Layouts
from .members import Members

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
        plan: Plan | Compressor | str,
        *,
        strict: bool = True,
        memory_budget_mb: float | None = None,
        grad_scaler: GradScaler | None = None,
        can_discard: bool = False,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        seed: int = 0,
        start_step: int = 0,
    ) -> None:
        if not dist.is_initialized():
            raise RuntimeError("Synchronizer: torch.distributed is not initialised; call init_process_group first")
        group = process_group or dist.distributed_c10d._get_default_group()
        self._request = Request(
            Attached.SYNCHRONIZER, plan, strict, memory_budget_mb, grad_scaler, can_discard, seed, start_step
        )
        self._bucket_cap_mb, self._find_unused = bucket_cap_mb, find_unused_parameters

        def check() -> tuple[Plan, list[str]]:
            parameters = _checked_parameters(model)
            refuse_claimed("Synchronizer", _planned(plan, parameters))
            refuse_wrapped("Synchronizer", _planned(plan, parameters))
            if not (bucket_cap_mb is None or (isinstance(bucket_cap_mb, int | float) and bucket_cap_mb > 0)):
                raise ValueError(f"Synchronizer: bucket_cap_mb must be None or a number above 0, got {bucket_cap_mb!r}")
            if type(find_unused_parameters) is not bool:
                value = repr(find_unused_parameters)
                raise TypeError(f"Synchronizer: find_unused_parameters must be True or False, got {value}")
            return self._fitting(self._request, parameters, dist.get_world_size(group))

        device = device_of(model)
        checked = agreed("Synchronizer", group, device, check)
        parameters = differentiable(model.named_parameters())
        end_spent(model)
        self._members = Members(model, parameters)
        self._parameters = self._members.references
        _sync_module_states(model, group, _BROADCAST_NBYTES, 0, set())
        self._settings = (group, device, seed, start_step, self._request.enabled_scaler)
        self._is_open = True
        self._take(self._new_backward(self._new_runtime(checked)))
        self._claim = Claim(parameters.values(), self, self._members.modules)
        weak = weakref.ref(self)
        self._hooks = [on_accumulated(parameter, _hook(weak, name)) for name, parameter in parameters.items()]
        self._optimizers = register_optimizer_step_pre_hook(_before_optimizer(self._members))
        self._let_go = keep_alive(self._members.modules, self._end)

    def _fitting(
        self, request: Request, parameters: Mapping[str, torch.nn.Parameter], world_size: int
    ) -> tuple[Plan, list[str]]:
        """The plan of a request, and the texts that must be the same on all ranks."""
        plan, cap = request.plan, self._bucket_cap_mb
        if cap is not None and isinstance(plan, Plan) and plan.has_launches:
            raise ValueError(f"Synchronizer: bucket_cap_mb must be None for a plan with launches, got {cap}")
        checked, summary = request.checked(_planned(plan, parameters), world_size)
        settings = f"bucket_cap_mb {cap}, find_unused_parameters {self._find_unused}"
        frozen = [f"{name} is frozen" for name, parameter in parameters.items() if not parameter.requires_grad]
        return checked, [f"{summary}, {settings}", *checked.lines(), *frozen]

    @property
    def _is_spent(self) -> bool:
        return super()._is_spent or self._members.have_changed

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        return self._members.registered()

    def _new_backward(self, runtime: Runtime) -> Backward:
        """The backward passes of a runtime, with its buckets."""
        layouts = Layouts(runtime, self._members, (self._bucket_cap_mb or _BUCKET_CAP_MB) * _MIB)
        return Backward(runtime, self._members, layouts, self._find_unused, _end_of_step(self))

    def _take(self, backward: Backward) -> None:
        """Let the runtime of these backward passes execute its plan."""
        self._backward, self._runtime, self.plan = backward, backward.runtime, backward.runtime.plan
        self._averaged_nbytes = backward.nbytes
        self._watch_optimizers(self.parameters())

    def _end_step(self) -> None:
        self._averaged_nbytes = self._backward.nbytes
        super()._end_step()

    # ---------------------------------------------------------------- changes of the plan

    def _checked(self, request: Request) -> tuple[Plan, list[str]]:
        return self._fitting(request, self.parameters(), self._runtime.world_size)

    def _new_runtime(self, plan: Plan) -> Runtime:
        return Runtime(plan, *self._settings, self.parameters(), can_discard=self._request.can_discard)

    def _is_ready(self, runtime: Runtime) -> bool:
        return True

    def _prepared(self, runtime: Runtime) -> Callable[[], None]:
        runtime.follow(self._runtime)
        backward = self._new_backward(runtime)
        backward.prepare()

        def install() -> None:
            before = self._backward
            self._take(backward)
            backward.follow(before)
            before.close()

        return install

    def _watch_parked(self, names: Iterable[str]) -> None:
        pass  # the hook of each parameter calls _deliver before it takes the gradient

    @property
    def _averages_now(self) -> bool:
        return not self._backward.accumulates_only

    # ---------------------------------------------------------------- for the user

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context in which gradients are accumulated without being synchronised; the first backward outside
        synchronises the sum."""
        before, self._backward.accumulates_only = self._backward.accumulates_only, True
        try:
            yield
        finally:
            self._backward.accumulates_only = before

    def launch_late(self, before: Before | None) -> None:
        self._backward.before_late = before

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
        self._optimizers.remove()
        self._ignore_optimizers()
        self._abandon_change()
        self._leave_parked()
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
    refuse_without_memory("Synchronizer", parameters)
    refuse_sparse_parameters("Synchronizer", model, parameters)
    devices = {parameter.device for parameter in parameters.values()}
    if len(devices) > 1:
        found = ", ".join(sorted(map(str, devices)))
        raise ValueError(f"Synchronizer: model must be on one device, its parameters are on {found}")
    refuse_steps_in_backward("Synchronizer", parameters)
    return parameters


def _planned(plan: Any, parameters: Mapping[str, torch.nn.Parameter]) -> Mapping[str, torch.nn.Parameter]:
    """The parameters for which there must be a unit: a plan may leave out frozen ones."""
    if not isinstance(plan, Plan):
        return parameters
    named = {name for unit in plan.units for name in unit.parameters}
    return {name: each for name, each in parameters.items() if each.requires_grad or name in named}


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
        synchronizer._deliver(name, parameter)
        synchronizer._backward.on_gradient(name)

    return hook


def _before_optimizer(members: Members) -> Callable[..., None]:
    """The hook of all optimizers of this process."""
    weak = weakref.ref(members)

    def hook(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if (members := weak()) is not None:
            members.look_before(optimizer)

    return hook
