"""The base of front ends, which bring the gradients of a model to an attachment.

A front end takes the gradients of one model from whatever collects them, gives them to a runtime, and says when a step
has ended. Some are for models in DistributedDataParallel (:mod:`.ddp`), bare modules (:mod:`.module`) and models of
FSDP2 (:mod:`.sharded`); one averages updates in place of gradients (:mod:`.updates`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from ..engine.runtime import Runtime
from ..plans.plan import Frontend, Plan
from ..plans.strides import in_reals
from .abilities import Elastic, Traceable
from .ownership import Claim, keep_alive
from .request import Request


@dataclass(frozen=True)
class Overlap:
    """The overlap of backward and communication in a step."""

    hidden_s: float  # seconds of communication during backward
    exposed_s: float  # seconds of waiting after backward


@dataclass(frozen=True)
class FrontendCalls:
    """The functions of an attachment that its front end calls.

    Attributes:
        end_step: called on all ranks together when the gradients of a step have been averaged, with whether this rank
            has had inputs, or has only taken part in a step of the others, in DDP's ``join()``.
        meet_uneven_steps: called when some ranks may have fewer steps than others, with whether a change of the plan
            may be abandoned now.
        deliver: called with the name of a parameter and the parameter when its gradient has been accumulated, before it
            is averaged.
        close: ends the attachment, because its model is gone.
    """

    end_step: Callable[[bool], None]
    meet_uneven_steps: Callable[[bool], None]
    deliver: Callable[[str, torch.Tensor], None]
    close: Callable[[], None]


def _nothing(*_: object) -> None:
    pass


GRADIENTS, UPDATES = "gradients", "updates"
"""The names of what front ends average; under the latter, states have what front ends of updates keep."""
NO_CALLS = FrontendCalls(_nothing, _nothing, _nothing, _nothing)
"""The functions that a front end calls while it has no attachment, which do nothing."""


class ModelFrontend(ABC):
    """A front end of one model on one rank. Construction is collective.

    Every front end has the abstract members. The others are for models that need more than these.

    Args:
        model: the model, which is not kept.
        plan: the plan that runs first, which all ranks have agreed on.
        request: the settings of the attachment.

    Attributes:
        kind: the kind of model that it serves.
        averaged: what it averages. Optimizers use gradients, and make updates.
        group: all ranks of the model, which agree with each other.
        rank: the rank of this process among them.
        device: the device of the gradients.
        request: as given.
        runtime: executes the plan that runs now.
        averaged_nbytes: the bytes of all gradients of a rank.
        calls: the functions of the attachment.
        is_open: whether it gives gradients to the runtime.
    """

    kind: ClassVar[Frontend]
    averaged: ClassVar[str] = GRADIENTS
    runtime: Runtime
    averaged_nbytes: int

    def __init__(self, model: Any, plan: Plan, request: Request) -> None:
        self.request, self.group, self.device = request, request.everyone, request.device
        self.rank = dist.get_rank(self.group)
        self.calls, self.is_open = NO_CALLS, False
        self._claim: Claim | None = None
        self._let_go: Callable[[], None] = _nothing

    @staticmethod
    def groups(model: Any, process_group: dist.ProcessGroup | None, /) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        """The ranks that average their gradients, and all ranks of the model, which may be more.

        Args:
            model: the model.
            process_group: the ranks that the user has given; ``None`` for all.
        """
        group = process_group or dist.distributed_c10d._get_default_group()
        return group, group

    @staticmethod
    @abstractmethod
    def checked_plan(model: Any, request: Request, /) -> tuple[Plan, list[str]]:
        """The plan of a request for a model that is to be attached, and the texts that must be the same on all ranks.

        Raises:
            TypeError, ValueError, PlanError: the model or the plan is not valid.
        """

    def open(self, calls: FrontendCalls) -> None:
        """Let the runtime get the gradients from the next backward on, and let the model keep the attachment."""
        self.calls = calls
        self._claim = Claim(self.parameters().values(), self, self.modules)
        self._let_go = keep_alive(self.register(), self.model_gone)
        self.is_open = True

    def close(self) -> None:
        """Give the model back, so that its gradients come to the runtime no more. Further calls do nothing."""
        if self._claim is not None:
            self._claim.release()
        if self.is_open:
            self.is_open = False
            self._let_go()
            self.unregister()
        self.runtime.close()
        self.calls = NO_CALLS

    def end(self) -> None:
        """Close the attachment."""
        self.calls.close()

    def model_gone(self) -> None:
        """Close the attachment, because the last of the modules is gone that keep it."""
        self.end()

    @property
    def is_spent(self) -> bool:
        """Whether another attachment may take the place of this one, because ``destroy_process_group`` has ended its
        process group, or the model has other parameters now. Then a new one closes this one, which nobody may have
        kept."""
        try:
            dist.get_rank(self.group)
        except (RuntimeError, ValueError):
            return True
        return self.is_outdated

    @abstractmethod
    def register(self) -> Sequence[torch.nn.Module]:
        """Register the hooks of the model, and return the modules that keep the attachment."""

    @abstractmethod
    def unregister(self) -> None:
        """Remove the hooks of the model."""

    @abstractmethod
    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """The parameters whose gradients are averaged, by their plain names in the module."""

    def numels(self) -> dict[str, int]:
        """The number of elements, in real numbers, that this rank averages of each parameter."""
        return {name: in_reals(parameter).numel() for name, parameter in self.parameters().items()}

    @property
    @abstractmethod
    def averages_now(self) -> bool:
        """Whether a backward averages gradients, and does not only accumulate them."""

    @abstractmethod
    def no_sync(self) -> AbstractContextManager[None]:
        """A context in which gradients are accumulated without being averaged."""

    # ---------------------------------------------------------------- changes of the plan

    @abstractmethod
    def checked(self, request: Request) -> tuple[Plan, list[str]]:
        """The plan of a request, and the texts that must be the same on all ranks.

        Raises:
            TypeError, ValueError, PlanError: the plan is not valid for the model.
        """

    @property
    def plan(self) -> Plan:
        """The plan that runs now, the same on all ranks."""
        return self.runtime.common_plan

    def common(self, plan: Plan) -> Plan:
        """The plan that is the same on all ranks, of which a runtime has saved the part of this rank."""
        return plan

    def new_runtime(self, plan: Plan) -> Runtime:
        """A runtime for another plan. Collective."""
        return self.request.runtime(plan, self.parameters())

    @abstractmethod
    def prepared(self, runtime: Runtime) -> Callable[[], None]:
        """Build the messages of a runtime, which follows the present one, for the buckets that are known. Communicates
        nothing.

        Returns:
            A function that lets the runtime get the gradients from the next step on.
        """

    def is_ready(self, runtime: Runtime, builds_between: bool) -> bool:
        """Whether a runtime can follow now.

        Args:
            runtime: the runtime.
            builds_between: whether nothing may be built in a backward. Then the next step may first have to show the
                buckets for which the runtime needs messages.
        """
        return True

    def abandon(self) -> None:  # noqa: B027 (most begin nothing)
        """Forget what :meth:`is_ready` has begun, because its runtime will not follow."""

    def settle(self) -> None:
        """Wait until nothing is on its way. Called before anything replaces the state or the plan.

        Raises:
            RuntimeError: what was on its way has failed.
        """
        self.runtime.settle()

    # ---------------------------------------------------------------- for some models only

    @property
    def modules(self) -> Sequence[torch.nn.Module]:
        """The modules in which parameters may be replaced by others."""
        return ()

    @property
    def is_outdated(self) -> bool:
        """Whether the model has other parameters now, which cannot join the others."""
        return False

    @property
    def traceable(self) -> Traceable | None:
        """This front end, if steps of the model can be recorded."""
        return None

    @property
    def elastic(self) -> Elastic | None:
        """This front end, if ranks may come and go."""
        return None

    @property
    def can_agree(self) -> bool:
        """Whether all ranks come to the end of this step, so that they may agree there."""
        return True

    def sent_parameters(self) -> dict[str, torch.nn.Parameter]:
        """The averaged parameters whose gradients are sent now: those that are not frozen."""
        return {name: each for name, each in self.parameters().items() if each.requires_grad}

    def follow_steps(self, wanted: bool) -> None:  # noqa: B027 (most runtimes see all)
        """Begin or end to watch the steps of a training that the runtime does not see by itself."""

    def deliver_to(self, names: Iterable[str]) -> None:  # noqa: B027 (most hooks always do)
        """Call :attr:`FrontendCalls.deliver` for these parameters from now on; others may come as well."""

    def overlap(self) -> Overlap | None:
        """The overlap in a step that the runtime has not recorded; ``None`` if it is not known."""
        return None

    def gather_stats(self) -> dict[str, float]:
        """The figures of gathers of parameters, for :meth:`gckernels.sync.Attachment.stats`; none if there are none."""
        return {}

    def sent_nbytes_per_step(self) -> float:
        """The mean number of bytes that this rank has sent per compressed step of the plan; 0 before the first."""
        return self.runtime.sent_nbytes_per_step()
