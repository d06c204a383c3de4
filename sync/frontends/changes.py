"""Changes of the plan while a training runs, through exact steps that send what residuals hold.

A change is collective, between two steps. The runtime of the new plan is made at once. If some rank holds a gradient
that has not been sent, the old runtime goes on for a step, exactly, and sends that, too. After it all ranks go over to
the new runtime together. There are more such steps while something remains: with a gradient scaler, which may have
skipped the step. Gradient of parameters that these steps do not use is parked (:mod:`.parked`) until it can be sent.

Before they go over, all ranks build the messages of the new runtime for the buckets that they know, and ask each other
whether that has succeeded. A rank without enough memory then leaves all of them with the plan from before.
"""

from __future__ import annotations

import gc
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
import torch.distributed as dist

from ..communication.agreement import Failure, agreed, together
from ..communication.collectives import on_any_rank_each
from ..engine.runtime import Runtime
from ..plans.plan import Plan, UnitPlan
from ..states.resuming import resumable
from .budget import Room, require_room
from .parked import Parked
from .request import Request

T = TypeVar("T")

_USED_WITHIN = 10  # exact steps in which parameters can send what is left, before it is parked
_PATIENCE = 100  # exact steps before a warning


def _refuse(problem: str) -> None:
    raise RuntimeError(f"change_plan: {problem}; the plan from before goes on")


