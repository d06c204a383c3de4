"""Virtual lanes, which compute the times of stages instead of running them.

A lane does one thing at a time, in the order of submission. So the times of a stage are known when it is submitted: it
starts when its lane is free and everything before it is done. Resources that several lanes share, such as a network
card, are not modelled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from ..programs.lanes import BoundStage, Failed, LaneKey, Work, lane_key
from ..programs.stages import Resource

S = TypeVar("S", bound=BoundStage)


@dataclass(frozen=True)
class Cost:
    """The cost of a stage.

    Attributes:
        lane_s: seconds on its lane; if the submitting thread starts it, seconds from its start to its end.
        submit_s: seconds of the submitting thread.
    """

    lane_s: float
    submit_s: float = 0.0


@dataclass(frozen=True)
class VirtualToken:
    """Completion of some work at ``at_s``, in seconds."""

    at_s: float


@dataclass(frozen=True)
class Span(Generic[S]):
    """The time of a stage on its lane, from ``start_s`` to ``end_s`` in seconds."""

    stage: S
    lane: LaneKey
    start_s: float
    end_s: float


class VirtualLanes(Generic[S]):
    """Lanes with a clock.

    Args:
        cost: returns the cost of a stage.

    Attributes:
        now_s: the time of the submitting thread, in seconds.
        spans: the times of all stages so far, in the order of submission.
    """

    error = None

    def __init__(self, cost: Callable[[S], Cost]) -> None:
        self.cost = cost
        self.now_s = 0.0
        self.spans: list[Span[S]] = []
        self._lanes: dict[LaneKey, VirtualLane[S]] = {}

    @property
    def end_s(self) -> float:
        """The time when all submitted stages are done, in seconds."""
        return max((span.end_s for span in self.spans), default=0.0)

    def wait_until(self, at_s: float) -> None:
        """Advance the time of the submitting thread to ``at_s``, unless it is later already."""
        self.now_s = max(self.now_s, at_s)

    def lane(self, resource: Resource, phase: int, channel: int = 0) -> VirtualLane[S]:
        """The lane of :func:`~gckernels.sync.programs.lanes.lane_key`."""
        key = lane_key(resource, phase, channel)
        return self._lanes.setdefault(key, VirtualLane(self, key))

    def here(self) -> VirtualToken:
        """A token for the work of the submitting thread so far."""
        return VirtualToken(self.now_s)

    def next_message(self, last_phase: int) -> None:
        """Nothing to do: each lane has its work in the order of submission."""

    def end_step(self) -> None:
        """Nothing to do."""

    def settle(self) -> None:
        """Nothing to do: nothing runs."""

    def close(self) -> None:
        """Nothing to release."""


class VirtualLane(Generic[S]):
    """One virtual lane.

    Args:
        lanes: all lanes.
        key: its key.
    """

    def __init__(self, lanes: VirtualLanes[S], key: LaneKey) -> None:
        self._lanes, self.key, self._free_s = lanes, key, 0.0

    def submit_stage(self, stage: S, offset: int, after: Sequence[VirtualToken]) -> VirtualToken:
        """Compute the times of a stage, and return the token of its end."""
        lanes, cost = self._lanes, self._lanes.cost(stage)
        ready_s = max((token.at_s for token in after), default=0.0)
        at_once = stage.spec.starts_immediately and ready_s <= lanes.now_s
        lanes.now_s += cost.submit_s
        start_s = lanes.now_s if at_once else max(self._free_s, ready_s, lanes.now_s)
        end_s = start_s + cost.lane_s
        self._free_s = max(self._free_s, end_s)
        lanes.spans.append(Span(stage, self.key, start_s, end_s))
        return VirtualToken(end_s)

    def submit(
        self,
        work: Work,
        after: Sequence[VirtualToken] = (),
        failed: Failed | None = None,
    ) -> VirtualToken:
        """Queue work that is not a stage. It is not run, and takes no time."""
        self._free_s = max([self._free_s, self._lanes.now_s, *(token.at_s for token in after)])
        return VirtualToken(self._free_s)
