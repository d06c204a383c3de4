"""Synchronise a model without DistributedDataParallel, in units of the plan's own.

:class:`Synchronizer` registers a hook on every parameter. When all gradients of a bucket have come it is launched, in
an order that is the same on all ranks and in all steps; when backward ends, gradients are the means.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.amp import GradScaler
from torch.autograd import Variable
from torch.distributed.utils import _sync_module_states

import gckernels
from gckernels.method import Method

from ..engine.runtime import Runtime, failure
from ..messages.message import Message
from ..plans.arguments import Exempt, as_scaler
from ..plans.builders import exempt_vectors
from ..plans.parameters import differentiable, refuse_sharded, refuse_sparse_gradient, refuse_without_dense_gradients
from ..plans.plan import Plan
from ..programs.steps import Program
from ..programs.topology import Topology
from .agreement import agreed, device_of
from .buckets import Bucket, Slot, make_buckets
from .claims import Claim, keep_alive, refuse_claimed, refuse_wrapped
from .executed import Executed
from .optimizers import refuse_steps_in_backward, watch_optimizers
from .request import Choice

Done: TypeAlias = "torch.futures.Future[torch.Tensor]"
_MIB = 2**20
_BROADCAST_NBYTES = 250 * _MIB


class Synchronizer(Executed):
    """Average the gradients of a model over the ranks, compressed as a plan says, from the next backward on.

    Every rank constructs it, with the same arguments. Parameters and buffers then become those of rank 0. Nothing else
    changes in the training: when ``backward`` returns, ``.grad`` holds the mean on every rank, bit for bit the same,
    and clipping, gradient scalers and any number of optimizers work on it. ``.grad`` is a view of memory that the
    synchronizer keeps, so ``zero_grad`` is cheapest with ``set_to_none=False``.

    The model keeps its synchronizer, which ends when the model is gone; nobody else need have it. A parameter that has
    one cannot have another, nor be averaged by a DistributedDataParallel model, until :meth:`close`.

    The first step is averaged without compression, as by :func:`~gckernels.sync.attach`, which gives the same gradients
    for the same plan. Buffers such as those of batch norm are not synchronised any more after construction.

    Args:
        model: with parameters on one device, not wrapped in DistributedDataParallel. Parameters may be frozen and
            thawed between steps, on all ranks in the same.
        compressor_or_plan: as for :func:`~gckernels.sync.attach`. A plan may leave out parameters that are frozen and
            stay so, and may merge parameters here.
        program, exempt, topology: as for :func:`~gckernels.sync.attach`.
        strict: refuse a plan that does not name each parameter with its size. Otherwise parameters that are missing, or
            have another size, are averaged exactly, and a warning lists them.
        memory_budget_mb: MiB that residuals and buffers may take on a rank, beside the gradients. Where the plan takes
            more, its most demanding units are averaged without compression, in place, and a warning names them.
        grad_scaler: as for :func:`~gckernels.sync.attach`.
        process_group: by default all ranks.
        bucket_cap_mb: MiB of gradients that are launched together, and that share their collectives where programs are
            the same.
        find_unused_parameters: gradients may be missing when backward ends. Where no rank has one, ``.grad`` is left as
            it is; else it becomes the mean, as if those that are missing were zero. Costs a small collective per step.
            Without it a step in which a gradient is missing does not end, and the next one says so.
        seed: of the stochastic compressors.
        start_step: the first step that is compressed, from 1 on.

    Raises:
        TypeError, ValueError, PlanError: an argument is not valid on this rank.
        RuntimeError: not valid on another rank, or not the same on all of them. Every rank raises.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        compressor_or_plan: Method | Plan | str | None = None,
        *,
        program: Program | str | None = None,
        exempt: Exempt | Iterable[str] | None = exempt_vectors,
        topology: Topology | tuple[int, int] | None = None,
        strict: bool = True,
        memory_budget_mb: float | None = None,
        grad_scaler: GradScaler | None = None,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float = 25.0,
        find_unused_parameters: bool = False,
        seed: int = 0,
        start_step: int = 0,
    ) -> None:
        if not dist.is_initialized():
            raise RuntimeError("Synchronizer: torch.distributed is not initialised; call init_process_group first")
        self._group = process_group or dist.distributed_c10d._get_default_group()

        def check() -> tuple[Plan, list[str]]:
            parameters = _checked_parameters(model)
            if isinstance(compressor_or_plan, Plan):
                named = {name for unit in compressor_or_plan.units for name in unit.parameters}
                parameters = {name: p for name, p in parameters.items() if p.requires_grad or name in named}
            refuse_claimed("Synchronizer", parameters)
            refuse_wrapped("Synchronizer", parameters)
            if not (isinstance(bucket_cap_mb, int | float) and bucket_cap_mb > 0):
                raise ValueError(f"Synchronizer: bucket_cap_mb must be a number above 0, got {bucket_cap_mb!r}")
            for name, value, kind in (
                ("find_unused_parameters", find_unused_parameters, bool),
                ("seed", seed, int),
                ("start_step", start_step, int),
            ):
                if type(value) is not kind:
                    raise TypeError(f"Synchronizer: {name} must be {kind.__name__}, got {value!r}")
            if start_step < 0:
                raise ValueError(f"Synchronizer: start_step must be from 0 up, got {start_step}")
            size = dist.get_world_size(self._group)
            choice = Choice(compressor_or_plan, program, exempt, topology, strict, memory_budget_mb, grad_scaler)
            plan, summary = choice.plan("Synchronizer", parameters, size)
            settings = f"bucket_cap_mb {bucket_cap_mb}, find_unused_parameters {find_unused_parameters}"
            settings += f", seed {seed}, start_step {start_step}, gckernels {gckernels.__version__}"
            return plan, [f"{summary}, {settings}", *plan.lines()]

        device = device_of(model)
        self.plan = agreed("Synchronizer", self._group, device, check)
        parameters = differentiable(model.named_parameters())
        _sync_module_states(model, self._group, _BROADCAST_NBYTES, 0, set())
        self._find_unused = find_unused_parameters
        scaler, first = as_scaler("Synchronizer", grad_scaler), max(start_step, 1)
        self._runtime = Runtime(self.plan, self._group, device, seed, first, find_unused_parameters, scaler, parameters)
        self._buckets = make_buckets(self.plan, parameters, bucket_cap_mb * _MIB)
        self._messages: dict[int, tuple[int | None, list[Message]]] = {}
        self._active: list[Bucket] = []  # those of the present step
        self._futures: list[Done] = []
        self._touched: set[str] = set()  # accumulated under no_sync
        self._accumulates_only = False
        self._slots = {slot.name: (bucket, slot) for bucket in self._buckets for slot in bucket.slots}
        self._left_out = {name: weakref.ref(each) for name, each in parameters.items() if name not in self._slots}
        planned = {name: parameters[name] for name in self._slots}
        self._watches = watch_optimizers(self.plan, planned, scaler)
        self._has_begun = False
        self._is_open, weak = True, weakref.ref(self)
        self._hooks = [_register(parameter, _hook(weak, name)) for name, parameter in planned.items()]
        self._claim = Claim(planned.values())
        self._let_go = keep_alive(_owners(model, planned.values()), self._end)

    # ---------------------------------------------------------------- backward

    def _come(self, name: str) -> None:
        """The gradient of a parameter has been accumulated."""
        bucket, slot = self._slots[name]
        if self._accumulates_only:
            self._touched.add(slot.name)
            return
        if (problem := self._runtime.problem) is not None:
            raise problem
        if not self._active:
            self._begin()
        if slot.name not in bucket.waiting:
            raise RuntimeError(self._said_twice(slot))
        try:
            refuse_sparse_gradient(slot.name, slot.grad)
        except RuntimeError:
            self._futures, self._active = [], []
            raise
        self._collect(slot)
        slot.grad = slot.view
        bucket.waiting.remove(slot.name)
        self._launch()
        if not self._find_unused and not any(each.waiting for each in self._active):
            Variable._execution_engine.queue_callback(self._finish)  # when backward ends

    def _collect(self, slot: Slot) -> None:
        slot.collect(self._runtime.share, all_reduced=self._runtime.stage is None)

    def _begin(self) -> None:
        """The first gradient of a step."""
        if not self._has_begun:  # the model may have been wrapped since
            there = {name: slot.parameter() for name, (_, slot) in self._slots.items()}
            refuse_wrapped("Synchronizer", {name: each for name, each in there.items() if each is not None})
            self._has_begun = True
        left_out = {name: reference() for name, reference in self._left_out.items()}
        thawed = [name for name, parameter in left_out.items() if parameter is not None and parameter.requires_grad]
        if thawed:
            raise RuntimeError(f"gckernels: parameters that the plan leaves out are not frozen: {', '.join(thawed)}")
        for bucket in self._buckets:
            bucket.waiting = {slot.name for slot in bucket.slots if slot.is_expected}
        self._active = [bucket for bucket in self._buckets if bucket.waiting]
        for bucket in self._active:
            for slot in bucket.slots:
                if slot.name not in bucket.waiting:
                    slot.view.zero_()  # frozen
        if self._find_unused:
            Variable._execution_engine.queue_callback(self._finish_with_unused)

    def _launch(self) -> None:
        """Launch what is complete, as far as nothing before it is missing."""
        while len(self._futures) < len(self._active) and not self._active[len(self._futures)].waiting:
            bucket, device = self._active[len(self._futures)], self._runtime.device
            future: Done = torch.futures.Future(devices=[device] if device.type == "cuda" else None)
            self._futures.append(future)
            # a tensor of the device: a future makes streams wait for what is in its result, and for nothing else
            done, failed = functools.partial(future.set_result, bucket.vector), functools.partial(_fail, future)
            first, last = (bucket is self._active[each] for each in (0, -1))
            self._runtime.submit(self._messages_of(bucket), done, failed, first=first, last=last)

    def _messages_of(self, bucket: Bucket) -> list[Message]:
        key, stage = id(bucket), self._runtime.stage
        known = self._messages.get(key)
        if known is None or known[0] != stage:
            known = self._messages[key] = (stage, self._runtime.messages(bucket.vector, bucket.units, shares=True))
        return known[1]

    def _finish(self) -> None:
        """Wait for everything; on a device, let its current stream wait."""
        futures, self._futures, self._active = self._futures, [], []
        self._touched.clear()
        for future in futures:
            future.wait()

    def _finish_with_unused(self) -> None:
        """Backward has ended: what has not come is zero; what no rank has used is left alone."""
        slots = [slot for bucket in self._active for slot in bucket.slots if slot.is_expected]
        missing = {name for bucket in self._active for name in bucket.waiting}
        used = [slot.name not in missing or slot.name in self._touched for slot in slots]
        before = {slot.name: slot.take_out() for slot, is_used in zip(slots, used, strict=True) if not is_used}
        for slot in slots:
            if slot.name in missing:
                self._collect(slot)
        for bucket in self._active:
            bucket.waiting.clear()
        self._launch()
        self._finish()
        for slot, is_used in zip(slots, self._used_by_any(used), strict=True):
            slot.grad = slot.view if is_used else before.get(slot.name, slot.grad)

    def _used_by_any(self, used: list[bool]) -> list[bool]:
        """Which slots some rank has used, where this one has ``used``. The host waits for a device only if this rank
        has not used all of them. Everything else of the step has been enqueued, so collectives are in one order."""
        on_cuda = self._runtime.device.type == "cuda"
        mine = torch.tensor(used, dtype=torch.int32, pin_memory=on_cuda)
        everywhere = mine.to(self._runtime.device, non_blocking=True)
        dist.all_reduce(everywhere, op=dist.ReduceOp.MAX, group=self._group)
        return used if all(used) else [bool(flag) for flag in everywhere.tolist()]

    def _said_twice(self, slot: Slot) -> str:
        missing = sorted({name for bucket in self._active for name in bucket.waiting})
        self._futures, self._active = [], []
        if not missing:
            return f"gckernels: the gradient of {slot.name} came again after it had been synchronised"
        listed = ", ".join(missing[:10]) + (", ..." if len(missing) > 10 else "")
        return (
            f"gckernels: the gradient of {slot.name} came twice in a step in which none came for {listed}; pass "
            "find_unused_parameters=True if parameters can be unused"
        )

    # ---------------------------------------------------------------- for the user

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without synchronising them; the first backward outside synchronises the sum."""
        before, self._accumulates_only = self._accumulates_only, True
        try:
            yield
        finally:
            self._accumulates_only = before

    def close(self) -> None:
        """Remove the hooks, end the lanes and the process groups; gradients are local from then on. Another one can be
        constructed for the same model."""
        for hook in self._hooks:
            hook.remove()
        self._let_go()
        self._end()

    def _end(self) -> None:
        """Release everything but the hooks, also when the model is gone; hooks of parameters that somebody still has
        then raise."""
        self._is_open = False
        self._claim.release()
        for watch in self._watches:
            watch.remove()
        self._runtime.close()
        self._messages.clear()


# -------------------------------------------------------------------- construction


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
    """The modules that the parameters are registered in: one that only holds others, such as a compiled model or a
    list of them, may be gone before these are."""
    planned = set(map(id, parameters))
    return [each for each in model.modules() if not planned.isdisjoint(map(id, each.parameters(recurse=False)))]


def _hook(weak: weakref.ref[Synchronizer], name: str) -> Callable[[torch.Tensor], None]:
    """The hook of a parameter. It refers to nothing that refers to the parameter: torch's hooks are in C++, where no
    collector sees a cycle."""

    def hook(parameter: torch.Tensor) -> None:
        synchronizer = weak()
        if synchronizer is None or not synchronizer._is_open:
            raise RuntimeError(
                f"gckernels: the gradient of {name} is not synchronised any more: the model that was given to "
                "Synchronizer is gone; keep the model, or close() the synchronizer before"
            )
        synchronizer._come(name)

    return hook


def _register(parameter: torch.nn.Parameter, hook: Callable[[torch.Tensor], None]) -> Any:
    """Also where the parameter is frozen, and may not be later."""
    frozen = not parameter.requires_grad
    parameter.requires_grad_(True)
    handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    parameter.requires_grad_(not frozen)
    return handle


def _fail(future: Done, error: BaseException) -> None:
    future.set_exception(failure(error))  # type: ignore[arg-type]
