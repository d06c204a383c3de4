"""Attach compression to a DistributedDataParallel model.

:func:`attach_plan` registers a communication hook. DDP calls it with each bucket of gradients as soon as backward has
filled it; the hook queues the bucket's messages on the engine's lanes and returns a future, so encoding, both phases
of communication and decoding overlap with the rest of backward and with each other.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.amp import GradScaler
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from gckernels.method import Method

from ..engine.failures import Outcome, failed_future
from ..engine.runtime import Runtime
from ..messages.message import Message
from ..plans.grouping import PlacedUnit
from ..plans.plan import Attached, Plan, PlanError, UnitPlan
from ..plans.strides import in_reals
from ..programs.sizes import allreduce_sent_nbytes
from .agreement import agreed, device_of
from .claims import Claim, attached, keep_alive, refuse_claimed
from .figures import Overlap
from .handle import Handle
from .models import ddp_parameters, refuse_sharded, refuse_without_dense_gradients, watch_for_sparse_gradients
from .optimizer_checks import refuse_steps_in_backward, watch_optimizers
from .reducer import can_rebuild, comm_hook, release_comm_hook, use_comm_hook, will_rebuild_buckets
from .request import Request
from .step_ends import StepEnds, call_after_backward, in_join

A = TypeVar("A", bound="Attachment")
_NO_INPUTS = (
    "gckernels: this rank has no inputs left, and compressed gradients need those of all ranks; let all ranks have as "
    "many inputs, or close() the attachment before join()"
)
_OVERLAP = ("backward_comm_time", "backward_compute_comm_overlap_time")  # in the logging data of DDP, in nanoseconds


def attach_plan(
    ddp_model: DistributedDataParallel,
    plan: Plan | Method | str,
    kind: type[A],
    *,
    strict: bool = True,
    memory_budget_mb: float | None = None,
    grad_scaler: GradScaler | None = None,
    seed: int = 0,
    start_step: int = 0,
) -> A:
    """An attachment of the class ``kind`` that synchronises a DDP model as a plan says. Collective.

    The other arguments are those of :func:`~gckernels.sync.attach`.

    Raises:
        TypeError, ValueError, PlanError: an argument is not valid on this rank.
        RuntimeError: an argument is not valid on another rank, or not the same on all of them. Every rank raises.
    """
    if not dist.is_initialized():
        raise RuntimeError("attach: torch.distributed is not initialised; call init_process_group first")
    request = Request(Attached.DDP, plan, strict, memory_budget_mb, grad_scaler, seed, start_step)

    def check() -> tuple[Plan, list[str]]:
        checked, summary = _checked_plan(ddp_model, request)
        buckets = "its first buckets" if will_rebuild_buckets(ddp_model) else "its last buckets"
        return checked, [f"{summary}, DDP with {buckets}", *checked.lines()]

    is_ddp = isinstance(ddp_model, DistributedDataParallel)
    group = ddp_model.process_group if is_ddp else dist.distributed_c10d._get_default_group()
    device = device_of(ddp_model)
    agreed_plan = agreed("attach", group, device, check)
    attachment = kind(ddp_model, agreed_plan, group, device, request)
    try:
        attachment._register(ddp_model)
    except BaseException:  # DDP has reasons that the checks above do not know
        attachment.close()
        raise
    return attachment


def _checked_plan(ddp_model: Any, request: Request) -> tuple[Plan, str]:
    """The plan, and a summary of the request, which must be the same on all ranks."""
    if isinstance(getattr(ddp_model, "_orig_mod", None), DistributedDataParallel):
        raise TypeError("attach: ddp_model is compiled; attach to the DistributedDataParallel model, then compile that")
    if not isinstance(ddp_model, DistributedDataParallel):
        if isinstance(ddp_model, torch.nn.Module):
            refuse_sharded("attach", ddp_model)
        raise TypeError(f"attach: ddp_model must be a DistributedDataParallel model, got {type(ddp_model).__name__}")
    if ddp_model in attached:
        raise ValueError("attach: ddp_model has a gckernels attachment already; a model can have one")
    logged = _refuse_foreign_hook("attach", ddp_model)
    parameters = ddp_parameters(ddp_model)
    if (averaged := logged.get("num_parameter_tensors", len(parameters))) != len(parameters):
        raise ValueError(
            f"attach: ddp_model averages {averaged} parameters since it was made, and {len(parameters)} need gradients "
            "now; freeze and thaw before wrapping, and attach before the first forward of a model of DTensors"
        )
    refuse_claimed("attach", parameters)
    refuse_without_dense_gradients("attach", ddp_model.module, parameters)
    refuse_steps_in_backward("attach", parameters)
    return _fitting(request, parameters, dist.get_world_size(ddp_model.process_group))


def _refuse_foreign_hook(caller: str, ddp_model: Any) -> dict[str, Any]:
    """DDP's logging data, if no one else has registered a communication hook."""
    # not from its list of hooks, which lacks the built-in ones
    logged: dict[str, Any] = ddp_model._get_ddp_logging_data()
    if logged.get("comm_hook") and comm_hook(ddp_model) is None:
        raise ValueError(f"{caller}: ddp_model has a communication hook already; DDP can have one")
    return logged


