"""Attach compression to a DistributedDataParallel model.

:func:`attach_plan` registers a communication hook. DDP calls it with each bucket of gradients as soon as backward has
filled it; the hook queues the bucket's messages on the engine's lanes and returns a future, so encoding, both phases
of communication and decoding overlap with the rest of backward and with each other.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.amp import GradScaler
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from gckernels.compressor import Compressor

from ...communication.agreement import agreed, device_of
from ...engine.failures import Outcome, failed_future
from ...engine.runtime import Runtime
from ...plans.plan import Attached, Plan
from ...plans.strides import in_reals
from ...programs.sizes import allreduce_sent_nbytes
from ...stats.stats import Overlap
from ..checks.models import ddp_parameters, watch_for_sparse_gradients
from ..handle import Before, Handle
from ..ownership import Claim, attached, end_spent, keep_alive
from ..request import Request
from .ddp_buckets import DdpBuckets, UnplannedError
from .ddp_checks import checked_plan, fitting, refuse_foreign_hook
from .late import average_late
from .others import OtherParameters, UsedParameters, listed
from .reducer import Handler, can_rebuild, comm_hook, release_comm_hook, use_comm_hook, will_rebuild_buckets
from .step_ends import StepEnds, in_join, join_of

A = TypeVar("A", bound="DdpAttachment")
_NO_INPUTS = (
    "gckernels: this rank has no inputs left in join(), so it can neither vote nor follow a gradient scaler; let all "
    "ranks have as many inputs, or close() the attachment before join()"
)
_OVERLAP = ("backward_comm_time", "backward_compute_comm_overlap_time")  # in the logging data of DDP, in nanoseconds


def attach_plan(
    ddp_model: DistributedDataParallel,
    plan: Plan | Compressor | str,
    kind: type[A],
    *,
    strict: bool = True,
    memory_budget_mb: float | None = None,
    grad_scaler: GradScaler | None = None,
    can_discard: bool = False,
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
    request = Request(Attached.DDP, plan, strict, memory_budget_mb, grad_scaler, can_discard, seed, start_step)

    def check() -> tuple[Plan, list[str]]:
        checked, summary = checked_plan(ddp_model, request)
        buckets = "its first buckets" if will_rebuild_buckets(ddp_model) else "its last buckets"
        return checked, [f"{summary}, DDP with {buckets}", *checked.lines()]

    is_ddp = isinstance(ddp_model, DistributedDataParallel)
    group = ddp_model.process_group if is_ddp else dist.distributed_c10d._get_default_group()
    device = device_of(ddp_model)
    agreed_plan = agreed("attach", group, device, check)
    end_spent(ddp_model)
    attachment = kind(ddp_model, agreed_plan, group, device, request)
    try:
        attachment._register(ddp_model)
    except BaseException:  # DDP has reasons that the checks above do not know
        attachment.close()
        raise
    return attachment


class DdpAttachment(Handle):
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
        self._next_buckets: DdpBuckets | None = None  # for the plan that follows, while a step shows them
        self._shows_buckets = False  # whether it has
        self._let_go: Callable[[], None] | None = None
        self._step_ends: StepEnds | None = None
        self._is_late = False
        self._used: UsedParameters | None = None  # if a step may leave some unused
        self._numbers: dict[str, int] = {}  # by unit, the number of its parameter
        self._others = OtherParameters(ddp_model.module, parameters.values(), ddp_model.parameters_to_ignore)
        self._take(self._new_buckets(self._new_runtime(plan)))
        self._claim = Claim(parameters.values(), self)

    def _needs_hook(self, plan: Plan) -> bool:
        """Whether DDP must hand over its buckets."""
        if any(not unit.in_place for unit in plan.units):  # one rank alone counts its steps, which larger jobs continue
            return True
        ddp_model = self._model()
        if ddp_model is None or comm_hook(ddp_model) is None:
            return False
        return self._may_be_uneven or not can_rebuild(ddp_model)  # a rank without inputs would not rebuild its reducer

    def _new_runtime(self, plan: Plan) -> Runtime:
        ddp_model, parameters = self._model(), self.parameters()
        assert ddp_model is not None
        self._join = join_of(ddp_model)
        settings = (plan, *self._settings, self._request.enabled_scaler, parameters)
        return Runtime(*settings, synchronises=self._needs_hook(plan), can_discard=self._request.can_discard)

    def _new_buckets(self, runtime: Runtime) -> DdpBuckets:
        return DdpBuckets(runtime, self.parameters(), self._model)

    def _take(self, buckets: DdpBuckets) -> None:
        """Let the runtime of these buckets execute its plan."""
        self._buckets, self._runtime, self.plan = buckets, buckets.runtime, buckets.runtime.plan
        self._has_hook = self._needs_hook(self.plan)
        parameters = self.parameters()
        self._watch_optimizers(parameters)
        self._used = None
        if self._has_hook:
            self._watches = [*self._watches, *watch_for_sparse_gradients(parameters)]
            ddp_model = self._model()
            if ddp_model is not None and (ddp_model.find_unused_parameters or ddp_model.static_graph):
                self._used = UsedParameters(parameters.values())
                numbers = {name: number for number, name in enumerate(self._parameters)}  # in DDP's order
                self._numbers = {unit.key: numbers[unit.parameter] for unit in self.plan.units}
                self._watches = [*self._watches, *self._used.handles]

    def _register(self, ddp_model: DistributedDataParallel) -> None:
        """Let DDP hand over its buckets, if anything is compressed, and let the model keep the attachment."""
        if self._has_hook:
            self._use_hook(ddp_model)
        attached.add(ddp_model)
        self._let_go = keep_alive([ddp_model], self.close)
        self._is_open = True

    # ---------------------------------------------------------------- changes of the plan

    def _checked(self, request: Request) -> tuple[Plan, list[str]]:
        ddp_model = self._model()
        assert ddp_model is not None
        refuse_foreign_hook("change_plan", ddp_model)
        plan, summary = fitting("change_plan", ddp_model, request, self.parameters())
        return plan, [summary, *plan.lines()]

    def _is_ready(self, runtime: Runtime) -> bool:
        ddp_model, needs_hook = self._model(), self._needs_hook(runtime.plan)
        if ddp_model is None or self._has_hook or not needs_hook:
            return runtime.synchronises or not needs_hook  # in join() the hook stays
        if not self._builds_between or not can_rebuild(ddp_model):
            return True
        if self._next_buckets is None:
            runtime.is_waiting = True
            self._next_buckets, self._shows_buckets = self._new_buckets(runtime), False
            self._use_hook(ddp_model)
            self._follow_steps()
        return self._shows_buckets and not self._may_be_uneven

    @property
    def _can_agree(self) -> bool:
        # in a join() that has begun since, a rank without inputs would come there before it tells DDP that it has used
        # no parameter, for which the others wait
        ddp_model = self._model()
        return ddp_model is None or not ddp_model.find_unused_parameters or join_of(ddp_model) is self._join

    def _prepared(self, runtime: Runtime) -> Callable[[], None]:
        runtime.follow(self._runtime)
        runtime.is_waiting = False
        buckets, ddp_model = self._new_buckets(runtime), self._model()
        assert ddp_model is not None
        if self._needs_hook(runtime.plan):
            buckets.prepare(self._buckets if self._next_buckets is None else self._next_buckets)

        def install() -> None:
            had_hook, self._next_buckets = self._has_hook, None
            self._take(buckets)
            if self._has_hook and not had_hook:
                self._use_hook(ddp_model)
            elif had_hook and not self._has_hook:
                release_comm_hook(ddp_model)
            self._follow_steps()

        return install

    def _abandon_change(self) -> None:
        if self._next_buckets is not None:
            self._next_buckets = None
            if (ddp_model := self._model()) is not None:
                release_comm_hook(ddp_model)
            self._follow_steps()
        super()._abandon_change()

    # ---------------------------------------------------------------- the hook

    def _use_hook(self, ddp_model: DistributedDataParallel) -> None:
        handler = Handler(self._synchronise, self._before_waiting, self._end_hooked_step, self._synchronise_zeros)
        use_comm_hook(ddp_model, self.parameters().values(), handler)

    def _begun_buckets(self, first: bool) -> DdpBuckets:
        """The buckets whose runtime synchronises the step that has begun."""
        buckets = self._buckets if self._next_buckets is None else self._next_buckets
        if first:
            buckets.runtime.unused.begin()
            if buckets.runtime.step == 0:
                buckets.runtime.first_is_dense = will_rebuild_buckets(self._model())
        return buckets

    def _synchronise(self, bucket: GradBucket, first: bool) -> Future[Outcome]:
        # a hook that raises leaves DDP in the middle of its buckets, and the next forward fails at an assertion
        buckets = self._begun_buckets(first)
        if (problem := buckets.runtime.problem) is not None:
            return failed_future(problem)
        try:
            return buckets.send(bucket, first, None if self._used is None else self._used.ids)
        except UnplannedError as error:
            return failed_future(error)

    def _before_waiting(self) -> None:
        buckets = self._buckets if self._next_buckets is None else self._next_buckets
        buckets.runtime.release()

    def _end_hooked_step(self) -> None:
        if self._next_buckets is None:
            self._runtime.end_step()
            self._restore_unused()
        else:
            self._end_shown_step(self._next_buckets)
            self._shows_buckets = not will_rebuild_buckets(self._model())
        self._end_step()

    def _restore_unused(self, later: bool = False) -> None:
        """Undo the step for parameters that DDP says no rank has used."""
        ddp_model = self._model()
        if self._used is not None and ddp_model is not None:
            # the memory in which the answer of all ranks is, or will be; DDP does not lend it to a hook
            used, numbers, unused = ddp_model.reducer._get_local_used_map(), self._numbers, self._runtime.unused
            self._used.ids.clear()
            (unused.restore_later if later else unused.restore)(lambda key: used[numbers[key]])

    def _end_shown_step(self, buckets: DdpBuckets) -> None:
        """Count a step that the runtime of the next plan has averaged, to see the buckets."""
        buckets.runtime.end_step()
        self._runtime.step += 1

    @property
    def _may_be_uneven(self) -> bool:
        """Whether some ranks may have no inputs in a step, because of DDP's ``join()``."""
        ddp_model = self._model()
        return ddp_model is not None and in_join(ddp_model)

    def _synchronise_zeros(self, bucket: GradBucket, first: bool, last: bool) -> Future[Outcome]:
        """Take part in a step of the other ranks with a gradient of zeros, and send what residuals hold."""
        buckets = self._begun_buckets(first)
        runtime = buckets.runtime
        if (problem := runtime.problem) is not None:
            return failed_future(problem)
        votes = any(not unit.in_place and not unit.compressor.traits.averages for unit in runtime.plan.units)
        if votes or self._request.enabled_scaler is not None:
            runtime.close()  # so that the others do not wait
            raise RuntimeError(_NO_INPUTS)
        sent = buckets.send_zeros(bucket, first, last, may_be_unused=self._used is not None)
        if last:
            if buckets is self._next_buckets:
                self._end_shown_step(buckets)
            else:
                runtime.end_step()
                self._restore_unused(later=True)  # DDP exchanges what was used behind the buckets
            self._meet_uneven_steps()
            self._on_step_end()
            self._continue_change()
        return sent

    def launch_late(self, before: Before | None) -> None:
        ddp_model, was_late, self._is_late = self._model(), self._is_late, before is not None
        if ddp_model is not None and not self._has_hook and self._next_buckets is None:
            if before is not None:
                average_late(ddp_model, self.parameters().values(), before, self._end_plain_step)
            elif was_late:
                release_comm_hook(ddp_model)
        self._follow_steps()

    def _follow_steps(self) -> None:
        ddp_model = self._model()
        has_hook = self._has_hook or self._next_buckets is not None or self._is_late  # which tells the ends of steps
        wanted = bool(self._listeners) and not has_hook and self._is_open and ddp_model is not None
        if wanted and self._step_ends is None and ddp_model is not None:
            self._step_ends = StepEnds(ddp_model, self.parameters().values(), self._end_plain_step)
        elif not wanted and self._step_ends is not None:
            self._step_ends.remove()
            self._step_ends = None

    def _end_plain_step(self) -> None:
        self._runtime.step += 1
        self._end_step()

    def _end_step(self) -> None:
        ddp_model = self._model()
        if ddp_model is not None and in_join(ddp_model):
            self._meet_uneven_steps()
        super()._end_step()
        if names := self._others.with_gradients():
            raise RuntimeError(
                f"gckernels: DDP does not average the gradient of {listed(names)}, added or thawed since the model was "
                "wrapped, so the ranks would drift apart; wrap the module in a new DistributedDataParallel and attach "
                "to it, or, if it may differ between ranks, name it to DistributedDataParallel."
                "_set_params_and_buffers_to_ignore_for_model before"
            )

    def _meet_uneven_steps(self) -> None:
        """End whatever needs all ranks at the end of a step, because in DDP's ``join()`` some may not have it."""

    def _overlap(self) -> Overlap | None:
        ddp_model = self._model()
        if self._has_hook or ddp_model is None:
            return super()._overlap()
        logged = ddp_model._get_ddp_logging_data()  # type: ignore[no-untyped-call]
        sent_ns, hidden_ns = (logged.get(name, 0) for name in _OVERLAP)
        return Overlap(hidden_ns / 1e9, max(sent_ns - hidden_ns, 0) / 1e9) if sent_ns else None

    @property
    def _averages_now(self) -> bool:
        ddp_model = self._model()
        return ddp_model is not None and ddp_model.require_backward_grad_sync

    # ---------------------------------------------------------------- for the user

    def sent_nbytes_per_step(self) -> float:
        if self._has_hook:
            return super().sent_nbytes_per_step()
        return allreduce_sent_nbytes(self._averaged_nbytes, self._runtime.world_size)

    def close(self) -> None:
        """End the compression, the lanes and the process groups. Every rank calls it, between the same two steps.

        Its hook averages as DDP does from now on. At the end of the next step the model becomes plain DDP, with the
        buckets that it has. A later :func:`~gckernels.sync.attach` takes the model again.

        This needs private functions of DDP, which torch 2.11 to 2.15 have. If a release lacks one, and in ``join()``,
        the model keeps that hook.
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
        self._leave_parked()
        self._claim.release()
        self._others.remove()
        self._ignore_optimizers()
        self._runtime.close()
        self._buckets.clear()
