"""Proposers, which find the plans that a tuning tries."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from ..communication.agreement import Failure
from ..plans.plan import Plan
from ..traces.model_trace import ModelTrace
from .trials.rules import Phase
from .trials.training import Steps, TunedTraining

if TYPE_CHECKING:
    from .trials.race import Race


class Proposer(Protocol):
    """Proposes plans for trials. Every rank has one, and all of them propose the same plans."""

    def plans(self, stage: Phase, trace: ModelTrace, race: Race) -> Steps[tuple[Plan, ...] | Failure]:
        """Plans that the rule of accuracy allows and that may beat those of the race. Each step of a training that this
        takes is one with the best plan so far. Collective.

        Args:
            stage: the rule of accuracy.
            trace: the model, with times and the errors of compressors if steps were recorded.
            race: the plans that were tried so far, and their times.
        """

    def close(self) -> None:
        """End what is in progress. Further calls do nothing."""


def proposers_of(training: TunedTraining, propose: Callable[[TunedTraining], Proposer] | None) -> tuple[Proposer, ...]:
    """The proposers of a training, those first whose plans are to be tried first.

    Args:
        propose: returns another proposer; ``None`` for uniform plans alone.
    """
    if propose is None or training.frontend.traceable is None:
        return (UniformPlans(training),)
    return UniformPlans(training), propose(training)


class UniformPlans:
    """Plans with one compressor for the whole model. Their proposer is imported when it is asked, so attaching does
    not wait for it."""

    def __init__(self, training: TunedTraining) -> None:
        self._training = training

    def plans(self, stage: Phase, trace: ModelTrace, race: Race) -> Steps[tuple[Plan, ...] | Failure]:
        from . import uniform_candidates as candidates

        found: tuple[Plan, ...] | Failure = yield from candidates.uniform_plans(self._training, stage, trace)
        return found

    def close(self) -> None:
        pass
