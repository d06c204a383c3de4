"""The front end that averages updates: what optimizer steps on each rank have changed of the parameters.

:class:`UpdatesFrontend` measures the update of a round, which has a number of optimizer steps, from the anchors. It is
averaged in the buckets of a bare module, where gradients would lie. The outer optimizer moves the anchors by the mean,
and they become the parameters of the next round. A round may send the model in fragments, one after the other, and the
training may go on for some steps until their means arrive.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from ...communication.agreement import agreed, named
from ...communication.collectives import broadcast_text, on_any_rank
from ...communication.groups import new_group_of
from ...engine.runtime import Runtime
from ...plans.builders import resumable
from ...plans.plan import Frontend, Plan, UnitPlan
from ...plans.strides import in_reals
from ..checks.hooks import ModelHook, weakly
from ..frontend import ModelFrontend
from ..request import ModuleOptions, Request
from ..silence import silence_of
from .anchors import Arrival
from .schedule import Round
from .site_parameters import values_of
from .update_buckets import UpdateBuckets
from .updates_request import UpdatesRequest, checked_plan, fitting
from .updates_state import UpdatesState


class UpdatesFrontend(UpdatesState):
    """The updates of a model on one rank. Construction is collective. Parameters and buffers of the model become those
    of rank 0."""

    kind = Frontend.MODULE
    checked_plan = staticmethod(checked_plan)

    @staticmethod
    def groups(model: Any, process_group: dist.ProcessGroup | None, /) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        """By default the replicas of a model that has some, and otherwise all ranks."""
        if process_group is None and (silence := silence_of(model)) is not None:
            process_group = silence.group
        return ModelFrontend.groups(model, process_group)

    def __init__(self, model: torch.nn.Module, plan: Plan, request: UpdatesRequest) -> None:
        super().__init__(model, plan, request)
        self._made_group: dist.ProcessGroup | None = None
        self._has_begun, self._has_failed = False, False
        self._gradients: dict[str, torch.Tensor] = {}
        self._take(self.new_runtime(plan))

    def register(self) -> Sequence[torch.nn.Module]:
        if self.request.silence is not None:
            self.request.silence.begin()
        self._steps.watch()
        hook, modules = ModelHook(weakly(self._note_load)), self.modules
        self._handles = [
            each.register_load_state_dict_post_hook(hook)  # type: ignore[no-untyped-call]
            for each in modules
        ]
        return modules

    def unregister(self) -> None:
        self._steps.remove()
        if self.request.silence is not None:
            self.request.silence.end()
        for handle in self._handles:
            handle.remove()

    def close(self) -> None:
        """Average nothing any more. The parameters stay as they are, those of this rank alone in the middle of a
        round."""
        arriving, self._arriving = self._arriving, None
        if arriving is not None and not self._has_failed:
            with contextlib.suppress(RuntimeError):  # nobody will use it
                arriving.wait()
        super().close()
        self._buckets.close()
        self._end_group()

    @property
    def modules(self) -> Sequence[torch.nn.Module]:
        return self._members.modules

    @property
    def is_outdated(self) -> bool:
        return self._members.have_changed

    def numels(self) -> dict[str, int]:
        return {name: in_reals(each).numel() for name, each in self._values().items()}

    def sent_parameters(self) -> dict[str, torch.nn.Parameter]:
        sent = super().sent_parameters()
        return {name: torch.nn.Parameter(values_of(each)) for name, each in sent.items()}

    @property
    def averages_now(self) -> bool:
        return True

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """A context that changes nothing: backward communicates nothing in any case."""
        return contextlib.nullcontext()

    @property
    def elastic(self) -> UpdatesFrontend:
        return self

    # ---------------------------------------------------------------- changes of the plan

    def checked(self, request: Request) -> tuple[Plan, list[str]]:
        plan, lines = fitting(request, self.parameters())
        return plan, [*lines, *self._round_buffers.lines]

    def prepared(self, runtime: Runtime) -> Callable[[], None]:
        before = self._buckets

        def install() -> None:
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
        outer, tensors = agreed("regroup", group, self.device, lambda: (self._anchors.outer_written(), [""]))
        newest = self._lineage.newest(group, self.device, self._anchors.values.values(), self._has_failed)
        scales = None if self._scales is None else self._scales.state_dict()
        own_entries = {"plan": self.plan.to_json(), "step": before.next_step, "begun": self._begun, "scales": scales}
        with named(group, "regroup: the plan of the rank with the newest parameters"):
            text = broadcast_text(group, self.device, newest.rank, json.dumps(own_entries | {"outer": outer}))

        def check() -> tuple[tuple[Plan, _Shared], list[str]]:
            shared = _Shared.read(text)
            plan = resumable(Plan.from_json(shared.plan), self.parameters(), dist.get_world_size(group))
            read = self._anchors.outer_read(shared.outer, tensors)
            plan, lines = self.checked(replace(request, plan=plan))
            return (plan, replace(shared, outer=read)), lines

        plan, shared = agreed("regroup", group, self.device, check)
        following = request.runtime(plan, self.parameters())
        if before.problem is not None:
            before.forget()
        park(before.plan.units)
        self._buckets.close()
        before.close()
        self._end_group()
        self.request, self.group, self.rank, self._made_group = request, group, dist.get_rank(group), group
        replaced = self._anchors.receive(group, self.device, newest.rank, shared.outer)
        # anchors that have the last update of this rank replace all it has; others keep what it alone has done
        followed = {name: each for name, each in self._values().items() if newest.is_ahead or name in replaced}
        self._anchors.hand_out(followed, {} if newest.is_ahead else replaced)
        self._round_buffers.receive(group, newest.rank)
        self._lineage.follow(newest, self._anchors.values.values())
        self._scales = None
        following.tracer, following.step = before.tracer, shared.step
        self._moved = {*self._anchors.values}
        self._begun, self._taken, self._is_away, self._has_failed = shared.begun, 0, ranks is None, False
        self._take(following)
        if self._scales is not None:
            self._scales.load(shared.scales)

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
            raise RuntimeError("regroup: the attachment is closed")
        if (self._taken or self._steps.begun) and not self._has_failed:
            taken, every = self._taken, self._round.every
            raise RuntimeError(
                f"regroup: {taken} steps of a round of {every} have been made; call it between two rounds"
            )
        return True, [""]

    # ---------------------------------------------------------------- steps

    def _note_load(self, *_: object) -> None:
        self._has_loaded = True

    def _before_step(self, number: int) -> None:
        """Check the parameters, and note where the step of an optimizer begins."""
        if self._has_failed:
            raise self.runtime.problem or RuntimeError("gckernels: a round has failed; regroup lets other ranks go on")
        if self._lent is not None:
            raise RuntimeError(
                "gckernels: an optimizer makes a step in shared() of the attachment, which would be lost"
            )
        self._check_parameters()
        self._moved |= self._members.trained()
        if self._scales is not None and not self._is_away:
            with torch.no_grad():
                self._scales.before_step(self.request.optimizers[number], self.parameters(), self._values())

    def _check_parameters(self) -> None:
        """Raise a RuntimeError if the model has loaded other parameters, which the next mean would undo."""
        if self._has_loaded:
            begins = self._taken == 0 and all(
                torch.equal(self._anchors.begin(name, each), each) for name, each in self._values().items()
            )
            if not begins:
                raise RuntimeError(
                    "gckernels: the model has loaded a state_dict since sync.attach, and the next mean would undo it; "
                    "load it before sync.attach. To resume a training, load_state_dict of the attachment "
                    "brings the parameters as well"
                )
            self._has_loaded = False

    @torch.no_grad()
    def _after_step(self, number: int, ends: bool) -> None:
        """Count a step, if it ends with an optimizer's step. Let a fragment arrive if it is time, and send the next
        one. Exact rounds at the start have one step each, and send all fragments together."""
        if self._is_away:
            return
        if self._scales is not None:
            self._scales.after_step(self.parameters(), self._values())
            self._note_gradients(number)
        if not ends:
            return
        self._has_failed = True  # unless it comes to its end
        running = self._round
        self._taken += 1
        gradients, self._gradients = self._gradients, {}
        if self._scales is not None and self._taken >= running.every:
            self._scales.measure(gradients, self._values())
        if (arriving := self._arriving) is not None:
            arriving.left -= 1
            if arriving.left <= 0:
                self._arrive(arriving)
        fragment = running.sent_after(self._taken)
        if self._taken >= running.every:
            self._begun, self._taken = self._begun + self._taken, 0
        if fragment is not None:
            self._send(running, fragment)
        if self._scales is not None:
            self._scales.end_measuring()
        self._has_failed = False

    @torch.no_grad()
    def end_round(self) -> None:
        """Average now what the round that runs has changed, and what is on its way. Collective.

        Raises:
            RuntimeError: a step of the training is not complete, or the model has loaded other parameters, or the
                average fails.
        """
        if not self.is_open or not self.is_inside or self._is_away:
            return
        if self._steps.begun:
            raise RuntimeError("end_round: some optimizers have made their part of a step, and others have not")
        self._check_parameters()
        self._has_failed = True  # unless it comes to its end
        if (arriving := self._arriving) is not None:
            self._arrive(arriving)
        self._begun, self._taken = self._begun + self._taken, 0
        self._send(Round(), 0)
        self._has_failed = False

    def _note_gradients(self, number: int) -> None:
        """Note the gradients with which an optimizer has stepped in the last step of a round. They may be cleared
        before another one steps."""
        if self._taken + 1 >= self._round.every:
            stepped = {id(each) for group in self.request.optimizers[number].param_groups for each in group["params"]}
            named = self.parameters().items()
            self._gradients |= {
                name: each.grad for name, each in named if id(each) in stepped and each.grad is not None
            }

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
        self._arriving = self._buckets.send(running, number, self._moved_and_frozen(), self.calls.deliver)
        if number == running.fragments - 1:
            self._arriving.buffers = self._round_buffers.send(self.group)
        self.averaged_nbytes = self._buckets.averaged_nbytes  # other parameters may be trained now
        if not running.delay:
            self._arrive(self._arriving)
        elif self.request.mixing is None:
            self._arriving.sent = {name: each.clone() for name, each in self._existing(self._arriving.means).items()}

    def _moved_and_frozen(self) -> frozenset[str]:
        """The frozen parameters that differ from their anchors on some rank, because they were trained before in the
        round, or still have gradients. They are sent as well, or ranks would keep them different for ever."""
        trained, values, parameters = self._members.trained(), self._values(), self.parameters()
        if not (candidates := sorted((self._moved & self._anchors.values.keys()) - trained)):
            self._moved = {*trained}
            return frozenset()
        flags = []
        for name in candidates:
            is_there = name in values
            differs = is_there and not torch.equal(self._anchors.begin(name, values[name]), values[name])
            flags += [differs, is_there and parameters[name].grad is not None]
        with named(self.group, "the comparison of frozen parameters", candidates):
            flags = on_any_rank(self.group, self.device, *flags)
        pairs = zip(candidates, flags[::2], flags[1::2], strict=True)
        sent, moving = {}, {*trained}
        for name, differs, has_gradient in pairs:
            sent[name] = differs
            moving |= {name} if differs or has_gradient else set()
        self._moved = moving
        return frozenset(name for name, differs in sent.items() if differs)

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
        mixing, trained = self.request.mixing if self.request.schedule.delay else None, self._members.trained()
        own = self._existing(arriving.means)
        frozen = {name: own.pop(name) for name in own.keys() - trained} if mixing is not None else {}
        self._anchors.hand_out(own, arriving.sent, mixing)
        self._anchors.hand_out(frozen, {})  # the mean has all of it
        if arriving.buffers is not None:
            self._round_buffers.arrive(arriving.buffers, self.group)
        self._arriving = None
        self.calls.end_step(True)


@dataclass(frozen=True)
class _Shared:
    """The state that ranks that come together take from the one with the newest anchors.

    Attributes:
        plan: its plan, as JSON.
        step: the number of its next synchronisation.
        begun: the number of its steps before the round that begins.
        scales: its factors of steps, if it has any.
        outer: the state of its outer optimizer.
    """

    plan: Any
    step: int
    begun: int
    scales: dict[str, tuple[float, float]] | None
    outer: Any

    @classmethod
    def read(cls, text: str) -> _Shared:
        """The state that a rank has sent.

        Raises:
            ValueError: it is something else.
        """
        try:
            shared = cls(**json.loads(text))
            numbers = [each for pair in (shared.scales or {}).values() for each in (*pair, len(pair))]
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"what the rank with the newest parameters has sent is damaged: {error}") from error
        counts = type(shared.step) is int and shared.step >= 0 and type(shared.begun) is int and shared.begun >= 0
        pairs = all(type(each) in (int, float) for each in numbers) and {*numbers[2::3]} <= {2}
        if not (counts and pairs and isinstance(shared.outer, str)):
            raise ValueError(f"what the rank with the newest parameters has sent is damaged: {text!r:.200}")
        return shared
