"""The chain of a timeline: what the step has waited for, from its end back to its start.

Each piece of the chain begins when the one before it ends. Making any other stage faster does not make the step faster,
unless it shares a resource with the chain.
"""

from __future__ import annotations

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
        does: its kind: ``"compute"``, ``"copy"``, ``"communicate"``, ``"backward"``, ``"forward"``, ``"optimizer"``.
        start_s: when the chain comes to it.
        end_s: when it ends.
        launch: the number of its launch, or ``None``.
    """

    what: str
    does: str
    start_s: float
    end_s: float
    launch: int | None = None

    @property
    def seconds(self) -> float:
        """How long it takes."""
        return self.end_s - self.start_s


def chain_of(timeline: Timeline) -> tuple[ChainPiece, ...]:
    """The chain of a step, from forward to the optimizer."""
    synced_s = timeline.step_s - timeline.optimizer_s
    pieces = [ChainPiece("optimizer", "optimizer", synced_s, timeline.step_s)] if timeline.optimizer_s else []
    forward_s, backward_end_s = timeline.forward_s, timeline.forward_s + timeline.backward_s
    last = max(timeline.stages, key=lambda stage: stage.end_s, default=None)
    until_s = backward_end_s
    if last is not None and last.end_s > backward_end_s + _SAME_S:
        at: TimedStage | None = last
        while at is not None:
            pieces.append(ChainPiece(_name(at), at.spec.resource.does, at.start_s, at.end_s, at.launch))
            until_s, launch = at.start_s, at.launch
            at = _cause(at, timeline.stages)
        pieces.append(ChainPiece("backward", "backward", forward_s, until_s, launch))
    else:
        pieces.append(ChainPiece("backward", "backward", forward_s, backward_end_s))
    if forward_s:
        pieces.append(ChainPiece("forward", "forward", 0.0, forward_s))
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


def _name(stage: TimedStage) -> str:
    return "AllReduce" if stage.spec.resource == Resource.AVERAGE else stage.spec.name


def summary(pieces: Sequence[ChainPiece]) -> list[tuple[str, float]]:
    """The pieces in short: neighbours of the same name are one, as pairs of a text and seconds."""
    joined: list[tuple[str, int, float]] = []
    for piece in pieces:
        if joined and joined[-1][0] == piece.what:
            name, count, seconds = joined[-1]
            joined[-1] = (name, count + 1, seconds + piece.seconds)
        else:
            joined.append((piece.what, 1, piece.seconds))
    return [(name if count == 1 else f"{count} x {name}", seconds) for name, count, seconds in joined]


def share(pieces: Sequence[ChainPiece], does: str) -> float:
    """Seconds of the chain in pieces of a kind."""
    return sum(piece.seconds for piece in pieces if piece.does == does)
