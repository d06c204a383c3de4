"""Where compression pays: over the values of sweeps, up to which bandwidth, and which ratio would be enough."""

from __future__ import annotations

import bisect
import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from gckernels.ops import Identity
from gckernels.sync.plans.plan import Plan, PlanError
from gckernels.sync.programs.steps import ProgramError
from gckernels.sync.traces.model_trace import ModelTrace

from ...choice import POLICIES, choose
from ...drafts.problem import Problem
from ...machines.machine import Machine, MachineError
from ...machines.scaling import scaled
from ...timeline.timeline import timeline
from .advice import Advice
from .sweeps import Sweep, with_faster_links

_LIMIT_SEARCHES = 3  # searches that find the limit, about
LOW_BIT_PER_S, HIGH_BIT_PER_S = 1e6, 1e13
MAX_RATIO = 1e5
EXACT = 1.02
"""The ratio of two neighbours among the values that are tried."""
_SEARCHES = 6
NEAR = 1.05
"""A step that takes this many times the least possible is as good as that."""


@dataclass(frozen=True)
class SweepResult:
    """A sweep with the predictions for its values."""

    sweep: Sweep
    points: tuple[Advice, ...]


@dataclass(frozen=True)
class Elsewhere:
    """Where compression pays."""

    sweeps: tuple[SweepResult, ...]
    limit: BandwidthLimit | None = None  # the bandwidth up to which compression pays; None for one rank
    enough: EnoughRatio | None = None  # the ratio that would be enough; None for one rank


def predict(
    problem: Problem,
    here: Advice,
    sweeps: Sequence[Sweep],
    progress: Callable[[float, str], None] = lambda share, text: None,
) -> Elsewhere:
    """The predictions for sweeps around a problem.

    Args:
        here: the prediction for the problem itself, whose policy chooses the plans.
        progress: called with the part that is done.

    Raises:
        MachineError: a machine lacks a price.
    """
    step, machine = problem.step, problem.machine
    total, done = sum(len(sweep.values) for sweep in sweeps) + _LIMIT_SEARCHES, 0
    known = [here]  # for the topology of the problem

    def predicted(step: ModelTrace, machine: Machine, what: str) -> Advice:
        nonlocal done
        progress(min(done / total, 1.0), what)
        done += 1
        pricer = (
            problem.pricer if machine is problem.machine else problem.pricer.on(machine)
        )  # prices of messages are kept
        other = problem.on(step, pricer)
        found = Advice.of(other, choose(other, here.choice.asked, compared=()))
        if machine.topology == problem.topology:
            known.append(found)
        return found

    results = []
    for sweep in sweeps:
        scenes = [(sweep.axis.scene(step, machine, value), sweep.axis.label(value)) for value in sweep.values]
        points = (predicted(*scene, f"{sweep.name} {label}") for scene, label in scenes)
        results.append(SweepResult(sweep, tuple(points)))
    if problem.topology.world_size == 1:
        return Elsewhere(tuple(results))
    exact = POLICIES["none"](problem)

    def pays_with_known(bit_per_s: float) -> bool:
        other = problem.on(step, problem.pricer.on(scaled(machine, bandwidth_bit_per_s=bit_per_s)))
        none_s = other.step_s(exact)
        step_s, best = min(((other.step_s(each.choice.plan), each) for each in known), key=lambda each: each[0])
        margin = max(best.choice.row.margin, best.choice.none.margin)
        return best.compresses and best.memory.fits and other.is_gain(step_s, none_s, margin)

    def found_at(bit_per_s: float) -> bool:
        return predicted(step, scaled(machine, bandwidth_bit_per_s=bit_per_s), "limit").pays

    limit, enough = bandwidth_limit(pays_with_known, found_at), enough_ratio(problem, here.choice.plan)
    return Elsewhere(tuple(results), limit, enough)


# -------------------------------------------------------------------- limits


@dataclass(frozen=True)
class BandwidthLimit:
    """The bandwidth up to which compression pays."""

    bandwidth_bit_per_s: float | None  # the bandwidth; None if there is no such bandwidth
    always_pays: bool = False  # without one, whether compression pays at all bandwidths that were tried, or at none


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
    """The ratio of compression that would be enough if codecs cost nothing."""

    ratio: float  # as many times fewer bytes bring the step near its least; 1 if it is there without compression
    step_s: float  # the step with that ratio
    least_s: float  # the step if nothing were sent but the latencies of collectives


def enough_ratio(problem: Problem, best: Plan) -> EnoughRatio:
    """The least ratio with which a step takes at most 1.05 times the least possible, by bisection.

    Fewer bytes take as long as the same bytes on faster links. So the steps are those without compression on links that
    are ``ratio`` times as fast, in place or through the programs of the best plan, with codecs that cost nothing.

    Args:
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