def _fitting(request: Request, parameters: Mapping[str, torch.nn.Parameter], world_size: int) -> tuple[Plan, str]:
    """The plan of a request for DDP's buckets, and a summary."""
    plan, summary = request.checked(parameters, world_size)
    if merged := [unit.key for unit in plan.units if unit.also]:
        raise PlanError(f"plan merges parameters, which DDP's buckets may part; Synchronizer can: {', '.join(merged)}")
    return plan, summary


class Attachment(Handle):
    """The hook that :func:`~gckernels.sync.attach` has registered, with its engine and residuals."""

    attached = Attached.DDP

    def __init__(
        self,
        ddp_model: DistributedDataParallel,
        plan: Plan,
        group: dist.ProcessGroup,
        device: torch.device,
        request: Request,
    ) -> None:
        parameters = ddp_parameters(ddp_model)
        self._parameters = {name: weakref.ref(parameter) for name, parameter in parameters.items()}
        self._averaged_nbytes = sum(in_reals(parameter).nbytes for parameter in parameters.values())
        self._model, self._request = weakref.ref(ddp_model), request
        self._settings = (group, device, request.seed, request.start_step)
        self._is_open = False
        self._let_go: Callable[[], None] | None = None
        self._step_ends: StepEnds | None = None
        self._watches: list[RemovableHandle] = []
        self._take(self._new_runtime(plan))
        self._claim = Claim(parameters.values())

    def _needs_hook(self, plan: Plan) -> bool:
        """Whether DDP must hand over its buckets."""
        if any(not unit.in_place for unit in plan.units):  # one rank alone counts its steps, which larger jobs continue
            return True
        ddp_model = self._model()
        return ddp_model is not None and comm_hook(ddp_model) is not None and not can_rebuild(ddp_model)

    def _new_runtime(self, plan: Plan) -> Runtime:
        ddp_model, parameters = self._model(), self.parameters()
        assert ddp_model is not None
        unused = ddp_model.find_unused_parameters or ddp_model.static_graph
        settings = (plan, *self._settings, unused, self._request.enabled_scaler, parameters)
        return Runtime(*settings, synchronises=self._needs_hook(plan))

    def _take(self, runtime: Runtime) -> None:
        """Let a runtime execute its plan."""
        self._runtime, self.plan = runtime, runtime.plan
        self._has_hook = self._needs_hook(self.plan)
        parameters = self.parameters()
        self._units: dict[int, list[UnitPlan]] = {}
        for unit in self.plan.units:
            self._units.setdefault(id(parameters[unit.parameter]), []).append(unit)
        self._buckets: dict[int, tuple[Any, list[Message]]] = {}
        for watch in self._watches:
            watch.remove()
        self._watches = watch_optimizers(self.plan, parameters, self._request.enabled_scaler)
        if self._has_hook:
            self._watches += watch_for_sparse_gradients(parameters)

    def _register(self, ddp_model: DistributedDataParallel) -> None:
        """Let DDP hand over its buckets, if anything is compressed, and let the model keep the attachment."""
        if self._has_hook:
            use_comm_hook(ddp_model, ddp_parameters(ddp_model).values(), self._synchronise)
        attached.add(ddp_model)
        self._let_go = keep_alive([ddp_model], self.close)
        self._is_open = True

    # ---------------------------------------------------------------- changes of the plan

    def _checked(self, request: Request) -> tuple[Plan, list[str]]:
        _refuse_foreign_hook("change_plan", self._model())
        plan, summary = _fitting(request, self.parameters(), self._runtime.world_size)
        return plan, [summary, *plan.lines()]

    def _install(self, runtime: Runtime) -> None:
        had_hook, ddp_model = self._has_hook, self._model()
        assert ddp_model is not None
        self._take(runtime)
        if self._has_hook and not had_hook:
            use_comm_hook(ddp_model, self.parameters().values(), self._synchronise)
        elif had_hook and not self._has_hook:
            release_comm_hook(ddp_model)
        self._follow_steps()

    # ---------------------------------------------------------------- the hook

    def _synchronise(self, bucket: GradBucket) -> Future[Outcome]:
        # a hook that raises leaves DDP in the middle of its buckets, and the next forward fails at an assertion
        if (problem := self._runtime.problem) is not None:
            return failed_future(problem)
        self._refuse_without_inputs()
        buffer, is_first, is_last = bucket.buffer(), bucket.index() == 0, bucket.is_last()
        if is_last:
            call_after_backward(self._end_step)
        if is_first and self._runtime.step == 0:
            self._runtime.first_is_dense = will_rebuild_buckets(self._model())
        return self._runtime.submit(self._messages(bucket), buffer, first=is_first, last=is_last)

    def _refuse_without_inputs(self) -> None:
        """Raise a RuntimeError if DDP's ``join()`` asks for a bucket of zeros, because this rank has no inputs left."""
        ddp_model = self._model()
        if ddp_model is not None and in_join(ddp_model):
            try:
                call_after_backward(lambda: None)
            except RuntimeError:  # there is no backward
                raise RuntimeError(_NO_INPUTS) from None

    def _messages(self, bucket: GradBucket) -> list[Message]:
        """The bucket's messages. They are built when DDP hands over a bucket for the first time or has rebuilt it, and
        when compression begins or its compressors reach a milestone."""
        buffer, parameters = bucket.buffer(), bucket.parameters()
        key = (buffer.data_ptr(), self._runtime.milestone, tuple(id(parameter) for parameter in parameters))
        known = self._buckets.get(bucket.index())
        if known is None or known[0] != key:
            units, first = [], 0
            # bucket.gradients() would give wrong offsets: it counts a complex element once, the buffer holds two reals
            for parameter in parameters:
                for unit in self._units[id(parameter)]:
                    start = first + (unit.start or 0)
                    units.append(PlacedUnit(unit, start))
                first += in_reals(parameter).numel()
            assert first == buffer.numel()
            known = self._buckets[bucket.index()] = (key, self._runtime.messages(buffer, units))
        return known[1]

    def _follow_steps(self) -> None:
        ddp_model = self._model()
        wanted = bool(self._listeners) and not self._has_hook and self._is_open and ddp_model is not None
        if wanted and self._step_ends is None and ddp_model is not None:
            self._step_ends = StepEnds(ddp_model, self.parameters().values(), self._end_plain_step)
        elif not wanted and self._step_ends is not None:
            self._step_ends.remove()
            self._step_ends = None

    def _end_plain_step(self) -> None:
        ddp_model = self._model()
        if ddp_model is not None and in_join(ddp_model):
            self._meet_uneven_steps()
        self._runtime.step += 1
        self._end_step()

    def _meet_uneven_steps(self) -> None:
        """End whatever needs all ranks at the end of a step, because in DDP's ``join()`` some may not have it."""

    def _overlap(self) -> Overlap | None:
        ddp_model = self._model()
        if self._has_hook or ddp_model is None:
            return super()._overlap()
        logged = ddp_model._get_ddp_logging_data()  # type: ignore[no-untyped-call]
        sent_ns, hidden_ns = (logged.get(name, 0) for name in _OVERLAP)
        return Overlap(hidden_ns / 1e9, max(sent_ns - hidden_ns, 0) / 1e9) if sent_ns else None

    # ---------------------------------------------------------------- for the user

    def sent_nbytes_per_step(self) -> float:
        if self._has_hook:
            return super().sent_nbytes_per_step()
        return allreduce_sent_nbytes(self._averaged_nbytes, self._runtime.world_size)

    def close(self) -> None:
        """End the compression, the lanes and the process groups. Every rank calls it, between the same two steps.

        The model is plain DDP from its next forward on, as if it had just been wrapped: its first step has one bucket,
        unless parameters can be unused. A later :func:`~gckernels.sync.attach` takes it again. A backward whose forward
        came before ``close`` raises.

        This needs private functions of DDP, which torch 2.11 to 2.14 have. If a release lacks one, training the model
        further raises, until it is attached again or its module is wrapped anew.
        """
        if self._let_go is not None:
            self._let_go()
            self._let_go, self._is_open = None, False
            if (ddp_model := self._model()) is not None:
                if self._has_hook:
                    release_comm_hook(ddp_model)
                attached.discard(ddp_model)
        self._abandon_change()
        self._follow_steps()
        self._claim.release()
        for watch in self._watches:
            watch.remove()
        self._runtime.close()
        self._buckets.clear()
