"""Predictions over sweeps: the best step and that without compression, for every value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ...planner.choice import POLICIES, Choice, choose
from ...planner.drafts.problem import Problem
from ...planner.machines.machine import Machine
from ...planner.machines.scaling import scaled
from ...planner.search.significance import is_gain
from ...planner.timeline.pricing import Pricer
from ...planner.timeline.timeline import timeline
from ...traces.model_trace import ModelTrace
from ..common.error_bars import Band
from .advice import compresses
from .closed_form_rows import ClosedFormRow, closed_form_rows
from .crossover import BandwidthLimit, EnoughRatio, bandwidth_limit, enough_ratio
from .memory import PlanMemory
from .sweeps import Sweep

_LIMIT_SEARCHES = 3  # searches that find the limit, about


@dataclass(frozen=True)
class SweepPoint:
    """A prediction.

    Attributes:
        choice: the plan of the policy, and that without compression.
        band: how exact the prediction is.
        memory: the memory for the plan.
    """

    choice: Choice
    band: Band
    memory: PlanMemory

    @property
    def compresses(self) -> bool:
        """Whether the plan compresses anything."""
        return compresses(self.choice.plan)

    @property
    def pays(self) -> bool:
        """Whether compressing pays, and the plan fits."""
        return self.choice.pays and self.compresses and self.memory.fits

    @property
    def gain(self) -> float:
        """How many times as fast a step is as without compression."""
        return self.choice.none.step_s / self.choice.row.step_s if self.choice.row.step_s else 1.0


@dataclass(frozen=True)
class SweepResult:
    """A sweep with the predictions for its values."""

    sweep: Sweep
    points: tuple[SweepPoint, ...]


@dataclass(frozen=True)
class Predictions:
    """Everything that ``gckernels predict`` finds.

    Attributes:
        here: the prediction for the trace and the machine as they are.
        sweeps: the sweeps.
        limit: the bandwidth up to which compression pays; ``None`` for one rank.
        ratio: the ratio that would be enough; ``None`` for one rank.
        closed_forms: the closed forms beside the timeline.
    """

    here: SweepPoint
    sweeps: tuple[SweepResult, ...]
    limit: BandwidthLimit | None
    ratio: EnoughRatio | None
    closed_forms: tuple[ClosedFormRow, ...]


def predict(
    problem: Problem,
    policy: str,
    sweeps: Sequence[Sweep],
    progress: Callable[[float, str], None] = lambda share, text: None,
) -> Predictions:
    """The predictions for a problem and for sweeps around it.

    Args:
        problem: the problem.
        policy: the policy that chooses plans.
        sweeps: the sweeps.
        progress: called with the part that is done.

    Raises:
        MachineError: a machine lacks a price.
    """
    total, done = 1 + sum(len(sweep.values) for sweep in sweeps) + _LIMIT_SEARCHES, 0
    known: list[SweepPoint] = []  # for the trace and the topology of the problem

    def predicted(trace: ModelTrace, machine: Machine, what: str) -> SweepPoint:
        nonlocal done
        progress(min(done / total, 1.0), what)
        done += 1
        found = point(problem, policy, trace, machine)
        if machine.topology == problem.topology:
            known.append(found)
        return found

    def pays_with_known(bit_per_s: float) -> bool:
        other = scaled(machine, bandwidth_bit_per_s=bit_per_s)
        pricer = Pricer(other)
        none_s = timeline(exact, trace, pricer, problem.frontend).step_s
        steps = [(timeline(each.choice.plan, trace, pricer, problem.frontend).step_s, each) for each in known]
        step_s, best = min(steps, key=lambda step: step[0])
        return best.compresses and best.memory.fits and is_gain(step_s, none_s, trace, other.margin)

    trace, machine, exact = problem.trace, problem.machine, POLICIES["none"](problem)
    here = predicted(trace, machine, "here")
    results = []
    for sweep in sweeps:
        points = []
        for value in sweep.values:
            scene = sweep.axis.scene(trace, machine, value)
            points.append(predicted(*scene, f"{sweep.name} {sweep.axis.label(value)}"))
        results.append(SweepResult(sweep, tuple(points)))
    if problem.topology.world_size == 1:
        return Predictions(here, tuple(results), None, None, ())

    def found_at(bit_per_s: float) -> bool:
        return predicted(trace, scaled(machine, bandwidth_bit_per_s=bit_per_s), "limit").pays

    limit = bandwidth_limit(pays_with_known, found_at)
    return Predictions(
        here, tuple(results), limit, enough_ratio(problem, here.choice.plan), tuple(closed_form_rows(problem))
    )


def point(problem: Problem, policy: str, trace: ModelTrace, machine: Machine) -> SweepPoint:
    """The prediction for another trace and machine, with the compressors of a problem."""
    pricer = problem.pricer if machine is problem.machine else Pricer(machine)  # prices of messages are kept
    other = replace(problem, trace=trace, pricer=pricer)
    choice = choose(other, policy, compared=())
    return SweepPoint(choice, Band.of(machine, trace), PlanMemory.of(other, choice.plan))
