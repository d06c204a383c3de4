"""Explanations of plans: what each message costs, what else it could be, and what the step waits for."""

from __future__ import annotations

import difflib
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gckernels.ops import Identity
from gckernels.sync.accuracy.accuracy import candidates
from gckernels.sync.plans.names import program_name, short_spec
from gckernels.sync.plans.plan import Plan
from gckernels.sync.programs.stages import Resource, StageKind

from ...choice import POLICIES
from ...drafts.problem import Problem
from ...machines.machine import Shared
from ...machines.scaling import scaled
from ...timeline.timeline import TimedStage, Timeline, timeline
from ..common.outcome import wrong_use
from .alternatives import UnitAlternative, alternatives
from .sweeps import with_faster_links

_SAME_S = 1e-9  # times of a simulation that are equal but for rounding
_DECODES = (StageKind.DECODE, StageKind.RECONSTRUCT)


@dataclass(frozen=True)
class MessageCost:
    """A message of a plan, and what else it could be."""

    message: int  # its number in the step
    launch: int  # the number of its launch
    units: tuple[str, ...]  # the names of its units
    nbytes: int  # the bytes of its gradients
    ready_s: float  # from the start of backward until it is launched, if nothing delays backward
    compressors: tuple[str, ...]  # the specs of its compressors; empty if it is sent exactly
    program: str  # the name of its program
    channel: int
    encode_s: float  # seconds of stages that encode, or recode
    send_s: float  # seconds of its collectives, the wait for others on their lane not included
    decode_s: float  # seconds of stages that decode
    copy_s: float  # seconds of copies between device and host
    alternatives: tuple[UnitAlternative, ...] = ()
    """Other ways to send it, with the step that each would give; empty if they were not asked for."""


@dataclass(frozen=True)
class ChainPiece:
    """A piece of the chain."""

    what: str  # the work, such as "backward" or "AllGather"
    launch: int | None  # the number of its launch, or None
    start_s: float  # when the chain comes to it
    end_s: float  # when it ends


@dataclass(frozen=True)
class Explanation:
    """Why a plan takes as long as it does. All times are in seconds."""

    timeline: Timeline  # the timeline of the plan
    none_s: float  # a step without compression
    messages: tuple[MessageCost, ...]  # its messages, in the order of their submission; for one unit those that hold it
    chain: tuple[ChainPiece, ...]  # everything that the step has waited for
    what_if_s: Mapping[str, float]  # for each change of the machine, how long a step with the same plan would take


def explain(
    problem: Problem,
    plan: Plan,
    shown: int,
    unit: str | None = None,
    progress: Callable[[float, str], None] = lambda share, text: None,
) -> Explanation:
    """The explanation of a plan.

    Args:
        problem: the problem that the plan solves.
        shown: the number of messages, the largest first, that are tried in other ways.
        unit: a unit or a parameter. Its messages are explained instead of all, and other ways are tried for it alone,
            while the rest of its messages stays as it is; they include all compressors whose error the trace has,
            allowed or not.
        progress: called with the part that is done.

    Raises:
        CommandError: the plan has no such unit.
        PlanError: the plan does not fit the trace.
        MachineError: the machine lacks a price.
    """
    found = judged(problem, plan)
    messages = _messages(problem, plan, found)
    if unit is None:
        largest = {each.message for each in sorted(messages, key=lambda each: -each.nbytes)[:shown]}
        for number, each in enumerate(messages):
            progress(number / len(messages), "trying other ways")
            if each.message in largest:
                messages[number] = replace(each, alternatives=tuple(alternatives(problem, plan, each.units)))
    else:
        keys = _keys_of(plan, unit)
        tried = tuple(alternatives(problem, plan, keys, candidates(problem.trace)))
        messages = [replace(each, alternatives=tried) for each in messages if keys & {*each.units}]
    none_s = judged(problem, POLICIES["none"](problem)).step_s
    machines = {"free codecs": scaled(problem.machine, codec_speed=math.inf)}
    if problem.topology.world_size > 1:
        machines = {"twice the bandwidth": with_faster_links(problem.machine, 2.0)} | machines
    what_if_s = {
        name: timeline(plan, problem.trace, problem.pricer.on(machine), problem.frontend).step_s
        for name, machine in machines.items()
    }
    return Explanation(found, none_s, tuple(messages), chain_of(found), what_if_s)


