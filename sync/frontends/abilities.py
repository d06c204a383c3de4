"""The abilities that only some front ends have. The others return ``None`` where an ability is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from ..plans.plan import UnitPlan

Before = Callable[[Sequence[Sequence[torch.Tensor]]], None]
"""A function that is called before gradients are averaged, with the parameters of every bucket of them."""


class Traceable(Protocol):
    """Lets steps of a model be recorded, from which predictions are made."""

    @property
    def groups_to_trace(self) -> Sequence[Any]:
        """The groups of parameters of a model of FSDP2, whose collectives a recording watches; none of other models."""

    def launch_late(self, before: Before | None) -> None:
        """Send gradients when backward has ended, so that nothing is sent beside it, from the next step on; without
        ``before`` do so no longer. The plan that runs compresses nothing.

        Args:
            before: called before gradients are averaged.
        """


class Elastic(Protocol):
    """Lets ranks come and go, each of which has a state of its own beside its runtime."""

    def regroup(self, ranks: Sequence[int] | None, park: Callable[[Sequence[UnitPlan]], None]) -> None:
        """Average over other ranks from the next step on. Collective over them.

        Args:
            ranks: the ranks of the default group; ``None`` to average with nobody.
            park: keeps what the residuals of units hold, until it can be sent.

        Raises:
            RuntimeError: the state of some ranks does not allow it. Every rank raises.
        """

    @property
    def is_inside(self) -> bool:
        """Whether the parameters of this rank may differ from those of others now."""

    def shared(self) -> AbstractContextManager[None]:
        """A context in which parameters and averaged buffers have the values of the last synchronisation.

        Raises:
            RuntimeError: an optimizer makes a step inside.
        """

    def end_round(self) -> None:
        """Average now what has changed since the last synchronisation, and what is on its way. Collective.

        Raises:
            RuntimeError: a step of the training is not complete, or the average fails.
        """

    def begin_anew(self) -> None:
        """Begin with the parameters that this rank has now, before the first step. Collective."""

    def state_dict(self) -> dict[str, Any]:
        """The entries of a checkpoint of this rank beside the state of its runtime."""

    def read(self, states: Sequence[Mapping[str, Any]]) -> Callable[[], None]:
        """A function that continues from what :meth:`state_dict` has added to states, which the runtime has checked.

        Args:
            states: the state of this rank, or those of all ranks of a job.

        Raises:
            ValueError: the states do not fit the model.
        """
