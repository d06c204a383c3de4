"""The chain of a timeline: what the step has waited for, from its end back to its start.

Each piece of the chain begins when the one before it ends. Making any other stage faster does not make the step faster,
unless it shares a resource with the chain.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from ...planner.timeline.timeline import TimedStage, Timeline
from ...programs.stages import Resource

_SAME_S = 1e-9  # times of a simulation that are equal but for rounding


@dataclass(frozen=True)
class ChainPiece:
    """A piece of the chain.

    Attributes:
        what: what ran, such as ``"backward"`` or ``"AllGather"``.
        launch: the number of its launch, or ``None``.
        start_s: when the chain comes to it.
        end_s: when it ends.
    """

    what: str
    launch: int | None
    start_s: float
    end_s: float


def chain_of(timeline: Timeline) -> tuple[ChainPiece, ...]:
    """The chain of a step, from forward to the optimizer."""
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
        if other.lane == stage.lane or _shares_order(other, stage):
            found = other
    return found


def _shares_order(one: TimedStage, other: TimedStage) -> bool:
    """Whether both are collectives, which the link serves one after the other where they have the same priority."""
    return one.spec.resource.does == other.spec.resource.does == "communicate"


def summary(pieces: Sequence[ChainPiece]) -> list[tuple[str, float]]:
    """The pieces in short: neighbours of the same name are one, as pairs of a text and seconds."""
    joined = []
    for name, group in itertools.groupby(pieces, lambda piece: piece.what):
        seconds = [piece.end_s - piece.start_s for piece in group]
        joined.append((name if len(seconds) == 1 else f"{len(seconds)} x {name}", sum(seconds)))
    return joined