class Changeable(ABC):
    """The plan of an attachment or a synchronizer, and its changes.

    Attributes:
        plan: the plan that runs now.
    """

    plan: Plan
    _runtime: Runtime
    _request: Request
    _is_open: bool
    _following: Runtime | None = None
    _exact_steps = 0  # since the change began
    _parked: Parked | None = None  # gradient that earlier plans have left behind
    _fail: Callable[[str], object]
    _builds_between = False  # whether nothing of the plan that follows may be built in a backward

    @property
    def is_changing(self) -> bool:
        """Whether another plan follows as soon as everything has been sent that the residuals of this one hold."""
        return self._following is not None

    def change_plan(self, plan: Plan) -> None:
        """Let another plan follow, with nothing lost. Every rank calls it with the same plan, between the same two
        steps.

        The next step is exact, and also sends what residuals hold; then the new plan runs. With a gradient scaler there
        are two such steps, and more while the scaler skips them. There are up to 10 while parameters with residuals are
        not used; what these hold then, and what frozen ones hold, is added to their next gradient, whatever the plan.
        If nothing is unsent, the new plan runs at once. Meanwhile :attr:`is_changing` is true, ``plan`` is the old
        plan, and so is that of checkpoints. The plan takes the settings with which the attachment or synchronizer was
        made, such as ``strict`` and ``start_step``.

        Units with the same compressor and program in both plans keep their momenta and low-rank factors; all others
        begin anew. A second call before the change is complete
        replaces the plan that follows; with the plan that runs it ends the change. If plans are found while the model
        is trained, that ends too, and the plan that was given stays.

        Raises:
            TypeError, ValueError, PlanError: the plan is not valid on this rank. Nothing has been changed.
            RuntimeError: the plan is not valid on another rank, or not the same on all of them, or a rank cannot build
                what it needs, or something failed before. Every rank raises.
        """
        self._let_follow(self._agreed(plan))

    def _agreed(self, plan: Plan) -> Plan:
        """The plan as it will run, if it may follow on all ranks. Collective.

        Raises:
            TypeError, ValueError, PlanError, RuntimeError: as :meth:`change_plan`. Nothing has been changed.
        """
        return agreed("change_plan", self._runtime.group, self._runtime.device, lambda: self._check(plan))

    def _check(self, plan: Plan) -> tuple[Plan, Sequence[str]]:
        """The plan as it will run, and texts that must be the same on all ranks.

        Raises:
            TypeError, ValueError, PlanError: the plan is not valid.
            RuntimeError: it is closed, or something failed before.
        """
        if not self._is_open:
            raise RuntimeError("change_plan: it is closed")
        if not isinstance(plan, Plan):
            raise TypeError(f"change_plan: plan must be a Plan, got {type(plan).__name__}")
        if (problem := self._runtime.problem) is not None:
            raise problem
        checked, (summary, *lines) = self._checked(replace(self._request, plan=plan))
        return checked, [f"{summary}, in step {self._runtime.step} of plan {self.plan.fingerprint()[:16]}", *lines]

    def _let_follow(self, plan: Plan, keeps_unsent: bool = True, fail: Callable[[str], object] | None = None) -> None:
        """Let a plan follow that all ranks have agreed on. Collective.

        Args:
            plan: the plan.
            keeps_unsent: whether what residuals hold is sent before.
            fail: called on all ranks with the error if one of them cannot build what the plan needs, such as for want
                of memory; the plan from before goes on. Then nothing is built during a backward. By default such an
                error is raised.
        """
        runtime = self._runtime
        self._abandon_change()
        if plan.fingerprint() == self.plan.fingerprint():
            self.plan = runtime.plan = plan  # with another prediction
            return
        self._fail, self._builds_between = fail or _refuse, fail is not None

        def make() -> Runtime:
            self._following = self._new_runtime(plan)
            return self._following

        if self._made(make) is not None:
            runtime.is_draining = True
            if not keeps_unsent:
                runtime.forget()
            self._go_over()

    def _made(self, make: Callable[[], T]) -> T | None:
        """Things for the plan that follows, which all ranks have made. If one cannot, the change ends. Collective."""
        made = together(self._agreeing_group, self._runtime.device, make)
        if not isinstance(made, Failure):
            return made
        self._abandon_change()
        gc.collect()  # the failed rank has left tensors in cycles
        self._fail(made.text)
        return None

    def _adopt(self, saved: Plan) -> None:
        """Let the plan of a saved job run at once, because its residuals are loaded next. Collective.

        Raises:
            PlanError: its units do not fit the model. Every rank raises.
        """
        plan = self._agreed(resumable(saved, self.parameters(), self._runtime.world_size))
        self._let_follow(plan, keeps_unsent=False)

    def _go_over(self, has_drained: bool = False) -> None:
        """Let the new runtime follow if no rank holds anything that may still be sent. Collective.

        Args:
            has_drained: whether the last step has sent what residuals held of the parameters that it has used.
        """
        runtime, following, parked = self._runtime, self._following, self._parked
        assert following is not None
        units = self.plan.units
        held, returns = runtime.held()
        flags = [*held, returns or (parked is not None and parked.may_return())]
        *held, returns = on_any_rank_each(self._agreeing_group, runtime.device, flags)
        left = [unit for unit, is_held in zip(units, held, strict=True) if is_held]
        trained = {name for name, parameter in self.parameters().items() if parameter.requires_grad}
        waits = any(not trained.isdisjoint(unit.parameters) for unit in left)
        if returns or (waits and not (has_drained and self._exact_steps >= _USED_WITHIN)):
            return
        if not self._is_ready(following):
            return
        install = self._made(lambda: self._prepared_with_room(following))
        if install is not None:
            following.tracer, following.averages_only = runtime.tracer, runtime.averages_only
            following.tracer.ask()  # so that the figures of the new plan do not wait for the next hundredth step
            self._following, self._exact_steps = None, 0
            if left:
                self._park(left)
            install()
            runtime.close()

    @property
    def _can_agree(self) -> bool:
        """Whether all ranks come to the end of this step, so that they may agree there."""
        return True

    def _prepared_with_room(self, runtime: Runtime) -> Callable[[], None]:
        """The result of :meth:`_prepared`. If nothing may be built in a backward, a step must have room beside it."""
        before = Room.of(runtime.device)
        install = self._prepared(runtime)
        if self._builds_between:
            require_room(before, Room.of(runtime.device))
        return install

    @property
    def _agreeing_group(self) -> dist.ProcessGroup:
        """The group over which ranks agree at the end of a step. It is none of DDP's where there is another one: in
        ``join()`` a rank without inputs comes to the end of a step before DDP has sent everything."""
        runtimes = (self._runtime, self._following)
        groups = (None if each is None else each.own_group for each in runtimes)
        return next((group for group in groups if group is not None), self._runtime.group)

    def _continue_change(self) -> None:
        """Go over to the new runtime, if there is one, at the end of a step. Collective."""
        if self._following is None:
            return
        has_drained = self._runtime.changed_residuals
        self._exact_steps += 1
        if self._can_agree:
            self._go_over(has_drained)
        if self._exact_steps == _PATIENCE:
            warnings.warn(
                f"gckernels: the plan has not changed in {_PATIENCE} exact steps: a gradient scaler skips every step, "
                "or the training discards it, or the model is in join()",
                stacklevel=2,
            )

    def _abandon_change(self) -> None:
        """End a change that is not complete; the plan that runs goes on."""
        if self._following is not None:
            self._following.close()
            self._following, self._exact_steps = None, 0
            self._runtime.is_draining = False

    @abstractmethod
    def _checked(self, request: Request) -> tuple[Plan, list[str]]:
        """The plan of a request, and the texts that must be the same on all ranks."""

    @abstractmethod
    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """The parameters whose gradients are averaged, by their plain names in the module."""

    @abstractmethod
    def _park(self, units: Sequence[UnitPlan]) -> None:
        """Keep what the residuals of some units hold until their parameters are used. The units are the same on all
        ranks."""

    @abstractmethod
    def _new_runtime(self, plan: Plan) -> Runtime:
        """A runtime for another plan. Collective."""

    @abstractmethod
    def _is_ready(self, runtime: Runtime) -> bool:
        """Whether a runtime can follow now. If nothing may be built in a backward, the next step first shows the
        buckets for which it needs messages."""

    @abstractmethod
    def _prepared(self, runtime: Runtime) -> Callable[[], None]:
        """Let a runtime continue where the one that runs ends, and build its messages for the buckets that are known.
        Communicates nothing.

        Returns:
            A function that lets the runtime get the gradients from the next step on.
        """
