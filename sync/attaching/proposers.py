"""The proposers of a tuned training."""

from __future__ import annotations

import importlib
from typing import Any

from ..communication.agreement import Failure
from ..plans.plan import Plan
from ..traces.model_trace import ModelTrace
from ..tuning.auto import Auto
from ..tuning.proposer import Proposer
from ..tuning.trials.race import Race
from ..tuning.trials.rules import Phase
from ..tuning.trials.training import Steps, TunedTraining
from ..tuning.uniform_candidates import UniformCandidates


def proposers_of(auto: Auto, training: TunedTraining) -> tuple[Proposer, ...]:
    """The proposers that some settings ask for, those first whose plans are to be tried first."""
    uniform = UniformCandidates(training)
    predicts = auto.predict and training.frontend.can_be_traced
    return (uniform, LaterPlans(training)) if predicts else (uniform,)


class LaterPlans:
    """Predicted plans, whose proposer is imported when it is asked, so that attaching does not wait for the planner.

    Args:
        training: the training.
    """

    needs_trace = True

    def __init__(self, training: TunedTraining) -> None:
        self._training = training
        self._made: Any = None

    def plans(self, stage: Phase, trace: ModelTrace, race: Race) -> Steps[tuple[Plan, ...] | Failure]:
        if self._made is None:
            self._made = importlib.import_module("gckernels.sync.predictive.searching").PredictedPlans(self._training)
        found: tuple[Plan, ...] | Failure = yield from self._made.plans(stage, trace, race)
        return found

    def close(self) -> None:
        if self._made is not None:
            self._made.close()
