"""Caveats: how exact predictions are, which part of a step they cover, and everything that was not measured."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gckernels.compressor import Compressor
from gckernels.sync.plans.names import short_spec
from gckernels.sync.plans.numbers import duration, plural, whole_percent
from gckernels.sync.traces.model_trace import ModelTrace

from ...drafts.problem import Problem
from ...machines.description import Description
from ...machines.machine import Machine
from ...machines.profile import Profile
from .outcome import Part, bad_data

NOTED = 4  # prices that are named


@dataclass(frozen=True)
class Band:
    """The range in which predicted times are expected, and what they are times of."""

    estimated: bool  # whether the machine is described and not measured
    margin: float  # the relative error of its predictions
    whole_step: bool
    """Whether times are those of whole steps. Otherwise the trace has no forward and no optimizer, and they are those
    of backward and synchronisation alone."""
    every: int | None = None  # the steps of the rounds that times are of; None if they are of single steps

    @staticmethod
    def of(problem: Problem) -> Band:
        """The band of predictions for a problem."""
        machine, every = problem.machine, None if problem.rounds is None else problem.rounds.every
        return Band(machine.estimated, machine.margin, problem.step.is_whole_step, every)

    @property
    def subject(self) -> str:
        """The name of the times, in a sentence."""
        if self.every is not None:
            return f"a round of {plural(self.every, 'step')}"
        return "a step" if self.whole_step else "backward and synchronisation"

    @property
    def takes(self) -> str:
        """The begin of a sentence that goes on with a time."""
        return f"{self.subject} {'takes' if self.whole_step or self.every is not None else 'take'}"

    @property
    def column(self) -> str:
        """The title of a column of times."""
        if self.every is not None:
            return "round"
        return "step" if self.whole_step else "backward and sync"

    def text(self, seconds: float) -> str:
        """Words to stand behind a predicted time, such as ``"estimated: 75.0 to 125 ms"``."""
        low, high = (duration(seconds * (1 + sign * self.margin)) for sign in (-1, 1))
        number, _, unit = low.partition(" ")
        word = "estimated" if self.estimated else "expected"
        return f"{word}: {number if high.endswith(f' {unit}') else low} to {high}"

    def part(self) -> Part:
        """The band, with sentences about all times of an output if they are not those of whole steps on a measured
        machine."""
        found = []
        if not self.whole_step:
            found.append(
                "The trace has neither forward nor optimizer: times are of backward and synchronisation alone, and a "
                "whole step gains less."
            )
        if self.estimated:
            machine = "the machine is described, not measured"
            found.append(f"All times are estimated, +-{whole_percent(self.margin)}: {machine}.")
        record = {"estimated": self.estimated, "margin": self.margin, "whole_step": self.whole_step}
        return Part("\n".join(found) or None, record)


@dataclass(frozen=True)
class Caveats:
    """Everything that results should be read with."""

    problem: Problem  # the problem, which has no compressors that are left out
    allowed: tuple[str, ...]  # the specs of all compressors that are allowed
    unpriced: tuple[str, ...]
    """The specs of the compressors that are left out, because the machine has no good price of them."""
    unusable: Mapping[str, str]
    """For compressors that were named, but that no gradient may use, the reason, by the spec."""

    @property
    def assumptions(self) -> list[str]:
        """The prices that were asked for so far, and were not measured as such."""
        machine = self.problem.machine
        return list(machine.assumptions) if isinstance(machine, Profile) else []

    def lines(self) -> list[str]:
        """Sentences for people."""
        name, assumed = self.problem.machine.name, self.assumptions
        more = [f"and {len(assumed) - NOTED} more"] if len(assumed) > NOTED else []
        slips = [*slips_of_trace(self.problem.step), *slips_of_machine(self.problem.machine)]
        left_out = [f"{name}: {self._lacking}, so plans do without; {self._remedy}"] if self.unpriced else []
        bad = self.problem.machine.bad if isinstance(self.problem.machine, Profile) else ()
        if bad:
            left_out.append(f"{name}: disturbed while it was measured: {', '.join(bad)}; predictions with them say so")
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

    def check_price(self, method: Compressor) -> None:
        """Refuse a machine without a good price of a compressor.

        Raises:
            CommandError: it has none.
        """
        if (spec := short_spec(method)) in self.unpriced:
            raise bad_data(f"{self.problem.machine.name}: {_unpriced([spec])}", self._remedy)

    @property
    def _lacking(self) -> str:
        return _unpriced(self.unpriced)

    @property
    def _remedy(self) -> str:
        specs = " ".join(map(shlex.quote, self.allowed))
        return f"gckernels profile --compressors {specs} -o FILE measures all that are allowed"


def _unpriced(specs: Sequence[str]) -> str:
    """The clause that a machine has no good prices of some compressors."""
    exact = " (uncompressed tensors)" if "Identity" in specs else ""
    return f"no reliable price for {', '.join(specs)}{exact}"


_LEAST_RATE, _LONGEST_S = 1e6, 1.0
_RATES = {
    "bit_per_s": "bits per second: 100 Gbit/s are 1e11",
    "byte_per_s": "bytes per second: 900 GB/s are 9e11",
    "byte_per_core_s": "bytes per second: 1 GB/s is 1e9",
}
_SECONDS = "seconds: 10 us are 1e-5"
_SHORTEST_S, _LONGEST_BACKWARD_S, _LARGE = 1e-4, 3600.0, 10**6


def slips_of_machine(machine: Machine) -> list[str]:
    """Sentences about rates and latencies of a description that no link and no device has."""
    found = []
    for path, value in _numbers(machine) if isinstance(machine, Description) else ():
        unit = next((text for end, text in _RATES.items() if path.endswith(end)), None)
        is_slow = unit is not None and value < _LEAST_RATE
        is_long = unit is None and path.endswith("_s") and value > _LONGEST_S
        if is_slow or is_long:
            found.append(f"{machine.name}: {path} is {value:g}, in {unit or _SECONDS}")
    return found


def slips_of_trace(trace: ModelTrace) -> list[str]:
    """A sentence about the time of backward, if no model of that size has it."""
    numel = trace.numel
    if trace.backward_s > _LONGEST_BACKWARD_S or (trace.backward_s < _SHORTEST_S and numel >= _LARGE):
        unit = "ready_us is in microseconds, ready_s and backward_s are in seconds"
        return [f"{trace.model}: backward of {numel:,} elements takes {trace.backward_s:g} s; {unit}"]
    return []


def _numbers(machine: Description) -> Iterator[tuple[str, float]]:
    """The dotted paths and the values of the numbers of a description that have a unit."""
    links = {f"links.{shared.value}": link for shared, link in machine.links.items()}
    parts = {"device": machine.gpu, "host": machine.host, "copies": machine.copies, "overheads": machine.overheads}
    for name, part in (links | parts).items():
        if part is not None:
            yield from ((f"{name}.{key}", value) for key, value in dataclasses.asdict(part).items())
