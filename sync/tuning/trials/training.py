"""The view that a tuner has of a training."""

from __future__ import annotations

import logging
from collections.abc import Generator
from typing import TypeAlias, TypeVar

from ...communication.agreement import Disagreement, Failure, together
from ...communication.ranks import Ranks
from ...frontends.changes import PlanChanges
from ...frontends.frontend import ModelFrontend
from ...frontends.listeners import Listeners
from ...plans.plan import Plan
from ...stats.decisions import Decision
from ...stats.stats import Figures
from .sentences import Sentences

T = TypeVar("T")
Steps: TypeAlias = Generator[None, None, T]
"""A part of the tuning that takes some training steps, one for every ``yield``, and returns something."""


class Refused(Exception):
    """Raised on all ranks together if a plan may not follow. The one that runs goes on."""


class NotBuilt(Refused):
    """Raised on all ranks together if they cannot build what a plan needs. The plan that runs goes on."""


class TunedTraining:
    """A training whose plan may change.

    Attributes:
        frontend: the front end of its attachment.
        listeners: called at the end of each synchronised step.
        ranks: all ranks.
    """

    def __init__(self, frontend: ModelFrontend, changes: PlanChanges, figures: Figures, listeners: Listeners) -> None:
        self.frontend, self.listeners, self.ranks = frontend, listeners, Ranks(frontend.group, frontend.device)
        self._changes, self._figures = changes, figures

    @property
    def plan(self) -> Plan:
        """The plan that runs now."""
        return self._changes.plan

    @property
    def steps(self) -> int:
        """The number of synchronised steps."""
        return self._figures.journal.step

    @property
    def policy(self) -> str:
        """The name of the policy that has found the plan."""
        return self._figures.policy()

    def checked(self, plan: Plan) -> Plan:
        """The plan as it will run.

        Raises:
            PlanError, RuntimeError, TypeError, ValueError: it cannot run.
        """
        return self._changes.checked(plan)[0]

    def changed(self, plan: Plan) -> Steps[None]:
        """Let a plan run from the next step on, after the steps that the change takes.

        Raises:
            Refused: a rank refuses the plan.
            NotBuilt: a rank cannot build what it needs, or computes in another way than others.
            RuntimeError: a rank is gone.
        """
        changes = self._changes
        if plan != changes.plan or changes.following is not None:
            checked = together(self.frontend.group, self.frontend.device, lambda: self.checked(plan))
            if isinstance(checked, Failure):
                raise Refused(checked.text)
            failures: list[str] = []
            try:
                agreed = changes.agreed(plan)
            except Disagreement as error:
                raise NotBuilt(str(error)) from error
            changes.follow(agreed, fail=failures.append)
            while changes.following is not None:
                yield
            if failures:
                raise NotBuilt(failures[0])

    def decide(self, decision: Decision) -> None:
        """Log a decision, and keep it."""
        self._figures.decide(decision)

    def say(
        self, sentences: Sentences, plan: Plan | None = None, policy: str | None = None, level: int = logging.INFO
    ) -> None:
        """Decide for a plan without new figures.

        Args:
            plan: the plan; by default the one that runs.
            policy: the policy that has found it; by default that of the plan that runs.
            level: the level of the log.
        """
        fingerprint, policy = (plan or self.plan).fingerprint(), self.policy if policy is None else policy
        self.decide(Decision(self.steps, sentences.log, policy, fingerprint, level=level, short=sentences.page))

    def note_error(self, error: float) -> None:
        """Let samples and figures have ``error`` as the relative error of the gradients."""
        self._figures.journal.error = error
