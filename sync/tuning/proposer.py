"""The protocol of proposers, which find the plans that a tuning tries."""

from __future__ import annotations

from typing import Protocol

from ..communication.agreement import Failure
from ..plans.plan import Plan
from ..traces.model_trace import ModelTrace
from .trials.race import Race
from .trials.rules import Phase
from .trials.training import Steps


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
