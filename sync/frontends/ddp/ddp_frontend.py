"""The front end of DistributedDataParallel models.

:class:`DdpFrontend` registers a communication hook. DDP calls it with each bucket of gradients as soon as backward has
filled it; the hook queues the bucket's messages on the engine's lanes and returns a future, so encoding, both phases
of communication and decoding overlap with the rest of backward and with each other.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from ...engine.failures import Outcome, failed_future
from ...engine.runtime import Runtime
from ...plans.plan import Frontend, Plan
from ...plans.strides import in_reals
from ...programs.sizes import allreduce_sent_nbytes
from ..abilities import Before
from ..checks.hooks import weakly
from ..checks.models import ddp_parameters, on_accumulated, on_accumulated_last, watch_for_sparse_gradients
from ..frontend import ModelFrontend, Overlap
from ..members import Members
from ..ownership import attached
from ..request import Request
from .averages import Averages, will_rebuild_buckets
from .ddp_buckets import DdpBuckets, UnplannedError, listed
from .ddp_checks import checked_plan, fitting, refuse_foreign_hook
from .reducer import can_rebuild, comm_hook, release_comm_hook, use_comm_hook
from .step_ends import StepEnds, in_join, join_of

_NO_INPUTS = (
    "gckernels: this rank has no inputs left in join(), so it can neither vote nor follow a gradient scaler; let all "
    "ranks have as many inputs, or close() the attachment before join()"
)
_OVERLAP = ("backward_comm_time", "backward_compute_comm_overlap_time")  # in the logging data of DDP, in nanoseconds


class DdpFrontend(ModelFrontend):
    """The communication hook of a DDP model, with its buckets. Construction is collective.

    If the plan compresses nothing, DDP averages the gradients itself, without a hook.
    """

    kind = Frontend.DDP
    checked_plan = staticmethod(checked_plan)

    @staticmethod
    def groups(ddp_model: DistributedDataParallel, _: object, /) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        return ddp_model.process_group, ddp_model.process_group

    def __init__(self, ddp_model: DistributedDataParallel, plan: Plan, request: Request) -> None:
        super().__init__(ddp_model, plan, request)
        parameters = ddp_parameters(ddp_model)
        self._members = Members(ddp_model.module, parameters)
        self.averaged_nbytes = sum(in_reals(parameter).nbytes for parameter in parameters.values())
        self._model = weakref.ref(ddp_model)
        self._next_buckets: DdpBuckets | None = None  # for the plan that follows, while a step shows them
        self._shows_buckets = False  # whether it has
        self._step_ends: StepEnds | None = None
        self._wants_steps = self._is_late = False
        self._watches: list[RemovableHandle] = []
        self._delivers: dict[str, tuple[RemovableHandle, ...]] = {}
        self._used: set[int] | None = None  # ids of used parameters so far, if a step may leave some unused
        self._numbers: dict[str, int] = {}  # by unit, the number of its parameter
        self._take(self._new_buckets(self.new_runtime(plan)))

    def register(self) -> list[torch.nn.Module]:
        """Let DDP hand over its buckets, if anything is compressed."""
        ddp_model = self._model()
        assert ddp_model is not None
        if self._has_hook:
            self._use_hook(ddp_model)
        attached.add(ddp_model)
        return self.modules

    def unregister(self) -> None:
        """Let the hook average as DDP does from now on. At the end of the next step the model becomes plain DDP, with
        the buckets that it has.

        This needs private functions of DDP, which torch 2.11 to 2.15 have. If a release lacks one, and in ``join()``,
        the model keeps that hook.
        """
        if (ddp_model := self._model()) is not None:
            if self._has_hook:
                release_comm_hook(ddp_model)
            attached.discard(ddp_model)
        self._follow()

    def close(self) -> None:
        super().close()
        for handle in itertools.chain(self._watches, *self._delivers.values()):
            handle.remove()
        self._buckets.clear()

    @property
    def modules(self) -> list[torch.nn.Module]:
        ddp_model = self._model()
        return [] if ddp_model is None else [ddp_model]

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        return self._members.existing()

    def sent_parameters(self) -> dict[str, torch.nn.Parameter]:
        """All parameters, because DDP's buckets keep those that were frozen later."""
        return self.parameters()

    # ---------------------------------------------------------------- changes of the plan

    def checked(self, request: Request) -> tuple[Plan, list[str]]:
        ddp_model = self._model()
        assert ddp_model is not None
        refuse_foreign_hook("change_plan", ddp_model)
        plan, summary = fitting("change_plan", ddp_model, request, self.parameters())
        return plan, [summary, *plan.lines()]

    def new_runtime(self, plan: Plan) -> Runtime:
        ddp_model = self._model()
        assert ddp_model is not None
        self._join = join_of(ddp_model)
        return self.request.runtime(plan, self.parameters(), synchronises=self._needs_hook(plan))

    def is_ready(self, runtime: Runtime, builds_between: bool) -> bool:
        ddp_model, needs_hook = self._model(), self._needs_hook(runtime.plan)
        if ddp_model is None or self._has_hook or not needs_hook:
            return runtime.synchronises or not needs_hook  # in join() the hook stays
        if not builds_between or not can_rebuild(ddp_model):
            return True
        if self._next_buckets is None:
            runtime.is_waiting = True
            self._next_buckets, self._shows_buckets = self._new_buckets(runtime), False
            self._use_hook(ddp_model)
            self._follow()
        return self._shows_buckets and not self._may_be_uneven

    @property
    def can_agree(self) -> bool:
        """Whether all ranks come to the end of this step together. In a ``join()`` that has begun since, a rank without
        inputs comes there before it says to DDP that it has used no parameter, for which the others wait."""
        ddp_model = self._model()
        return ddp_model is None or not ddp_model.find_unused_parameters or join_of(ddp_model) is self._join

    def prepared(self, runtime: Runtime) -> Callable[[], None]:
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
            self._follow()

        return install

    def abandon(self) -> None:
        if self._next_buckets is not None:
            self._next_buckets = None
            if (ddp_model := self._model()) is not None:
                release_comm_hook(ddp_model)
            self._follow()

    def _needs_hook(self, plan: Plan) -> bool:
        """Whether DDP must hand over its buckets."""
        if plan.compresses:  # one rank alone counts its steps, which larger jobs continue
            return True
        ddp_model = self._model()
        if ddp_model is None or comm_hook(ddp_model) is None:
            return False
        return self._may_be_uneven or not can_rebuild(ddp_model)  # a rank without inputs would not rebuild its reducer

    def _new_buckets(self, runtime: Runtime) -> DdpBuckets:
        return DdpBuckets(runtime, self.parameters(), self._model)

    def _take(self, buckets: DdpBuckets) -> None:
        """Let the runtime of these buckets execute its plan."""
        self._buckets, self.runtime, plan = buckets, buckets.runtime, buckets.runtime.plan
        self._has_hook = self._needs_hook(plan)
        for watch in self._watches:
            watch.remove()
        self._watches, self._used = [], None
        if self._has_hook:
            parameters, ddp_model = self.parameters(), self._model()
            self._watches += watch_for_sparse_gradients(parameters)
            if ddp_model is not None and (ddp_model.find_unused_parameters or ddp_model.static_graph):
                self._used = set()
                self._watches += [on_accumulated(each, _adding(self._used)) for each in parameters.values()]
                numbers = {name: number for number, name in enumerate(self._members.references)}  # in DDP's order
                self._numbers = {unit.key: numbers[unit.parameter] for unit in plan.units}

    # ---------------------------------------------------------------- the hook

    def _use_hook(self, ddp_model: DistributedDataParallel) -> None:
        use_comm_hook(ddp_model, self.parameters().values(), self)

    @property
    def _sending(self) -> DdpBuckets:
        """The buckets whose runtime synchronises this step."""
        return self._buckets if self._next_buckets is None else self._next_buckets

    def _begun_buckets(self, first: bool) -> DdpBuckets:
        """The buckets whose runtime synchronises the step that has begun."""
        buckets = self._sending
        if first:
            buckets.runtime.unused.begin()
            if buckets.runtime.step == 0:
                buckets.runtime.first_is_dense = will_rebuild_buckets(self._model())
        return buckets

    def synchronise(self, bucket: GradBucket, first: bool) -> Future[Outcome]:
        # a hook that raises leaves DDP in the middle of its buckets, and the next forward fails at an assertion
        buckets = self._begun_buckets(first)
        if (problem := buckets.runtime.problem) is not None:
            return failed_future(problem)
        try:
            return buckets.send(bucket, first, self._used)
        except UnplannedError as error:
            return failed_future(error)

    def before_waiting(self) -> None:
        self._sending.runtime.release()

    def ended(self) -> None:
        if self._next_buckets is None:
            self.runtime.end_step()
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
            used, numbers, unused = ddp_model.reducer._get_local_used_map(), self._numbers, self.runtime.unused
            self._used.clear()
            (unused.restore_later if later else unused.restore)(lambda key: used[numbers[key]])

    def _end_shown_step(self, buckets: DdpBuckets) -> None:
        """Count a step that the runtime of the next plan has averaged, to see the buckets."""
        buckets.runtime.end_step()
        self.runtime.step += 1

    @property
    def _may_be_uneven(self) -> bool:
        """Whether some ranks may have no inputs in a step, because of DDP's ``join()``."""
        ddp_model = self._model()
        return ddp_model is not None and in_join(ddp_model)

    def follow(self, bucket: GradBucket, first: bool, last: bool) -> Future[Outcome]:
        """Take part in a step of the other ranks with a gradient of zeros, and send what residuals hold."""
        buckets = self._begun_buckets(first)
        runtime = buckets.runtime
        if (problem := runtime.problem) is not None:
            return failed_future(problem)
        votes = any(not unit.in_place and not unit.compressor.traits.averages for unit in runtime.plan.units)
        if votes or self.request.enabled_scaler is not None:
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
            self.calls.end_step(False)
        return sent

    # ---------------------------------------------------------------- steps

    def follow_steps(self, wanted: bool) -> None:
        self._wants_steps = wanted
        self._follow()

    @property
    def traceable(self) -> DdpFrontend:
        return self

    @property
    def groups_to_trace(self) -> tuple[()]:
        return ()

    def launch_late(self, before: Before | None) -> None:
        ddp_model, was_late, self._is_late = self._model(), self._is_late, before is not None
        if ddp_model is not None and not self._has_hook and self._next_buckets is None:
            if before is not None:
                late = Averages(ddp_model, before, functools.partial(self._end_step, plain=True))
                use_comm_hook(ddp_model, self.parameters().values(), late)
            elif was_late:
                release_comm_hook(ddp_model)
        self._follow()

    def _follow(self) -> None:
        ddp_model = self._model()
        has_hook = self._has_hook or self._next_buckets is not None or self._is_late  # which tells the ends of steps
        wanted = self._wants_steps and not has_hook and self.is_open and ddp_model is not None
        if wanted and self._step_ends is None and ddp_model is not None:
            self._step_ends = StepEnds(
                ddp_model, self.parameters().values(), functools.partial(self._end_step, plain=True)
            )
        elif not wanted and self._step_ends is not None:
            self._step_ends.remove()
            self._step_ends = None

    def _end_step(self, plain: bool = False) -> None:
        """Note the end of a step, which the runtime has not seen if it is a plain one."""
        ddp_model = self._model()
        self.runtime.step += plain
        if ddp_model is not None and in_join(ddp_model):
            self._meet_uneven_steps()
        self.calls.end_step(True)
        if ddp_model is not None and (names := self._members.unknown_with_gradients(ddp_model.parameters_to_ignore)):
            raise RuntimeError(
                f"gckernels: DDP does not average the gradient of {listed(names)}, added or thawed since the model was "
                "wrapped, so the ranks would drift apart; wrap the module in a new DistributedDataParallel and attach "
                "to it, or, if it may differ between ranks, name it to DistributedDataParallel."
                "_set_params_and_buffers_to_ignore_for_model before"
            )

    def _meet_uneven_steps(self) -> None:
        self.calls.meet_uneven_steps(self._next_buckets is None)  # otherwise the hook stays, and averages exactly

    @property
    def averages_now(self) -> bool:
        ddp_model = self._model()
        return ddp_model is not None and ddp_model.require_backward_grad_sync

    def no_sync(self) -> AbstractContextManager[None]:
        ddp_model = self._model()
        if ddp_model is None:
            raise RuntimeError("no_sync: the model is gone")
        return ddp_model.no_sync()

    def deliver_to(self, names: Iterable[str]) -> None:
        parameters = self.parameters()
        for name in names:
            if name not in self._delivers:
                deliver = functools.partial(weakly(self._deliver), name)
                self._delivers[name] = on_accumulated_last(parameters[name], deliver)  # no hook has this gradient

    def _deliver(self, name: str, parameter: torch.Tensor) -> None:
        self.calls.deliver(name, parameter)

    def overlap(self) -> Overlap | None:
        ddp_model = self._model()
        if self._has_hook or ddp_model is None:
            return None
        logged = ddp_model._get_ddp_logging_data()  # type: ignore[no-untyped-call]
        sent_ns, hidden_ns = (logged.get(name, 0) for name in _OVERLAP)
        return Overlap(hidden_ns / 1e9, max(sent_ns - hidden_ns, 0) / 1e9) if sent_ns else None

    def sent_nbytes_per_step(self) -> float:
        if self._has_hook:
            return super().sent_nbytes_per_step()
        return allreduce_sent_nbytes(self.averaged_nbytes, self.runtime.world_size)


def _adding(ids: set[int]) -> Callable[[torch.Tensor], None]:
    """The hook of parameters, which refers to none."""
    return lambda parameter: ids.add(id(parameter))
