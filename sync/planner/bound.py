"""The policy ``bound``: the best plan if codecs took no time."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from gckernels.compressor import Compressor

from ..plans.plan import Plan
from ..programs.stages import StageKind
from ..programs.steps import Place
from .auto import auto
from .drafts.problem import Problem
from .machines.derived import DerivedMachine
from .machines.machine import Floats, Price


def bound(problem: Problem) -> Plan:
    """The plan of ``auto`` for the problem of :func:`free_problem`."""
    return auto(free_problem(problem))


def free_problem(problem: Problem) -> Problem:
    """The problem on a machine whose codecs take no time. No plan on the real machine should be faster than on it."""
    return replace(problem, pricer=problem.pricer.on(FreeCodecs(problem.machine)))


@dataclass(frozen=True)
class FreeCodecs(DerivedMachine):
    """A machine whose codecs take no time."""

    @property
    def name(self) -> str:
        return f"{self.base.name}, codecs for nothing"

    @property
    def margin(self) -> float:
        return 0.0

    def codec(
        self, work: StageKind, compressor: Compressor, place: Place, units: Floats, elements: Floats, sources: int
    ) -> Price:
        return Price(np.zeros_like(elements))
