"""Changes of the plan while a training runs, through exact steps that send what residuals hold.

A change is collective, between two steps. The runtime of the new plan is made at once. If some rank holds a gradient
that has not been sent, the old runtime goes on for a step, exactly, and sends that, too. After it all ranks go over to
the new runtime together. There are more such steps while something remains: with a gradient scaler, which may have
skipped the step. Gradient of parameters that these steps do not use is parked (:mod:`.parking`) until it can be sent.

Before they go over, all ranks build the messages of the new runtime for the buckets that they know, and ask each other
whether that has succeeded. A rank without enough memory then leaves all of them with the plan from before.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch.distributed as dist

from ..communication.agreement import Failure, agreed, together
from ..communication.collectives import on_any_rank
from ..engine.runtime import Runtime
from ..plans.builders import resumable
from ..plans.plan import Plan
from .checks.optimizer_watches import OptimizerWatches
from .frontend import GRADIENTS, ModelFrontend
from .parking import Parking
from .room import Room, require_room

T = TypeVar("T")

_USED_WITHIN = 10  # exact steps in which parameters can send what is left, before it is parked
_PATIENCE = 100  # exact steps before a warning


def _refuse(problem: str) -> None:
    raise RuntimeError(f"change_plan: {problem}; the plan from before goes on")


class PlanChanges:
    """The plan of an attachment, and its changes.

    Args:
        frontend: the front end, whose runtime executes the plan.
        parking: keeps what plans leave behind.
    """

    def __init__(self, frontend: ModelFrontend, parking: Parking) -> None:
        self._frontend, self._parking = frontend, parking
        self._optimizers = OptimizerWatches(
            frontend.request.enabled_scaler, lambda keys: frontend.runtime.throw_away(keys)
        )
        self._watch()
        self._has_dropped = False  # a discarded step has dropped residuals
        self._following: Runtime | None = None
        self._exact_steps = 0  # since the change began
        self._fail: Callable[[str], object] = _refuse
        self._builds_between = False  # whether the next plan must be built between steps

    @property
    def plan(self) -> Plan:
        """The plan that runs now."""
        return self._frontend.runtime.common_plan

    @property
    def following(self) -> Plan | None:
        """The plan that follows as soon as everything has been sent that the residuals of this one hold."""
        return None if self._following is None else self._following.common_plan

    def agreed(self, plan: Plan) -> Plan:
        """The plan as it will run, if it may follow on all ranks. Collective.

        Raises:
            TypeError, ValueError, PlanError, RuntimeError: as :meth:`~gckernels.sync.Attachment.change_plan`. Nothing
                has been changed.
        """
        runtime = self._frontend.runtime
        return agreed("change_plan", self._frontend.group, runtime.device, lambda: self.checked(plan))

    def checked(self, plan: Plan) -> tuple[Plan, Sequence[str]]:
        """The plan as it will run, and texts that must be the same on all ranks.

        Raises:
            TypeError, ValueError, PlanError: the plan is not valid.
            RuntimeError: the attachment is closed, or something failed before.
        """
        runtime = self._frontend.runtime
        if not self._frontend.is_open:
            raise RuntimeError("change_plan: the attachment is closed")
        if not isinstance(plan, Plan):
            raise TypeError(f"change_plan: plan must be a Plan, got {type(plan).__name__}")
        if (problem := runtime.problem) is not None:
            raise problem
        checked, (summary, *lines) = self._frontend.checked(replace(self._frontend.request, plan=plan))
        return checked, [f"{summary}, in step {runtime.step} of plan {self.plan.fingerprint()[:16]}", *lines]

    def follow(self, plan: Plan, keeps_unsent: bool = True, fail: Callable[[str], object] | None = None) -> None:
        """Let a plan follow that all ranks have agreed on. Collective.

        Args:
            plan: the plan.
            keeps_unsent: whether the residuals are sent before the change.
            fail: called on all ranks with the error if one of them cannot build what the plan needs, such as for want
                of memory; the plan from before goes on. Then nothing is built during a backward. By default such an
                error is raised.
        """
        runtime = self._frontend.runtime
        self.abandon()
        if plan.fingerprint() == self.plan.fingerprint():
            runtime.common_plan = plan  # with another prediction
            return
        self._fail, self._builds_between = fail or _refuse, fail is not None

        def make() -> Runtime:
            self._frontend.settle()
            self._following = self._frontend.new_runtime(plan)
            return self._following

        if self._made(make) is not None:
            runtime.is_draining = True
            if not keeps_unsent:
                runtime.forget()
            self._go_over()

    def adopt(self, saved: Plan) -> None:
        """Let the plan of a saved job run at once, because its residuals are loaded next. Collective.

        Raises:
            PlanError: its units do not fit the model. Every rank raises.
        """
        frontend = self._frontend
        if saved.span != frontend.kind.span():
            saved = saved.for_frontend(frontend.kind)
        plan = self.agreed(resumable(frontend.common(saved), frontend.parameters(), frontend.runtime.world_size))
        self.follow(plan, keeps_unsent=False)

    def end_step(self, has_inputs: bool) -> None:
        """Go over to the plan that follows, if there is one, at the end of a step. Collective.

        Args:
            has_inputs: whether an optimizer of this rank will use the gradients.
        """
        if has_inputs and self._frontend.runtime.changed_residuals:
            self._optimizers.synchronised()
        if self._following is None:
            return
        has_drained = self._frontend.runtime.changed_residuals
        self._exact_steps += 1
        if self._frontend.can_agree:
            self._go_over(has_drained)
        if self._exact_steps == _PATIENCE:
            warnings.warn(
                f"gckernels: the plan has not changed in {_PATIENCE} exact steps: a gradient scaler skips every step, "
                "or the training discards it, or the model is in join()",
                stacklevel=2,
            )

    def abandon(self) -> None:
        """End a change that is not complete; the plan that runs goes on."""
        self._frontend.abandon()
        if self._following is not None:
            self._following.close()
            self._following, self._exact_steps = None, 0
            self._frontend.runtime.is_draining = False

    def close(self) -> None:
        """End a change that is not complete, and all watches."""
        self.abandon()
        self._optimizers.close()

    def discard_step(self) -> None:
        """Let the last step not count. Collective.

        Raises:
            RuntimeError: as :meth:`~gckernels.sync.Attachment.discard_step`.
        """
        frontend = self._frontend

        def check() -> tuple[Runtime, list[str]]:
            if not frontend.is_open:
                raise RuntimeError("discard_step: the attachment is closed")
            if frontend.averaged != GRADIENTS:
                raise RuntimeError("discard_step: updates are part of the parameters, and cannot be discarded")
            if (problem := frontend.runtime.problem) is not None:
                raise problem
            return frontend.runtime, [f"step {frontend.runtime.step}"]

        runtime = agreed("discard_step", frontend.group, frontend.device, check)
        frontend.settle()
        self._optimizers.forget_step()
        is_lost = [runtime.discard_step(), self._parking.discard_step()]
        if any(is_lost) and not self._has_dropped:
            self._has_dropped = True
            warnings.warn(
                "gckernels: discard_step has dropped the residuals, because there is no copy of them from before the "
                "step; with can_discard=True in gckernels.sync.attach they become what they were",
                stacklevel=2,
            )

    # ---------------------------------------------------------------- its parts

    def _watch(self) -> None:
        """Watch the optimizers that use gradients which the plan that runs has averaged."""
        if self._frontend.averaged == GRADIENTS:
            self._optimizers.watch(self.plan, self._frontend.parameters())

    def _made(self, make: Callable[[], T]) -> T | None:
        """Things for the plan that follows, which all ranks have made. If one cannot, the change ends. Collective."""
        made = together(self._agreeing_group, self._frontend.device, make)
        if not isinstance(made, Failure):
            return made
        self.abandon()
        gc.collect()  # the failed rank has left tensors in cycles
        self._fail(made.text)
        return None

    def _go_over(self, has_drained: bool = False) -> None:
        """Let the new runtime follow if no rank holds anything that may still be sent. Collective.

        Args:
            has_drained: whether the last step has sent what residuals held of the parameters that it has used.
        """
        frontend, runtime, following = self._frontend, self._frontend.runtime, self._following
        assert following is not None
        held, returns = runtime.held()
        returns = returns or self._parking.may_return()
        *held, returns = on_any_rank(self._agreeing_group, runtime.device, *held, returns)
        left = [unit for unit, is_held in zip(self.plan.units, held, strict=True) if is_held]
        trained = {name for name, parameter in frontend.parameters().items() if parameter.requires_grad}
        waits = any(not trained.isdisjoint(unit.parameters) for unit in left)
        if returns or (waits and not (has_drained and self._exact_steps >= _USED_WITHIN)):
            return
        if not frontend.is_ready(following, self._builds_between):
            return
        install = self._made(lambda: self._prepared_with_room(following))
        if install is not None:
            following.tracer, following.averages_only = runtime.tracer, runtime.averages_only
            following.tracer.ask()  # so that the figures of the new plan do not wait for the next hundredth step
            self._following, self._exact_steps = None, 0
            if left:
                self._parking.park(left)
            install()
            self._watch()
            runtime.close()

    def _prepared_with_room(self, runtime: Runtime) -> Callable[[], None]:
        """A function that lets the runtime get the gradients, where the present one ends. If nothing may be built in a
        backward, a step must have room beside it."""
        before = Room.of(runtime.device)
        runtime.follow(self._frontend.runtime)
        install = self._frontend.prepared(runtime)
        if self._builds_between:
            require_room(before, Room.of(runtime.device))
        return install

    @property
    def _agreeing_group(self) -> dist.ProcessGroup:
        """The group over which ranks agree at the end of a step. It is none of DDP's where there is another one: in
        ``join()`` a rank without inputs comes to the end of a step before DDP has sent everything."""
        frontend = self._frontend
        if frontend.group is not frontend.runtime.group:
            return frontend.group
        runtimes = (frontend.runtime, self._following)
        groups = (None if each is None else each.own_group for each in runtimes)
        return next((group for group in groups if group is not None), frontend.group)
