"""Costs of messages in a timeline: the seconds of each kind of work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...planner.timeline.timeline import TimedStage, Timeline
from ...plans.plan import Plan, UnitPlan
from ...programs.stages import StageKind

_DECODES = (StageKind.DECODE, StageKind.RECONSTRUCT)


@dataclass(frozen=True)
class MessageCost:
    """A message of a timeline.

    Attributes:
        number: its number in the step.
        launch: the number of its launch.
        keys: the names of its units.
        numel: the number of its elements.
        nbytes: the bytes of its gradients.
        ready_s: from the start of backward until it is launched, if nothing delays backward.
        encode_s: seconds of stages that encode, or recode.
        send_s: seconds of its collectives, the wait for others on their lane not included.
        decode_s: seconds of stages that decode.
        copy_s: seconds of copies between device and host.
        end_s: when it ends, from the start of the step.
    """

    number: int
    launch: int
    keys: tuple[str, ...]
    numel: int
    nbytes: int
    ready_s: float
    encode_s: float
    send_s: float
    decode_s: float
    copy_s: float
    end_s: float


def message_costs(plan: Plan, timeline: Timeline) -> list[MessageCost]:
    """The messages of a timeline, in the order of their submission."""
    units = {unit.key: unit for unit in plan.units}
    stages: dict[int, list[TimedStage]] = {}
    for stage in timeline.stages:
        stages.setdefault(stage.message, []).append(stage)
    return [_cost(units, timeline, number, each) for number, each in sorted(stages.items())]


def _cost(units: dict[str, UnitPlan], timeline: Timeline, number: int, stages: Sequence[TimedStage]) -> MessageCost:
    launch = timeline.launches[stages[0].launch]
    seconds = {"encode": 0.0, "send": 0.0, "decode": 0.0, "copy": 0.0}
    for stage in stages:
        seconds[_work(stage)] += stage.end_s - stage.start_s
    numel = sum(units[key].numel for key in stages[0].keys)
    return MessageCost(
        number,
        stages[0].launch,
        stages[0].keys,
        numel,
        numel * launch.dtype.itemsize,
        launch.ready_s,
        seconds["encode"],
        seconds["send"],
        seconds["decode"],
        seconds["copy"],
        max(stage.end_s for stage in stages),
    )


def _work(stage: TimedStage) -> str:
    does = stage.spec.resource.does
    if does != "compute":
        return "send" if does == "communicate" else "copy"
    return "decode" if stage.spec.kind in _DECODES else "encode"
