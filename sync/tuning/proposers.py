"""Proposers, which find the plans that a tuning tries."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Protocol

from ..communication.agreement import Failure
from ..plans.plan import Plan
from ..traces.model_trace import ModelTrace
from .auto import Auto
from .trials.rules import Phase
from .trials.training import Steps, TunedTraining

if TYPE_CHECKING:
    from .trials.race import Race


class Proposer(Protocol):
    """Proposes plans for trials. Every rank has one, and all of them propose the same plans.

    Attributes:
        needs_trace: whether plain steps must be recorded for it.
    """

    @property
    def needs_trace(self) -> bool: ...

    def plans(self, stage: Phase, trace: ModelTrace, race: Race) -> Steps[tuple[Plan, ...] | Failure]:
        """Plans that the rule of accuracy allows and that may beat those of the race. Each step of a training that this
        takes is one with the best plan so far. Collective.

        Args:
            stage: the rule of accuracy.
            trace: the model, with the errors that are known of compressors, and with times if steps were recorded.
            race: the plans that were tried so far, and their times.
        """

    def close(self) -> None:
        """End what is in progress. Further calls do nothing."""


def proposers_of(auto: Auto, training: TunedTraining) -> tuple[Proposer, ...]:
    """The proposers that some settings ask for, those first whose plans are to be tried first."""
    predicts = auto.predict and training.frontend.can_be_traced
    return (UniformPlans(training), LaterPlans(training)) if predicts else (UniformPlans(training),)


class UniformPlans:
    """Plans with one compressor for the whole model. Their proposer is imported when it is asked, so attaching does
    not wait for it."""

    needs_trace = False

    def __init__(self, training: TunedTraining) -> None:
        self._training = training
        self._made: Any = None

    def imported(self) -> Any:
        """The class of the proposer."""
        return importlib.import_module(".uniform_candidates", __package__).UniformCandidates

    def plans(self, stage: Phase, trace: ModelTrace, race: Race) -> Steps[tuple[Plan, ...] | Failure]:
        if self._made is None:
            self._made = self.imported()(self._training)
        found: tuple[Plan, ...] | Failure = yield from self._made.plans(stage, trace, race)
        return found

    def close(self) -> None:
        if self._made is not None:
            self._made.close()


class LaterPlans(UniformPlans):
    """Predicted plans, of another proposer that is imported when it is asked."""

    needs_trace = True

    def imported(self) -> Any:
        return importlib.import_module("gckernels.planner.predictive.searching").PredictedPlans
