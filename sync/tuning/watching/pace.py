"""The pace of a running plan: when it is compared with others again.

A *window* is the median step of :data:`WINDOW` consecutive ones, on the slowest rank. A window is *news* if no step of
the last windows took so long, or so short: then another plan may be faster now. Nothing here measures or communicates,
and all ranks see the same windows, so they come to the same occasions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

WINDOW = 25
"""Steps of a window."""
NEWS = 0.2
"""The relative distance from all windows before from which a window is news."""
SURE = 4.0
"""How many standard errors of a window it must be besides."""
SEEN = 12
"""Windows that are remembered. Another program that comes and goes within them is no news."""
FIRST_GAP, LAST_GAP = 300, 4800
"""Steps from one comparison to the next without news. They double every time."""
DOUBTFUL_GAP = 100
"""Steps to the first comparison after trials that were disturbed."""


class Occasion(Enum):
    """The reason to compare the plan with others."""

    SLOWER = "slower"  # steps take longer than before
    FASTER = "faster"
    DUE = "due"  # the last comparison is long ago

    @property
    def asks(self) -> tuple[bool, bool]:
        """Whether there is news, and whether steps take less time than before."""
        return self is not Occasion.DUE, self is Occasion.FASTER


@dataclass(frozen=True)
class Pace:
    """The windows so far."""

    gap: int = FIRST_GAP  # the steps from the last comparison to the next one without news
    since: int = 0  # the steps since the last comparison
    seen_s: tuple[float, ...] = ()  # the last windows, in seconds

    def after(self, step_s: float, steps: int, error: float) -> tuple[Pace, Occasion | None]:
        """The pace after a window, and the occasion that it is; ``None`` if it is none.

        Args:
            step_s: the median step of the window, in seconds.
            steps: the steps of the window.
            error: the standard error of the median, relative to it.
        """
        seen_s, margin = self.seen_s, 1.0 + max(NEWS, SURE * error)
        later = replace(self, since=self.since + steps, seen_s=(*seen_s, step_s)[-SEEN:])
        if seen_s and step_s > max(seen_s) * margin:
            return later, Occasion.SLOWER
        if seen_s and step_s * margin < min(seen_s):
            return later, Occasion.FASTER
        return later, Occasion.DUE if later.since >= self.gap else None

    def compared(self, occasion: Occasion, changed: bool) -> Pace:
        """The pace after a comparison.

        Args:
            occasion: what it was made for.
            changed: whether another plan runs now, whose windows are unknown.
        """
        gap = min(2 * self.gap, LAST_GAP) if occasion is Occasion.DUE and not changed else FIRST_GAP
        return Pace(gap, 0, () if changed else self.seen_s)
