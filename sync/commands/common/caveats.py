"""Caveats: everything behind some advice that was not measured."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...planner.machines.machine import Machine
from ...planner.machines.profile import Profile
from ...traces.model_trace import Trace
from .outcome import bad_data
from .unit_hints import slips_of_machine, slips_of_trace

NOTED = 4  # prices that are named


@dataclass(frozen=True)
class Caveats:
    """Everything that results should be read with.

    Attributes:
        trace: the trace.
        machine: the machine.
        allowed: the specs of all compressors that are allowed.
        unpriced: the ones among them that are left out, because the machine has no good price of them.
        unusable: for compressors that were named, but that no gradient may use, the reason, by the spec.
    """

    trace: Trace
    machine: Machine
    allowed: tuple[str, ...] = ()
    unpriced: tuple[str, ...] = ()
    unusable: Mapping[str, str] = field(default_factory=dict)

    @property
    def assumptions(self) -> list[str]:
        """The prices that were asked for so far, and were not measured as such."""
        return list(self.machine.assumptions) if isinstance(self.machine, Profile) else []

    def lines(self) -> list[str]:
        """Sentences for people."""
        name, assumed = self.machine.name, self.assumptions
        more = [f"and {len(assumed) - NOTED} more"] if len(assumed) > NOTED else []
        slips = [*slips_of_trace(self.trace), *slips_of_machine(self.machine)]
        left_out = [f"{name}: {self._lacking}, so plans do without; {self._remedy}"] if self.unpriced else []
        return slips + left_out + [f"{name}: not measured as such: {reason}" for reason in assumed[:NOTED] + more]

    def record(self) -> dict[str, Any]:
        """The same as JSON."""
        return {"unpriced": list(self.unpriced), "unusable": dict(self.unusable), "assumptions": self.assumptions}

    def check(self, path: str) -> None:
        """Refuse a machine without a good price of any compressor that is allowed: advice would mean nothing.

        Args:
            path: the machine as the user has named it.

        Raises:
            CommandError: it has none.
        """
        if self.unpriced and len(self.unpriced) == len(self.allowed):
            raise bad_data(f"{path}: {self._lacking}", self._remedy)

    @property
    def _lacking(self) -> str:
        return f"it has no good price of {', '.join(self.unpriced)}"

    @property
    def _remedy(self) -> str:
        specs = " ".join(map(shlex.quote, self.allowed))
        return f"gckernels profile --compressors {specs} -o FILE measures all that are allowed"
