"""The failures of a tuning, after which it is tried again: later each time, and with one warning for each cause."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

AGAIN_STEPS = 1000
"""Steps from a failure to the next attempt."""
FORGET = 4
"""An attempt is forgotten after as many times the steps for which the next one had to wait."""


@dataclass(frozen=True)
class Allowance:
    """The steps from one attempt to the next. They double with every one, until one is forgotten."""

    least: int  # the steps after the first attempt
    wait: int = 0  # the steps after the last attempt
    since: int | None = None  # the steps since the last attempt; None before the first, which need not wait

    def later(self, steps: int) -> Allowance:
        """The allowance some steps later."""
        return self if self.since is None else replace(self, since=self.since + steps)

    def spent(self) -> Allowance:
        """The allowance after an attempt."""
        forgotten = self.since is None or self.since >= FORGET * self.wait
        return replace(self, wait=self.least if forgotten else 2 * self.wait, since=0)


_NUMBER = re.compile(r"\d[\d.,]*")


@dataclass(frozen=True)
class Retries:
    """The failures so far. All ranks have the same."""

    allowance: Allowance = field(default_factory=lambda: Allowance(AGAIN_STEPS))
    """The steps from one failure to the next attempt. They double, as those between two plans do."""
    at_step: int = 0  # the step of the last failure
    due: int | None = None  # the step of the next attempt; None if nothing has failed since the last plan was found
    causes: frozenset[str] = frozenset()  # the texts of all failures without their numbers

    def after(self, step: int, text: str) -> Retries:
        """The failures with one more, the error ``text`` at a step."""
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
