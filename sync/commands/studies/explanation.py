"""Explanations of plans: what each message costs, what else it could be, and what the step waits for."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from gckernels.ops import Identity

from ...accuracy.accuracy import candidates
from ...planner.choice import POLICIES
from ...planner.drafts.problem import Problem
from ...planner.machines.machine import MachineError, Shared
from ...planner.machines.scaling import scaled
from ...planner.timeline.launches import launches_of
from ...planner.timeline.pricing import Pricer
from ...planner.timeline.timeline import Timeline, timeline
from ...plans.names import program_name, short_spec
from ...plans.numbers import plural
from ...plans.plan import Frontend, Plan, PlanError
from ...programs.topology import Topology
from ...traces.model_trace import ModelTrace
from ..common.kinds import MAKE_PLAN
from ..common.outcome import bad_data
from .alternatives import UnitAlternative, alternatives
from .chain import ChainPiece, chain_of
from .costs import MessageCost, message_costs
from .sweeps import with_faster_links


@dataclass(frozen=True)
class MessageRow:
    """A message of a plan, and what else it could be.

    Attributes:
        cost: what it costs.
        compressors: the specs of its compressors; empty if it is sent exactly.
        program: the name of its program.
        channel: its channel.
        alternatives: other ways to send it, with the step that each would give; empty if they were not asked for.
    """

    cost: MessageCost
    compressors: tuple[str, ...]
    program: str
    channel: int
    alternatives: tuple[UnitAlternative, ...] = ()


@dataclass(frozen=True)
class Explanation:
    """Why a plan takes as long as it does. All times are in seconds.

    Attributes:
        timeline: the timeline of the plan.
        none_s: a step without compression.
        rows: its messages, in the order of their submission.
        chain: what the step has waited for.
        what_if: for each change of the machine, how long a step with the same plan would take.
    """

    timeline: Timeline
    none_s: float
    rows: tuple[MessageRow, ...]
    chain: tuple[ChainPiece, ...]
    what_if: Mapping[str, float]


def explain(
    problem: Problem, plan: Plan, shown: int, progress: Callable[[float, str], None] = lambda share, text: None
) -> Explanation:
    """The explanation of a plan.

    Args:
        problem: the problem that the plan solves.
        plan: the plan.
        shown: the number of messages, the largest first, that are tried in other ways.
        progress: called with the part that is done.

    Raises:
        PlanError: the plan does not fit the trace.
        MachineError: the machine lacks a price.
    """
    found = judged(problem, plan)
    costs = message_costs(plan, found)
    largest = {cost.number for cost in sorted(costs, key=lambda cost: -cost.nbytes)[:shown]}
    rows = []
    for number, cost in enumerate(costs):
        progress(number / len(costs), "trying other ways")
        tried = tuple(alternatives(problem, plan, cost.keys)) if cost.number in largest else ()
        rows.append(_row(problem, plan, found, cost, tried))
    none_s = judged(problem, POLICIES["none"](problem)).step_s
    return Explanation(found, none_s, tuple(rows), chain_of(found), what_if(problem, plan))


def explain_unit(problem: Problem, plan: Plan, name: str) -> tuple[MessageRow, ...]:
    """The messages of a plan that hold a unit or parts of a parameter.

    Other ways are tried for the unit alone; the rest of its message stays as it is. They include all compressors whose
    error the trace has, allowed or not.

    Raises:
        PlanError: the plan does not fit the trace, or has no such unit.
        MachineError: the machine lacks a price.
    """
    keys = {unit.key for unit in plan.units if name == unit.key or name in unit.parameters}
    if not keys:
        near = difflib.get_close_matches(name, [unit.key for unit in plan.units], n=3) or [plan.units[0].key]
        raise PlanError(f"has no unit {name!r}; it has {', '.join(near)}")
    found = judged(problem, plan)
    tried = tuple(alternatives(problem, plan, keys, candidates(problem.trace)))
    costs = [cost for cost in message_costs(plan, found) if keys & {*cost.keys}]
    return tuple(_row(problem, plan, found, cost, tried) for cost in costs)


def judged(problem: Problem, plan: Plan) -> Timeline:
    """The timeline of a plan, frontend in the only way that it can be, or else as the problem says."""
    return timeline(plan, problem.trace, problem.pricer, plan.made_for or problem.frontend)


def what_if(problem: Problem, plan: Plan) -> dict[str, float]:
    """How long a step with the same plan takes on a machine with twice the bandwidth, and with codecs for nothing."""
    machines = {
        "twice the bandwidth": with_faster_links(problem.machine, 2.0),
        "free codecs": scaled(problem.machine, codec_speed=math.inf),
    }
    return {
        name: timeline(plan, problem.trace, Pricer(machine), problem.frontend).step_s
        for name, machine in machines.items()
    }


def _row(
    problem: Problem, plan: Plan, found: Timeline, cost: MessageCost, tried: tuple[UnitAlternative, ...]
) -> MessageRow:
    mine = [unit for unit in plan.units if unit.key in cost.keys]
    names = dict.fromkeys(short_spec(unit.compressor) for unit in mine if not isinstance(unit.compressor, Identity))
    program = program_name(mine[0].program, problem.topology.world_size)
    channels = [stage.lane.channel for stage in found.stages if stage.message == cost.number]
    channel = next((channel for channel in channels if channel is not None), 0)
    return MessageRow(cost, tuple(names), program, channel, tried)


def busiest(found: Timeline) -> tuple[Shared, float] | None:
    """The resource with the most work for its capacity while gradients are computed and averaged, and the seconds that
    it needs for that; ``None`` if none is used. Plans change neither forward nor the optimizer, so these do not count.
    """
    ends = found.forward_s, found.forward_s + averaged_s(found)
    seconds = {
        shared: float(use.load @ np.diff(np.clip(use.times_s, *ends))) / found.capacities.get(shared, 1.0)
        for shared, use in found.utilisation.items()
    }
    return max(seconds.items(), key=lambda each: each[1]) if seconds else None


def averaged_s(found: Timeline) -> float:
    """Seconds from the start of backward until all gradients are averaged."""
    return found.step_s - found.forward_s - found.optimizer_s


def check_model(path: str, plan: Plan, trace: ModelTrace) -> None:
    """Refuse a plan that is for another model than the trace.

    Raises:
        CommandError: it is.
    """
    try:
        launches_of(plan, trace, plan.made_for or Frontend.MODULE)
    except PlanError as error:
        raise bad_data(f"{path}: {error}", MAKE_PLAN) from None


def check_fit(path: str, plan: Plan, problem: Problem) -> None:
    """Refuse a plan that is for another topology, or whose programs do not work there.

    Raises:
        CommandError: it is.
    """
    if plan.topology not in (None, problem.topology):
        raise bad_data(
            f"{path}: the plan is for {_ranks(plan.topology)}, and {problem.machine.name} has "
            f"{_ranks(problem.topology)}",
            MAKE_PLAN,
        )
    try:
        judged(problem, plan)
    except MachineError:
        raise
    except ValueError as error:
        raise bad_data(f"{path}: {error}", MAKE_PLAN) from None


def differences(plan: Plan, problem: Problem) -> list[str]:
    """Sentences about a plan that was made from another trace or machine."""
    made = plan.prediction
    if made is None:
        return []
    found = []
    if made.trace.fingerprint != problem.trace.fingerprint():
        found.append(f"was made from another trace, {made.trace.name}")
    if made.machine.name != problem.machine.name:
        found.append(f"was made for another machine, {made.machine.name}")
    return found


def _ranks(topology: Topology) -> str:
    return f"{plural(topology.machines, 'machine')} with {plural(topology.devices, 'device')} each"
