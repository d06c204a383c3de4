"""Limits of compression: the bandwidth up to which compression pays, and the ratio that would be enough."""

from __future__ import annotations

import bisect
import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from gckernels.ops import Identity

from ...planner.choice import POLICIES
from ...planner.drafts.problem import Problem
from ...planner.machines.machine import MachineError
from ...planner.machines.scaling import scaled
from ...planner.timeline.timeline import timeline
from ...plans.plan import Plan, PlanError
from ...programs.steps import ProgramError
from .sweeps import with_faster_links

LOW_BIT_PER_S, HIGH_BIT_PER_S = 1e6, 1e13
MAX_RATIO = 1e5
EXACT = 1.02
"""The ratio of two neighbours among the values that are tried."""
_SEARCHES = 6
NEAR = 1.05
"""A step that takes this many times the least possible is as good as that."""


@dataclass(frozen=True)
class BandwidthLimit:
    """The bandwidth up to which compression pays.

    Attributes:
        bandwidth_bit_per_s: the bandwidth; ``None`` if there is no such bandwidth.
        always_pays: without one, whether compression pays at all bandwidths that were tried, or at none.
    """

    bandwidth_bit_per_s: float | None
    always_pays: bool = False


def bandwidth_limit(pays_with_known: Callable[[float], bool], found_at: Callable[[float], bool]) -> BandwidthLimit:
    """The bandwidth up to which compression pays, by bisection.

    It bisects with the plans that are known, which takes an instant. Then it searches for a plan right above that
    limit. If the search finds one that pays, the plan is known from then on, and bisection goes on above.

    Args:
        pays_with_known: whether a known plan pays at a bandwidth in bits per second. It pays below some limit, and not
            above.
        found_at: searches for a plan at a bandwidth, and says whether it pays; it is then known.
    """
    values = _values(LOW_BIT_PER_S, HIGH_BIT_PER_S)
    if not (pays_with_known(values[0]) or found_at(values[0])):
        return BandwidthLimit(None, False)
    above = 1
    for _ in range(_SEARCHES):
        above = bisect.bisect_left(values, True, lo=above, key=lambda value: not pays_with_known(value))
        if above == len(values):
            return BandwidthLimit(None, True)
        if not found_at(values[above]):
            break
        above += 1
    return BandwidthLimit(values[above - 1])


def _values(low: float, high: float) -> list[float]:
    """Values from ``low`` up to ``high``, each :data:`EXACT` times the one before."""
    return [low * EXACT**number for number in range(1 + math.floor(math.log(high / low, EXACT)))]


@dataclass(frozen=True)
class EnoughRatio:
    """The ratio of compression that would be enough if codecs cost nothing.

    Attributes:
        ratio: as many times fewer bytes bring the step near its least; 1 if it is there without compression.
        step_s: the step with that ratio.
        least_s: the step if nothing were sent but the latencies of collectives.
    """

    ratio: float
    step_s: float
    least_s: float


def enough_ratio(problem: Problem, best: Plan) -> EnoughRatio:
    """The least ratio with which a step takes at most 1.05 times the least possible, by bisection.

    Fewer bytes take as long as the same bytes on faster links. So the steps are those without compression on links that
    are ``ratio`` times as fast, in place or through the programs of the best plan, with codecs that cost nothing.

    Args:
        problem: the problem.
        best: the best plan that is known.
    """
    exact = (replace(unit, compressor=Identity(), feedback=False) for unit in best.units)
    plans = (POLICIES["none"](problem), replace(best, units=tuple(exact), prediction=None))

    def step_s(ratio: float) -> float:
        machine = scaled(with_faster_links(problem.machine, ratio), codec_speed=math.inf)
        pricer, steps = problem.pricer.on(machine), []
        for plan in plans:
            with contextlib.suppress(MachineError, PlanError, ProgramError):
                steps.append(timeline(plan, problem.trace, pricer, problem.frontend).step_s)
        return min(steps)

    least_s, ratios = step_s(MAX_RATIO), _values(1.0, MAX_RATIO)
    at = bisect.bisect_left(ratios, True, hi=len(ratios) - 1, key=lambda ratio: step_s(ratio) <= NEAR * least_s)
    return EnoughRatio(ratios[at], step_s(ratios[at]), least_s)
