"""The front end that averages updates: what optimizer steps on each rank have changed of the parameters.

:class:`UpdatesFrontend` measures the update of a round, which has a number of optimizer steps, from the anchors. It is
averaged in the buckets of a bare module, where gradients would lie. The outer optimizer moves the anchors by the mean,
and they become the parameters of the next round. A round may send the model in fragments, one after the other, and the
training may go on for some steps until their means arrive.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from ...communication.agreement import agreed
from ...communication.groups import new_group_of
from ...engine.runtime import Runtime
from ...plans.arguments import differentiable
from ...plans.builders import resumable
from ...plans.plan import Frontend, Plan, UnitPlan
from ...plans.strides import in_reals
from ..checks.hooks import ModelHook, weakly
from ..frontend import UPDATES, ModelFrontend
from ..members import Members
from ..module.buckets import BROADCAST_NBYTES
from ..request import ModuleOptions, Request
from .anchors import Anchors, Arrival
from .lineage import Lineage
from .optimizer_states import check_optimizer, check_tensors, copied, mean_of
from .optimizer_steps import OptimizerSteps
from .schedule import Round
from .site_parameters import own_parameters, values_of, with_elements
from .step_scales import StepScales
from .update_buckets import UpdateBuckets
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
        self._buckets.close()
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
        before = self._buckets

        def install() -> None:
            if self._arriving is not None:
                self._arriving.wait()
            self._take(runtime)
            before.close()

        return install

    def _take(self, runtime: Runtime) -> None:
        """Let a runtime average the updates from now on."""
        self._scales = self.request.scales(self._scales)
        self.runtime = runtime
        self._buckets = UpdateBuckets(runtime, self._members, self._anchors, self.request.schedule.fragments)
        self.averaged_nbytes = self._buckets.averaged_nbytes

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
        self._buckets.close()
        before.close()
        self._end_group()
        self.request, self.group, self.rank, self._made_group = request, group, dist.get_rank(group), group
        replaced = self._anchors.receive(group, self.device, newest.rank)
        # anchors that have the last update of this rank replace all it has; others keep what it alone has done
        followed = {name: each for name, each in self._values().items() if newest.is_ahead or name in replaced}
        self._anchors.hand_out(followed, {} if newest.is_ahead else replaced)
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
        self._arriving = self._buckets.send(running, number, self.calls.deliver)
        self.averaged_nbytes = self._buckets.averaged_nbytes  # other parameters may be trained now
        if not running.delay:
            self._arrive(self._arriving)
        elif self.request.mixing is None:
            self._arriving.sent = {name: each.clone() for name, each in self._existing(self._arriving.means).items()}

    def _existing(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """The values of some parameters, as far as these still exist."""
        existing = self._members.existing()
        return {name: values_of(existing[name]) for name in names if name in existing}

    def _arrive(self, arriving: Arrival) -> None:
        """Move the anchors of a fragment by its means, and replace the parameters by them. Steps since the fragment was
        sent are added, or mixed in."""
        arriving.wait()
        self._anchors.move(arriving.means)
        self._lineage.arrived += 1
        mixing = self.request.mixing if self.request.schedule.delay else None
        self._anchors.hand_out(self._existing(arriving.means), arriving.sent, mixing)
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
