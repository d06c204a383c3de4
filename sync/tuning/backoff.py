"""Failures of a tuning: when it is tried again, and which of them people have been warned of."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from .watching.drift import REPLAN_STEPS, Allowance

_NUMBER = re.compile(r"\d[\d.,]*")


@dataclass(frozen=True)
class Retries:
    """The failures so far. All ranks have the same.

    Attributes:
        allowance: the steps from one failure to the next attempt. They double, as those between two plans do.
        at_step: the step of the last failure.
        due: the step of the next attempt; ``None`` if nothing has failed since the last plan was found.
        causes: the texts of all failures without their numbers.
    """

    allowance: Allowance = field(default_factory=lambda: Allowance(REPLAN_STEPS))
    at_step: int = 0
    due: int | None = None
    causes: frozenset[str] = frozenset()

    def after(self, step: int, text: str) -> Retries:
        """The failures with one more.

        Args:
            step: the step of the failure.
            text: the error.
        """
        allowance = self.allowance.later(step - self.at_step).spent()
        return Retries(allowance, step, step + allowance.wait, self.causes | {_cause(text)})

    def is_known(self, text: str) -> bool:
        """Whether something has failed with the same error before, but for numbers such as times in it."""
        return _cause(text) in self.causes

    def settled(self) -> Retries:
        """The failures when a plan has been found: nothing is tried again."""
        return replace(self, due=None)


def _cause(text: str) -> str:
    return _NUMBER.sub("", text)
