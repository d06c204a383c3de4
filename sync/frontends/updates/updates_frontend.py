"""The front end that averages updates: what optimizer steps on each rank have changed of the parameters.

:class:`UpdatesFrontend` measures the update of a round, which has a number of optimizer steps, from the anchors. It is
averaged in the buckets of a bare module, where gradients would lie. The outer optimizer moves the anchors by the mean,
and they become the parameters of the next round. A round may send the model in fragments, one after the other, and the
training may go on for some steps until their means arrive.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from ...communication.agreement import agreed
from ...communication.groups import new_group_of
from ...engine.runtime import Runtime
from ...plans.arguments import differentiable
from ...plans.buckets import UPDATE_BUCKET_NBYTES
from ...plans.builders import resumable
from ...plans.plan import Frontend, Plan, UnitPlan
from ...plans.strides import in_reals
from ..checks.hooks import ModelHook, weakly
from ..frontend import UPDATES, ModelFrontend
from ..members import Members
from ..module.buckets import BROADCAST_NBYTES, Bucket, Layouts
from ..request import ModuleOptions, Request
from .anchors import Anchors, Arrival
from .lineage import Lineage
from .optimizer_states import check_optimizer, check_tensors, copied, mean_of
from .optimizer_steps import OptimizerSteps
from .schedule import Round, cut_fragments
from .site_parameters import own_parameters, values_of, with_elements
from .step_scales import StepScales
from .updates_request import UpdatesRequest, checked_plan, fitting


class UpdatesFrontend(ModelFrontend):
    """The updates of a model on one rank. Construction is collective. Parameters and buffers of the model become those
    of rank 0."""

    kind = Frontend.MODULE
    averaged: ClassVar[str] = UPDATES
    checked_plan = staticmethod(checked_plan)
    request: UpdatesRequest

    def __init__(self, model: torch.nn.Module, plan: Plan, request: UpdatesRequest) -> None:
        super().__init__(model, plan, request)
        self._members = Members(model, differentiable(model.named_parameters()))
        values = {name: values_of(each) for name, each in own_parameters(model).items()}
        states = [*values.values(), *(each.detach() for each in model.buffers())]
        dist._broadcast_coalesced(self.group, states, BROADCAST_NBYTES, 0)  # type: ignore[attr-defined]
        self._anchors = Anchors(values, request.outer, request.anchor_device)
        self._begun, self._taken = 0, 0  # the steps before the round that runs, and those of that round
        self._is_away = False  # whether this rank averages with nobody
        self._arriving: Arrival | None = None
        self._lineage = Lineage()
        self._made_group: dist.ProcessGroup | None = None
        self._scales: StepScales | None = None
        self._has_loaded, self._has_begun, self._has_failed = False, False, False
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
        self._arriving = None
        self._layouts.close()
        self._end_group()

    @property
    def modules(self) -> Sequence[torch.nn.Module]:
        return self._members.modules

    @property
    def is_outdated(self) -> bool:
        return self._members.have_changed

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        return with_elements(self._members.registered())

    def numels(self) -> dict[str, int]:
        return {name: in_reals(each).numel() for name, each in self._values().items()}

    def sent_parameters(self) -> dict[str, torch.nn.Parameter]:
        sent = super().sent_parameters()
        return {name: torch.nn.Parameter(values_of(each)) for name, each in sent.items()}

    def _values(self) -> dict[str, torch.Tensor]:
        """The values of the parameters that this rank has, by name."""
        return {name: values_of(each) for name, each in self.parameters().items()}

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
        before = self._layouts

        def install() -> None:
            if self._arriving is not None:
                self._arriving.wait()
            self._take(runtime)
            before.close()

        return install

    def _take(self, runtime: Runtime) -> None:
        """Let a runtime average the updates from now on."""
        runtime.first_is_dense = False
        self._scales = self.request.scales(runtime.plan, self._scales)
        numels, fragments = self.numels().values(), self.request.schedule.fragments
        nbytes = min(UPDATE_BUCKET_NBYTES, 4 * sum(numels) // fragments)
        self.runtime, self._layouts = runtime, Layouts(runtime, self._anchors.members, nbytes)
        self._buckets, self._trained = list[Bucket](), frozenset[str]()
        self._lay_out()

    def _lay_out(self) -> None:
        """Take the buckets for the parameters that are trained now.

        Raises:
            RuntimeError: there are others than the attachment knows.
        """
        trained = self._members.trained()
        if trained is not self._trained:
            self._buckets, self._trained = self._layouts.of(trained.intersection(self._anchors.values)), trained
            nbytes = sum(bucket.vector.nbytes for bucket in self._buckets)
            self.averaged_nbytes = nbytes // self.request.schedule.fragments

    # ---------------------------------------------------------------- members

    def regroup(self, ranks: Sequence[int] | None, park: Callable[[Sequence[UnitPlan]], None]) -> None:
        own, before = dist.get_rank(), self.runtime
        if ranks is not None and (own not in ranks or not {*ranks} <= {*range(dist.get_world_size())}):
            raise ValueError(f"regroup: ranks must be None or ranks of the job, with this one, {own}; got {ranks!r}")
        if before.problem is not None:
            before.close()  # a rank may still wait for this one in the failed round
        group = new_group_of([*{*(ranks or [own])}], self.group, self.device)
        request = replace(self.request, group=group, everyone=group, options=ModuleOptions(group))
        agreed("regroup", group, self.device, self._checked_between_rounds)
        self._end_arrival()
        newest = self._lineage.newest(group, self.device, self._anchors.values.values(), self._has_failed)
        scales = None if self._scales is None else self._scales.state_dict()
        shared = [(self.plan.to_json(), before.next_step, self._begun, scales)]
        dist.broadcast_object_list(shared, group_src=newest.rank, group=group)
        text, step, begun, scales = shared[0]

        def check() -> tuple[Plan, list[str]]:
            plan = resumable(Plan.from_json(text), self.parameters(), dist.get_world_size(group))
            return self.checked(replace(request, plan=plan))

        plan = agreed("regroup", group, self.device, check)
        following = request.runtime(plan, self.parameters())
        if before.problem is not None:
            before.forget()
        park(before.plan.units)
        self._layouts.close()
        before.close()
        self._end_group()
        self.request, self.group, self.rank, self._made_group = request, group, dist.get_rank(group), group
        self._follow_anchors(self._anchors.receive(group, self.device, newest.rank), newest.is_ahead)
        self._lineage.follow(newest, self._anchors.values.values())
        self._scales = None
        following.tracer, following.step = before.tracer, step
        self._begun, self._taken, self._is_away, self._has_failed = begun, 0, ranks is None, False
        self._take(following)
        if self._scales is not None:
            self._scales.load(scales)

    def _end_group(self) -> None:
        """Destroy the group that the last change of members has made."""
        if self._made_group in dist.distributed_c10d._world.pg_map:
            dist.destroy_process_group(self._made_group)
        self._made_group = None

    def _end_arrival(self) -> None:
        """Let a fragment that is on its way arrive now, if it can."""
        arriving, self._arriving = self._arriving, None
        if arriving is not None and not self._has_failed:
            try:
                self._arrive(arriving)
            except RuntimeError:
                self._arriving, self._has_failed = None, True

    def _checked_between_rounds(self) -> tuple[bool, list[str]]:
        """Nothing that ranks must agree on.

        Raises:
            RuntimeError: the group may not change now.
        """
        if not self.is_open:
            raise RuntimeError("regroup: it is closed")
        if self._taken and not self._has_failed:
            taken, every = self._taken, self._round.every
            raise RuntimeError(
                f"regroup: {taken} steps of a round of {every} have been made; call it between two rounds"
            )
        return True, [""]

    @torch.no_grad()
    def _follow_anchors(self, before: Mapping[str, torch.Tensor], is_ahead: bool) -> None:
        """Let the parameters follow the anchors.

        Args:
            before: the anchors from before; only those that have changed.
            is_ahead: whether these have the last update of this rank. Otherwise the parameters keep what this rank
                alone has done.
        """
        for name, values in self._values().items():
            anchor = self._anchors.values[name].detach().to(values.device)
            if is_ahead:
                values.copy_(anchor)
            elif name in before:
                values.copy_(anchor + (values.to(anchor) - before[name].to(anchor)))

    # ---------------------------------------------------------------- steps

    def _note_load(self, *_: object) -> None:
        self._has_loaded = True

    def _before_step(self) -> None:
        """Check the parameters, and note where the step begins."""
        if self._has_failed:
            raise self.runtime.problem or RuntimeError("gckernels: a round has failed; regroup lets other ranks go on")
        self._check_parameters()
        if self._scales is not None and not self._is_away:
            with torch.no_grad():
                self._scales.before_step(self.parameters(), self._values())

    def _check_parameters(self) -> None:
        """Raise a RuntimeError if the model has loaded other parameters, which the next mean would undo."""
        if self._has_loaded:
            begins = self._taken == 0 and all(
                torch.equal(self._anchors.begin(name, each), each) for name, each in self._values().items()
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
        """Count a step. Let a fragment arrive if it is time, and send the next one. Exact rounds at the start have one
        step each, and send all fragments together."""
        if self._is_away:
            return
        self._has_failed = True  # unless it comes to its end
        running = self._round
        self._taken += 1
        if self._scales is not None:
            values = self._values()
            self._scales.after_step(values)
            if self._taken >= running.every:
                grads = {name: each.grad for name, each in self.parameters().items()}
                self._scales.measure({name: each for name, each in grads.items() if each is not None}, values)
        if (arriving := self._arriving) is not None:
            arriving.left -= 1
            if arriving.left <= 0:
                self._arrive(arriving)
        number = running.sent_after(self._taken)
        if self._taken >= running.every:
            self._begun, self._taken = self._begun + self._taken, 0
        if number is not None:
            self._send(running, number)
        if self._scales is not None:
            self._scales.end_measuring()
        self._has_failed = False

    @property
    def _round(self) -> Round:
        """The round that runs."""
        starts = self.runtime.step < self.runtime.start_step
        return Round() if starts else self.request.schedule.round_at(self._begun)

    def _send(self, running: Round, number: int) -> None:
        """Send a fragment; without a delay wait for its mean."""
        if (problem := self.runtime.problem) is not None:
            raise problem
        if not self._has_begun:
            self.request.refuse_averaged(self.parameters())  # the model may have been wrapped since
            self._has_begun = True
        runtime, references = self.runtime, self._members.references
        self._lay_out()
        buckets = cut_fragments(self._buckets, running.fragments)[number]
        messages = [bucket.messages.now() for bucket in buckets]
        runtime.unused.begin()
        runtime.begin_step()
        futures, means, sent = [], dict[str, torch.Tensor](), dict[str, torch.Tensor]()
        for bucket, built in zip(buckets, messages, strict=True):
            means |= self._measure(bucket)
            futures.append(runtime.submit(built, bucket.vector))
        runtime.end_step()
        if running.delay and self.request.mixing is None:
            sent = {name: values_of(each).clone() for name in means if (each := references[name]()) is not None}
        self._arriving = Arrival(means, sent, running.delay, futures)
        if not running.delay:
            self._arrive(self._arriving)

    def _measure(self, bucket: Bucket) -> dict[str, torch.Tensor]:
        """Write the updates of a bucket into it, with the sign of gradients, and return those by name."""
        bucket.begin()
        updates = {}
        for slot in bucket.slots:
            parameter = self._members.references[slot.name]()
            if parameter is None or slot.name not in bucket.expected:
                slot.view.zero_()
                continue
            values = values_of(parameter)
            torch.sub(self._anchors.begin(slot.name, values), values.to(slot.view.dtype), out=slot.view)
            update = slot.view.detach()
            update.grad = slot.view
            self.calls.deliver(slot.name, update)
            slot.scale(self.runtime.share, all_reduced=self.runtime.is_exact)
            updates[slot.name] = slot.view
        return updates

    def _arrive(self, arriving: Arrival) -> None:
        """Move the anchors of a fragment by its means, and replace the parameters by them. Steps since the fragment was
        sent are added, or mixed in."""
        arriving.wait()
        self._anchors.move(arriving.means)
        self._lineage.arrived += 1
        mixing, is_late = self.request.mixing, bool(self.request.schedule.delay)
        for name in arriving.means:
            if (parameter := self._members.references[name]()) is None:
                continue
            values = values_of(parameter)
            anchor = self._anchors.values[name].detach().to(values.device)
            if name in arriving.sent:
                anchor = anchor + (values.to(anchor.dtype) - arriving.sent[name].to(anchor.dtype))
            elif is_late and mixing is not None:
                anchor = torch.lerp(anchor, values.to(anchor.dtype), mixing)
            values.copy_(anchor)
        self._arriving = None
        self.calls.end_step(True)

    # ---------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The anchors and the outer optimizer, the optimizer of this rank, the position in the round, and parameters
        that are not those of the anchors."""
        arriving = None if self._arriving is None else self._arriving.state_dict()
        differ = self._taken or self._is_away or arriving is not None or self.request.schedule.fragments > 1
        own = {"begun": self._begun, "taken": self._taken, "arriving": arriving}
        own["parameters"] = copied(self._values() if differ else {})
        own["optimizer"] = copied(self.request.optimizer.state_dict())
        own["scales"] = None if self._scales is None else self._scales.state_dict()
        own |= {"lineage": self._lineage.state_dict(), "away": self._is_away}
        return {UPDATES: own | self._anchors.state_dict()}

    def read(self, states: Sequence[Mapping[str, Any]]) -> Callable[[], None]:
        parameters, optimizer = self._values(), self.request.optimizer
        found: dict[int, Any] = {state["rank"]: state.get(UPDATES) for state in states}
        for rank, saved in found.items():
            counts = [saved.get(name) for name in ("begun", "taken")] if isinstance(saved, dict) else [None]
            if not all(type(count) is int and count >= 0 for count in counts):
                raise ValueError(f"state: of rank {rank}: {UPDATES} must be a dict of average_updates")
            self._anchors.check(saved)
            check_optimizer("optimizer", saved.get("optimizer"), optimizer)
            differ = saved["taken"] or saved.get("arriving") is not None or saved.get("parameters")
            check_tensors("parameters", saved.get("parameters"), parameters if differ else {})
        each = [found[rank] for rank in sorted(found)]
        if len({(saved["begun"], saved["taken"]) for saved in each}) > 1:
            raise ValueError("states: the ranks are not at the same step of a round")
        is_same = len(states) == 1 or len(states) == self.runtime.world_size
        one = found.get(self.rank, each[0]) if is_same else mean_of(each)
        arriving = None if one.get("arriving") is None else Arrival.read(one["arriving"], parameters)

        @torch.no_grad()
        def take() -> None:
            self._anchors.load(one)
            optimizer.load_state_dict(one["optimizer"])
            for name, parameter in parameters.items():
                parameter.copy_(one["parameters"].get(name, self._anchors.values[name].detach()))
            self._begun, self._taken = one["begun"], one["taken"]
            self._arriving, self._has_loaded = arriving, False
            self._lineage.load(one["lineage"])
            self._is_away = bool(one["away"])
            if self._scales is not None:
                self._scales.load(one.get("scales"))

        return take