def _keys_of(plan: Plan, name: str) -> set[str]:
    """The units of a plan with a name, or those that hold parts of the parameter with that name."""
    keys = {unit.key for unit in plan.units if name == unit.key or name in unit.parameters}
    if not keys:
        near = difflib.get_close_matches(name, [unit.key for unit in plan.units], n=3) or [plan.units[0].key]
        raise wrong_use(f"--unit: the plan has no unit {name!r}, but {', '.join(near)}")
    return keys


def judged(problem: Problem, plan: Plan) -> Timeline:
    """The timeline of a plan, attached in the only way that it can be, or else as the problem says."""
    return timeline(plan, problem.trace, problem.pricer, plan.made_for or problem.frontend)


def _messages(problem: Problem, plan: Plan, found: Timeline) -> list[MessageCost]:
    """The messages of a timeline, in the order of their submission."""
    costs = []
    for number, group in itertools.groupby(found.stages, lambda stage: stage.message):
        stages = tuple(group)
        launch, mine = found.launches[stages[0].launch], [plan.by_key[key] for key in stages[0].keys]
        seconds = _seconds(stages)
        specs = (short_spec(unit.compressor) for unit in mine if not isinstance(unit.compressor, Identity))
        cost = MessageCost(
            message=number,
            launch=stages[0].launch,
            units=stages[0].keys,
            nbytes=sum(unit.numel for unit in mine) * launch.dtype.itemsize,
            ready_s=launch.ready_s,
            compressors=tuple(dict.fromkeys(specs)),
            program=program_name(mine[0].program, problem.topology.world_size),
            channel=next((stage.lane.channel for stage in stages if stage.lane.channel is not None), 0),
            encode_s=seconds["encode"],
            send_s=seconds["communicate"],
            decode_s=seconds["decode"],
            copy_s=seconds["copy"],
        )
        costs.append(cost)
    return costs


def _seconds(stages: Sequence[TimedStage]) -> dict[str, float]:
    """The seconds of the stages of a message, by the kind of their work."""
    seconds = {"encode": 0.0, "communicate": 0.0, "decode": 0.0, "copy": 0.0}
    for stage in stages:
        codec = "decode" if stage.spec.kind in _DECODES else "encode"
        does = stage.spec.resource.does
        seconds[codec if does == "compute" else does] += stage.end_s - stage.start_s
    return seconds


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


# -------------------------------------------------------------------- chains


def chain_of(timeline: Timeline) -> tuple[ChainPiece, ...]:
    """The chain of a step, from forward to the optimizer.

    Each piece of the chain begins when the one before it ends. Making any other stage faster does not make the step
    faster, unless it shares a resource with the chain.
    """
    synced_s, until_s, launch = timeline.step_s - timeline.optimizer_s, timeline.forward_s + timeline.backward_s, None
    pieces = [ChainPiece("optimizer", None, synced_s, timeline.step_s)] if timeline.optimizer_s else []
    at = max(timeline.stages, key=lambda stage: stage.end_s, default=None)
    if at is not None and at.end_s <= until_s + _SAME_S:
        at = None
    while at is not None:
        what = "AllReduce" if at.spec.resource == Resource.AVERAGE else at.spec.name
        pieces.append(ChainPiece(what, at.launch, at.start_s, at.end_s))
        until_s, launch = at.start_s, at.launch
        at = _cause(at, timeline.stages)
    pieces.append(ChainPiece("backward", launch, timeline.forward_s, until_s))
    if timeline.forward_s:
        pieces.append(ChainPiece("forward", None, 0.0, timeline.forward_s))
    return tuple(reversed(pieces))


def _cause(stage: TimedStage, stages: Sequence[TimedStage]) -> TimedStage | None:
    """The stage whose end has let a stage begin: the one before it in its message, or one of its lane."""
    found: TimedStage | None = None
    for other in stages:
        if other is stage or abs(other.end_s - stage.start_s) > _SAME_S or other.start_s >= stage.start_s:
            continue
        if other.message == stage.message:
            return other
        # the link serves collectives one after the other where they have the same priority
        shares_link = other.spec.resource.does == stage.spec.resource.does == "communicate"
        if other.lane == stage.lane or shares_link:
            found = other
    return found


def summary(pieces: Sequence[ChainPiece]) -> list[tuple[str, float]]:
    """The pieces in short: neighbours of the same name are one, as pairs of a text and seconds."""
    joined = []
    for name, group in itertools.groupby(pieces, lambda piece: piece.what):
        seconds = [piece.end_s - piece.start_s for piece in group]
        joined.append((name if len(seconds) == 1 else f"{len(seconds)} x {name}", sum(seconds)))
    return joined
