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
    return (
        (uniform, LaterProposer("gckernels.sync.predictive.searching", "PredictedPlans", training))
        if auto.predict
        else (uniform,)
    )


class LaterProposer:
    """A proposer that is imported when it is asked for plans, so that attaching does not wait for its imports.

    Args:
        module: the name of its module.
        name: the name of its class.
        training: the training.
    """

    needs_trace = True

    def __init__(self, module: str, name: str, training: TunedTraining) -> None:
        self._module, self._name, self._training = module, name, training
        self._made: Any = None

    def plans(self, stage: Phase, trace: ModelTrace, race: Race) -> Steps[tuple[Plan, ...] | Failure]:
        if self._made is None:
            self._made = getattr(importlib.import_module(self._module), self._name)(self._training)
        found: tuple[Plan, ...] | Failure = yield from self._made.plans(stage, trace, race)
        return found

    def close(self) -> None:
        if self._made is not None:
            self._made.close()
