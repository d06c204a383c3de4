"""Predictions over sweeps: the best step and that without compression, for every value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ...planner.choice import POLICIES, choose
from ...planner.drafts.problem import Problem
from ...planner.machines.machine import Machine
from ...planner.machines.scaling import scaled
from ...traces.model_trace import ModelTrace
from .advice import Advice
from .closed_forms import ClosedFormRow, closed_form_rows
from .crossover import BandwidthLimit, EnoughRatio, bandwidth_limit, enough_ratio
from .sweeps import Sweep

_LIMIT_SEARCHES = 3  # searches that find the limit, about


@dataclass(frozen=True)
class SweepResult:
    """A sweep with the predictions for its values."""

    sweep: Sweep
    points: tuple[Advice, ...]


@dataclass(frozen=True)
class Elsewhere:
    """Where compression pays.

    Attributes:
        sweeps: the sweeps.
        limit: the bandwidth up to which compression pays; ``None`` for one rank.
        enough: the ratio that would be enough; ``None`` for one rank.
        closed_forms: the closed forms beside the timeline.
    """

    sweeps: tuple[SweepResult, ...]
    limit: BandwidthLimit | None = None
    enough: EnoughRatio | None = None
    closed_forms: tuple[ClosedFormRow, ...] = ()

    def record(self) -> dict[str, Any]:
        """The predictions as JSON; times are in seconds."""
        sweeps = [
            {
                "name": each.sweep.name,
                "values": each.sweep.values,
                "points": [point.record() for point in each.points],
            }
            for each in self.sweeps
        ]
        return {
            "sweeps": sweeps,
            "limit": self.limit and asdict(self.limit),
            "enough": self.enough and asdict(self.enough),
            "closed_forms": [row.record() for row in self.closed_forms],
        }


def predict(
    problem: Problem,
    here: Advice,
    sweeps: Sequence[Sweep],
    progress: Callable[[float, str], None] = lambda share, text: None,
) -> Elsewhere:
    """The predictions for sweeps around a problem.

    Args:
        problem: the problem.
        here: the prediction for the problem itself, whose policy chooses the plans.
        sweeps: the sweeps.
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
        found = Advice.of(other, choose(other, here.choice.policy, compared=()))
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
        return best.compresses and best.memory.fits and other.is_gain(step_s, none_s)

    def found_at(bit_per_s: float) -> bool:
        return predicted(step, scaled(machine, bandwidth_bit_per_s=bit_per_s), "limit").pays

    limit, enough = bandwidth_limit(pays_with_known, found_at), enough_ratio(problem, here.choice.plan)
    return Elsewhere(tuple(results), limit, enough, tuple(closed_form_rows(problem)))
