"""The rules by which stages get their lanes, and the interface of lanes.

All messages are submitted with :func:`submit_stages`: to real lanes (:mod:`gckernels.sync.resources.lanes`), which run
their stages, or to virtual lanes (:mod:`gckernels.planner.timeline.virtual_lanes`), which compute their times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from .stages import Resource, StageSpec

MAX_PHASES = 8
"""Maximum number of lanes, and of process groups, for the phases of a program. Later phases use them again."""

IN_FLIGHT = 2
"""Collectives of a lane on the host that may be on their way at the same time. With one, the link would be idle from
the end of a collective to the first byte of the next. With two it is not, and more of them only wait for each other."""

SHARD_BUFFERS = 2
"""The groups of a model of FSDP2 whose gradients can be on their way at the same time: one is sent while the next one
is encoded."""


@dataclass(frozen=True)
class LaneKey:
    """The identity of a lane."""

    resource: Resource
    phase: int  # number of collectives before its stages, modulo MAX_PHASES
    channel: int | None  # its channel; None for lanes that do not communicate

    @property
    def name(self) -> str:
        """The name of the lane, such as ``"compute-0"``, or ``"communicate-1-0"`` with a channel."""
        return f"{self.resource.value}-{self.phase}" + ("" if self.channel is None else f"-{self.channel}")


def lane_key(resource: Resource, phase: int, channel: int = 0) -> LaneKey:
    """The key of the lane for stages on ``resource`` with ``phase`` collectives before them.

    Phases from :data:`MAX_PHASES` on share lanes with earlier ones.
    """
    has_channels = resource in (Resource.COMMUNICATE, Resource.HOST_COMMUNICATE)
    return LaneKey(resource, phase % MAX_PHASES, channel if has_channels else None)


class BoundStage(Protocol):
    """A stage that can be submitted."""

    @property
    def spec(self) -> StageSpec:
        """Its specification."""


StageT = TypeVar("StageT", bound=BoundStage)
S = TypeVar("S", bound=BoundStage, contravariant=True)
T = TypeVar("T")


class AnyLane(Protocol[S, T]):
    """A resource that does one thing at a time, in the order of submission. ``T`` is the type of its tokens."""

    def submit_stage(self, stage: S, after: Sequence[T]) -> T:
        """Queue a stage behind the work of the lane and behind the tokens ``after``, and return its token; never
        blocks."""


class Lanes(Protocol[S, T]):
    """All lanes of a rank."""

    def lane(self, resource: Resource, phase: int, channel: int = 0) -> AnyLane[S, T]:
        """The lane of :func:`lane_key`."""

    def next_message(self, last_phase: int) -> None:
        """Begin the next message, whose last stage is in phase ``last_phase``."""


@dataclass(frozen=True)
class Route(Generic[StageT, T]):
    """The way of a message through the lanes of a rank, the same in every step."""

    stops: tuple[tuple[StageT, AnyLane[StageT, T]], ...]  # the stages of the message, each with its lane
    last_phase: int  # phase of the last stage


def route_of(lanes: Lanes[StageT, T], stages: Sequence[StageT], channel: int) -> Route[StageT, T]:
    """The route of a message.

    Args:
        lanes: the lanes of the rank.
        stages: the stages of the message, at least one.
        channel: the channel of the message.
    """
    stops = tuple((stage, lanes.lane(stage.spec.resource, stage.spec.phase, channel)) for stage in stages)
    return Route(stops, max(stage.spec.phase for stage in stages))


def submit_stages(
    lanes: Lanes[StageT, T],
    route: Route[StageT, T],
    after: Sequence[T],
    observe: Callable[[StageT, Any], StageT] | None = None,
) -> T:
    """Submit the stages of a message to their lanes, each after the one before, and return the token of the last.

    Args:
        lanes: the lanes of the rank.
        route: the route of the message through them.
        after: tokens of the work that must be done before.
        observe: called with each stage and its lane; returns the stage to submit instead.
    """
    lanes.next_message(route.last_phase)
    for stage, lane in route.stops:
        after = (lane.submit_stage(stage if observe is None else observe(stage, lane), after),)
    (token,) = after
    return token
