"""The front end that averages updates: what optimizer steps on each rank have changed of the parameters.

:class:`UpdatesFrontend` measures the update of a round, which has a number of optimizer steps, from the anchors. It is
averaged in the buckets of a bare module, where gradients would lie: anchors take the place of the parameters there. The
outer optimizer moves the anchors by the mean, and they become the parameters of the next round.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch.distributed.utils import _sync_module_states

from ...engine.failures import FailedBucket
from ...engine.runtime import Runtime
from ...plans.arguments import differentiable
from ...plans.plan import Frontend, Plan
from ..checks.hooks import ModelHook, weakly
from ..frontend import UPDATES, ModelFrontend
from ..members import Members
from ..module.buckets import Bucket
from ..module.layouts import Layouts
from ..ownership import refuse_wrapped
from ..request import Request
from .anchors import Anchors, check_tensors, mean_of
from .optimizer_steps import OptimizerSteps
from .updates_request import UpdatesRequest, checked_plan, fitting

_BUCKET_NBYTES = 25 * 2**20
_BROADCAST_NBYTES = 250 * 2**20


class UpdatesFrontend(ModelFrontend):
    """The updates of a model on one rank. Construction is collective. Parameters and buffers of the model become those
    of rank 0."""

    kind = Frontend.MODULE
    averages_gradients: ClassVar[bool] = False
    checked_plan = staticmethod(checked_plan)
    request: UpdatesRequest

    def __init__(self, model: torch.nn.Module, plan: Plan, request: UpdatesRequest) -> None:
        super().__init__(model, plan, request)
        parameters = differentiable(model.named_parameters())
        self._members = Members(model, parameters)
        _sync_module_states(model, self.group, _BROADCAST_NBYTES, 0, set())
        self._anchors = Anchors(parameters, request.outer)
        self._taken = 0  # steps of the round that runs
        self._has_loaded, self._has_begun = False, False
        self._take(self.new_runtime(plan))

    def register(self) -> Sequence[torch.nn.Module]:
        self._steps = OptimizerSteps(self.request.optimizer, self.request.scaler, self._before_step, self._after_step)
        hook, modules = ModelHook(weakly(self._note_load)), self.modules
        self._handles = [
            each.register_load_state_dict_post_hook(hook)  # type: ignore[no-untyped-call]
            for each in modules
        ]
        return modules

    def unregister(self) -> None:
        self._steps.remove()
        for handle in self._handles:
            handle.remove()

    def close(self) -> None:
        """Average nothing any more. The parameters stay as they are, those of this rank alone in the middle of a
        round."""
        super().close()
        self._layouts.close()

    @property
    def modules(self) -> Sequence[torch.nn.Module]:
        return self._members.modules

    @property
    def is_outdated(self) -> bool:
        return self._members.have_changed

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        return self._members.registered()

    @property
    def averages_now(self) -> bool:
        return True

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """A context that changes nothing: backward communicates nothing in any case."""
        return contextlib.nullcontext()

    @property
    def can_be_traced(self) -> bool:
        return False

    # ---------------------------------------------------------------- changes of the plan

    def checked(self, request: Request) -> tuple[Plan, list[str]]:
        return fitting(request, self.parameters())

    def prepared(self, runtime: Runtime) -> Callable[[], None]:
        runtime.follow(self.runtime)
        before = self._layouts

        def install() -> None:
            self._take(runtime)
            before.close()

        return install

    def _take(self, runtime: Runtime) -> None:
        """Let a runtime average the updates from now on."""
        runtime.first_is_dense = False
        self.runtime, self._layouts = runtime, Layouts(runtime, self._anchors.members, _BUCKET_NBYTES)
        self._buckets, self._trained = list[Bucket](), frozenset[str]()
        self._lay_out()

    def _lay_out(self) -> None:
        """Take the buckets for the parameters that are trained now.

        Raises:
            RuntimeError: there are others than the attachment knows.
        """
        trained = self._members.trained()
        if trained is not self._trained:
            self._buckets, self._trained = self._layouts.of(trained), trained
            self.averaged_nbytes = sum(bucket.vector.nbytes for bucket in self._buckets)
            for anchor in self._anchors.values.values():
                anchor.grad = None  # the outer optimizer leaves frozen ones alone

    # ---------------------------------------------------------------- steps

    def _note_load(self, *_: object) -> None:
        self._has_loaded = True

    def _before_step(self) -> None:
        """Raise a RuntimeError if the model has loaded other parameters, which the next mean would undo."""
        if self._has_loaded:
            begins = self._taken == 0 and all(
                torch.equal(self._anchors.begin(name, each), each) for name, each in self.parameters().items()
            )
            if not begins:
                raise RuntimeError(
                    "gckernels: the model has loaded a state_dict since average_updates, whose next mean would undo "
                    "it; load it before average_updates. To resume a training, load_state_dict of the attachment "
                    "brings the parameters as well"
                )
            self._has_loaded = False

    @torch.no_grad()
    def _after_step(self) -> None:
        """Count a step, and end the round if it was the last one. Exact rounds at the start have one step each."""
        self._taken += 1
        if self._taken >= (1 if self.runtime.step < self.runtime.start_step else self.request.every):
            self._average()
            self._taken = 0
            self.calls.end_step(True)

    def _average(self) -> None:
        """Replace the parameters by the anchors, moved by the mean of the updates."""
        if (problem := self.runtime.problem) is not None:
            raise problem
        if not self._has_begun:
            refuse_wrapped(self.request.caller, self.parameters())  # the model may have been since
            self._has_begun = True
        runtime, references = self.runtime, self._members.references
        self._lay_out()
        messages = [bucket.messages.now() for bucket in self._buckets]
        runtime.unused.begin()
        runtime.begin_step()
        futures = []
        for bucket, built in zip(self._buckets, messages, strict=True):
            self._measure(bucket)
            futures.append(runtime.submit(built, bucket.vector))
        runtime.end_step()
        for future in futures:
            outcome = future.wait()
            if isinstance(outcome, FailedBucket):
                raise outcome.error
        self._anchors.outer.step()
        for name in self._trained:
            if (parameter := references[name]()) is not None:
                parameter.copy_(self._anchors.values[name])

    def _measure(self, bucket: Bucket) -> None:
        """Write the updates of a bucket into it, with the sign of gradients."""
        bucket.begin()
        for slot in bucket.slots:
            parameter, anchor = self._members.references[slot.name](), self._anchors.values[slot.name]
            if parameter is None or slot.name not in bucket.expected:
                slot.view.zero_()
                continue
            torch.sub(self._anchors.begin(slot.name, parameter), parameter.to(anchor.dtype), out=slot.view)
            slot.hand_out()
            self.calls.deliver(slot.name, anchor)
            slot.collect(self.runtime.share, all_reduced=self.runtime.is_exact)

    # ---------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The anchors and the outer optimizer; in the middle of a round its position, and the parameters."""
        own = self.parameters() if self._taken else {}
        parameters = {name: each.detach().clone() for name, each in own.items()}
        return {UPDATES: {"taken": self._taken, "parameters": parameters} | self._anchors.state_dict()}

    def read(self, states: Sequence[Mapping[str, Any]]) -> Callable[[], None]:
        found: dict[int, Any] = {state["rank"]: state.get(UPDATES) for state in states}
        for rank, saved in found.items():
            if not isinstance(saved, dict) or type(saved.get("taken")) is not int or saved["taken"] < 0:
                raise ValueError(f"state: of rank {rank}: {UPDATES} must be a dict of average_updates")
            self._anchors.check(saved)
            check_tensors("parameters", saved.get("parameters"), self.parameters() if saved["taken"] else {})
        each = [found[rank] for rank in sorted(found)]
        if len({saved["taken"] for saved in each}) > 1:
            raise ValueError("states: the ranks are not at the same step of a round")
        is_same = len(states) == 1 or len(states) == self.runtime.world_size
        one = found.get(self.rank, each[0]) if is_same else each[0]
        own = one["parameters"] if is_same else mean_of([saved["parameters"] for saved in each])

        @torch.no_grad()
        def take() -> None:
            self._anchors.load(one)
            for name, parameter in self.parameters().items():
                parameter.copy_(own.get(name, self._anchors.values[name].detach()))
            self._taken, self._has_loaded = one["taken"], False

        return take
