"""Time budgets of runs."""

from __future__ import annotations

import os
import time

_VARIABLE = "BENCH_DEADLINE"  # seconds of the monotonic clock, which all processes of a machine share


class Budget:
    """A countdown from ``seconds`` that records the work for which time ran out.

    Attributes:
        left_out: names given to :meth:`allows` that did not fit, in order.
    """

    def __init__(self, seconds: float) -> None:
        self._deadline = time.monotonic() + seconds
        self.left_out: list[str] = []

    @classmethod
    def of_this_process(cls) -> Budget:
        """The budget that this process was started with (see :meth:`environment`), or one hour."""
        return cls(float(os.environ.get(_VARIABLE, time.monotonic() + 3600)) - time.monotonic())

    @property
    def left_s(self) -> float:
        """Seconds until the deadline; 0 after it."""
        return max(0.0, self._deadline - time.monotonic())

    def allows(self, what: str, needs_s: float = 0.0) -> bool:
        """Whether more than ``needs_s`` seconds are left; if not, adds ``what`` to :attr:`left_out`."""
        if self.left_s > needs_s:
            return True
        self.left_out.append(what)
        return False

    def environment(self) -> dict[str, str]:
        """The environment variable that gives a child process this budget."""
        return {_VARIABLE: str(self._deadline)}
