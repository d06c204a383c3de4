"""The protocol of front ends, which bring the gradients of a model to an attachment.

A front end takes the gradients of one model from whatever collects them, gives them to a runtime, and says when a step
has ended. There is one for models in DistributedDataParallel (:mod:`.ddp`) and one for bare modules (:mod:`.module`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from ..engine.runtime import Runtime
from ..plans.plan import Frontend, Plan
from .request import Request

Before = Callable[[Sequence[Sequence[torch.Tensor]]], None]
"""A function that is called before gradients are averaged, with the parameters of every bucket of them."""


@dataclass(frozen=True)
class Overlap:
    """The overlap of backward and communication in a step.

    Attributes:
        hidden_s: seconds of communication during backward.
        exposed_s: seconds of waiting after backward.
    """

    hidden_s: float
    exposed_s: float


@dataclass(frozen=True)
class FrontendCalls:
    """The functions of an attachment that its front end calls.

    Attributes:
        end_step: called on all ranks together when the gradients of a step have been averaged.
        end_step_without_inputs: called in its place on a rank that has taken part in a step of the others, in DDP's
            ``join()``.
        meet_uneven_steps: called when some ranks may have fewer steps than others, with whether a change of the plan
            may be abandoned now.
        deliver: called with the name of a parameter and the parameter when its gradient has been accumulated, before it
            is averaged.
        close: ends the attachment, because its model is gone.
    """

    end_step: Callable[[], None]
    end_step_without_inputs: Callable[[], None]
    meet_uneven_steps: Callable[[bool], None]
    deliver: Callable[[str, torch.Tensor], None]
    close: Callable[[], None]


def _nothing(*_: object) -> None:
    pass


NO_CALLS = FrontendCalls(_nothing, _nothing, _nothing, _nothing, _nothing)
"""The functions that a front end calls while it has no attachment, which do nothing."""


class FrontendProtocol(Protocol):
    """A front end of one model on one rank.

    Attributes:
        kind: the kind of model that it serves.
        group: all ranks that average their gradients.
        device: the device of the gradients.
        runtime: executes the plan that runs now.
        is_open: whether it gives gradients to the runtime.
        averaged_nbytes: the bytes of all gradients of a rank.
        modules: the modules in which parameters may be replaced by others.
        is_outdated: whether the model has other parameters now, so that another attachment may take the place of this.
        averages_now: whether a backward averages gradients, and does not only accumulate them.
        can_agree: whether all ranks come to the end of this step, so that they may agree there.
    """

    @property
    def kind(self) -> Frontend: ...
    @property
    def group(self) -> dist.ProcessGroup: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def runtime(self) -> Runtime: ...
    @property
    def is_open(self) -> bool: ...
    @property
    def averaged_nbytes(self) -> int: ...
    @property
    def modules(self) -> Sequence[torch.nn.Module]: ...
    @property
    def is_outdated(self) -> bool: ...
    @property
    def averages_now(self) -> bool: ...
    @property
    def can_agree(self) -> bool: ...

    def open(self, calls: FrontendCalls) -> None:
        """Let the runtime get the gradients from the next backward on."""

    def close(self) -> None:
        """Give the model back, so that its gradients come to the runtime no more. Further calls do nothing."""

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """The parameters whose gradients are averaged, by their plain names in the module."""

    def sent_parameters(self) -> dict[str, torch.nn.Parameter]:
        """The averaged parameters whose gradients are sent now."""

    def follow_steps(self, wanted: bool) -> None:
        """Begin or end to watch the steps of a training that the runtime does not see by itself."""

    def launch_late(self, before: Before | None) -> None:
        """Send gradients when backward has ended, so that nothing is sent beside it, from the next step on; without
        ``before`` do so no longer. The plan that runs compresses nothing.

        Args:
            before: called before gradients are averaged.
        """

    def deliver_to(self, names: Iterable[str]) -> None:
        """Call :attr:`FrontendCalls.deliver` for these parameters from now on; others may come as well."""

    def no_sync(self) -> AbstractContextManager[None]:
        """A context in which gradients are accumulated without being averaged."""

    def overlap(self) -> Overlap | None:
        """The overlap in a step that the runtime has not recorded; ``None`` if it is not known."""

    def sent_nbytes_per_step(self) -> float:
        """The mean number of bytes that this rank has sent per compressed step of the plan; 0 before the first."""

    # ---------------------------------------------------------------- changes of the plan

    def checked(self, request: Request) -> tuple[Plan, list[str]]:
        """The plan of a request, and the texts that must be the same on all ranks.

        Raises:
            TypeError, ValueError, PlanError: the plan is not valid for the model.
        """

    def new_runtime(self, plan: Plan) -> Runtime:
        """A runtime for another plan. Collective."""

    def is_ready(self, runtime: Runtime, builds_between: bool) -> bool:
        """Whether a runtime can follow now.

        Args:
            runtime: the runtime.
            builds_between: whether nothing may be built in a backward. Then the next step may first have to show the
                buckets for which the runtime needs messages.
        """

    def prepared(self, runtime: Runtime) -> Callable[[], None]:
        """Let a runtime continue where the present one ends, and build its messages for the buckets that are known.
        Communicates nothing.

        Returns:
            A function that lets the runtime get the gradients from the next step on.
        """

    def abandon(self) -> None:
        """Forget what :meth:`is_ready` has begun, because its runtime will not follow."""
