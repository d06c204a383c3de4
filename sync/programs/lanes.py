"""Lanes, as far as the order of work depends on them: which lane a stage takes, and how messages are submitted.

Whatever runs the stages of messages submits them with :func:`submit_stages`: on real lanes, which work
(:mod:`gckernels.sync.resources.lanes`), or on virtual ones, which add up seconds
(:mod:`gckernels.sync.planner.virtual_lanes`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from .stages import Resource, StageSpec

MAX_PHASES = 8
"""Communicators and lanes that the phases of a program have; those of a ring of more ranks take turns."""


@dataclass(frozen=True)
class LaneKey:
    """The lane of a stage.

    Attributes:
        resource: kind of the lane.
        phase: the number of collectives before its stages, modulo :data:`MAX_PHASES`.
        channel: which of the lanes of a collective's phase; ``None`` for what does not communicate.
    """

    resource: Resource
    phase: int
    channel: int | None

    @property
    def name(self) -> str:
        """``"compute-0"`` or ``"communicate-1-0"``, with the channel."""
        return f"{self.resource.value}-{self.phase}" + ("" if self.channel is None else f"-{self.channel}")


def lane_key(resource: Resource, phase: int, channel: int = 0) -> LaneKey:
    """The lane of stages with ``phase`` collectives before them. From :data:`MAX_PHASES` on phases share lanes."""
    has_channels = resource in (Resource.COMMUNICATE, Resource.HOST_COMMUNICATE)
    return LaneKey(resource, phase % MAX_PHASES, channel if has_channels else None)


class BoundStage(Protocol):
    """A stage that can be submitted."""

    @property
    def spec(self) -> StageSpec:
        """The spec of the stage."""


StageT = TypeVar("StageT", bound=BoundStage)
S = TypeVar("S", bound=BoundStage, contravariant=True)
T = TypeVar("T")


class Lane(Protocol[S, T]):
    """A resource that does one thing at a time, in the order of submission. ``T`` is the type of its tokens."""

    def submit_stage(self, stage: S, offset: int, after: Sequence[T]) -> T:
        """Queue a stage behind what the lane has and behind ``after``; returns its token, and never blocks.

        Args:
            stage: what to do.
            offset: added to the seeds of its units in this training step.
            after: tokens of what must be done before.
        """

    def submit(
        self,
        work: Callable[[], None],
        after: Sequence[T] = (),
        failed: Callable[[BaseException], object] | None = None,
    ) -> T:
        """Queue work that is no stage, in the same way; ``failed`` is called with the first error if there is one."""


class Lanes(Protocol[S, T]):
    """All lanes of a rank."""

    @property
    def error(self) -> BaseException | None:
        """The first error of any lane; nothing runs after it."""

    def lane(self, resource: Resource, phase: int, channel: int = 0) -> Lane[S, T]:
        """The lane of :func:`lane_key`."""

    def here(self) -> T:
        """A token of what the submitting thread has done so far."""

    def next_message(self, last_phase: int) -> None:
        """Begin another message, whose last stage is of phase ``last_phase``."""

    def end_step(self) -> None:
        """Say that nothing else is submitted before all that was has been done."""

    def settle(self) -> None:
        """After a failure, wait until no lane computes any more."""

    def close(self) -> None:
        """Let all work finish and release the lanes."""


def submit_stages(
    lanes: Lanes[StageT, T],
    stages: Sequence[StageT],
    channel: int,
    offset: int,
    after: Sequence[T],
    observe: Callable[[StageT, Any], StageT] | None = None,
) -> T:
    """Submit the stages of a message to their lanes, one after the other; returns the token of the last one.

    Args:
        lanes: the lanes of the rank.
        stages: the stages of the message, at least one.
        channel: the channel of the message.
        offset: added to the seeds of its units in this training step.
        after: tokens of what must be done before.
        observe: called with each stage and its lane; returns the stage to submit instead.
    """
    lanes.next_message(max((stage.spec.phase for stage in stages), default=0))
    for stage in stages:
        lane = lanes.lane(stage.spec.resource, stage.spec.phase, channel)
        after = (lane.submit_stage(stage if observe is None else observe(stage, lane), offset, after),)
    (token,) = after
    return token
