"""Virtual lanes, which note what is submitted to them instead of running it, and compute the times of all stages.

Messages are submitted as to real lanes, by the same function. :meth:`VirtualLanes.run` then simulates everything at
once (:mod:`~.simulator`), because a stage that shares a resource ends later if something else is submitted after it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from ...programs.lanes import BoundStage, LaneKey, lane_key
from ...programs.stages import Resource
from .simulator import Need, Shares, SimulatedTask, Times, simulate

S = TypeVar("S", bound=BoundStage)

_SUBMITTER = 0  # the number of the submitting thread's lane
_RELEASES = 1  # the number of a lane for what happens at a given time


class Cost(NamedTuple):
    """The cost of a stage.

    Attributes:
        need: what it needs; if the submitting thread starts it, from its start to its end.
        submit_s: seconds of the submitting thread.
    """

    need: Need
    submit_s: float = 0.0


class Submitted(NamedTuple, Generic[S]):
    """A stage that has been submitted.

    Attributes:
        stage: the stage.
        lane: its lane.
        task: the number of its task.
        at_once: whether the submitting thread starts it, beside the others of the lane.
    """

    stage: S
    lane: LaneKey
    task: int
    at_once: bool


@dataclass(frozen=True)
class Run:
    """The result of a simulation of lanes.

    Attributes:
        tasks: all tasks: stages, work that is not a stage, the work of the submitting thread.
        times: their times.
    """

    tasks: Sequence[SimulatedTask]
    times: Times

    @property
    def end_s(self) -> float:
        """The time when everything is done, in seconds."""
        return max(self.times.end_s, default=0.0)

    @property
    def submitter(self) -> list[int]:
        """The numbers of the submitting thread's tasks, in order."""
        return [number for number, task in enumerate(self.tasks) if task.lane == _SUBMITTER]


class VirtualLanes(Generic[S]):
    """Lanes with a clock.

    A token is the number of a task.

    Args:
        cost: returns the cost of a stage.
        at_once: how many stages that the submitting thread has started on a lane may run at the same time.
        computes: the shares of resources that the submitting thread takes while it computes.
        submits: the shares that it takes while it submits.

    Attributes:
        submitted: all stages so far, in the order of submission.
    """

    def __init__(
        self,
        cost: Callable[[S], Cost],
        at_once: float = math.inf,
        computes: Shares | None = None,
        submits: Shares | None = None,
    ) -> None:
        self.cost, self._at_once = cost, at_once
        self._computes, self._submits = computes or {}, submits or {}
        self.submitted: list[Submitted[S]] = []
        self.tasks: list[SimulatedTask] = []
        self._widths = [1, math.inf]
        self._lanes: dict[LaneKey, VirtualLane[S]] = {}
        self._asked: dict[tuple[Resource, int, int], VirtualLane[S]] = {}
        self._others: dict[Hashable, int] = {}  # the numbers of lanes of other ranks
        self._after: tuple[int, ...] = ()  # tasks that the submitting thread waits for
        self._last = -1  # its last task
        self._delay_s = 0.0  # its delays since then

    # ---------------------------------------------------------------- the submitting thread

    def compute(self, seconds: float) -> None:
        """Let the submitting thread compute, as in a part of backward."""
        self._advance(Need(0.0, seconds, self._computes))

    def delay(self, seconds: float) -> None:
        """Let the submitting thread submit or call hooks. A part that nothing waits for may be counted later."""
        self._delay_s += seconds

    def wait_until(self, at_s: float) -> None:
        """Let the submitting thread wait until ``at_s``, unless it is later already."""
        self.wait_for([self.add(_RELEASES, Need(at_s), ())])

    def wait_for(self, tokens: Sequence[int]) -> None:
        """Let the submitting thread wait for work."""
        self._after = tuple(tokens)

    def here(self) -> int:
        """A token for the work of the submitting thread so far."""
        if self._delay_s > 0 or self._after or self._last < 0:
            self._advance(Need(0.0, self._delay_s, self._submits))
            self._delay_s = 0.0
        return self._last

    def _advance(self, need: Need) -> None:
        self._last = self.add(_SUBMITTER, need, self._after)
        self._after = ()

    # ---------------------------------------------------------------- lanes

    def lane(self, resource: Resource, phase: int, channel: int = 0) -> VirtualLane[S]:
        """The lane of :func:`~gckernels.sync.programs.lanes.lane_key`."""
        asked = (resource, phase, channel)
        if asked not in self._asked:
            key = lane_key(resource, phase, channel)
            if key not in self._lanes:
                self._widths += [1, self._at_once]
                self._lanes[key] = VirtualLane(self, key, len(self._widths) - 2)
            self._asked[asked] = self._lanes[key]
        return self._asked[asked]

    def add(self, lane: int, need: Need, after: tuple[int, ...]) -> int:
        """Add a task, and return its number."""
        self.tasks.append(SimulatedTask(lane, need, after))
        return len(self.tasks) - 1

    def elsewhere(self, lane: Hashable, need: Need, after: tuple[int, ...]) -> int:
        """Add work of other ranks, and return the token of its end.

        Args:
            lane: identifies their lane, which does one thing at a time.
            need: what it needs of the resources that they share with this rank.
            after: tokens of the work that must be done before.
        """
        if lane not in self._others:
            self._others[lane] = len(self._widths)
            self._widths.append(1)
        return self.add(self._others[lane], need, after)

    def run(self, capacities: Shares | None = None) -> Run:
        """Simulate everything that has been submitted.

        Args:
            capacities: as for :func:`~.simulator.simulate`.
        """
        return Run(self.tasks, simulate(self.tasks, self._widths, capacities))

    def next_message(self, last_phase: int) -> None:
        """Nothing to do: each lane has its work in the order of submission."""

    def close(self) -> None:
        """Forget the lanes, which refer to this object, so that nothing is left to the garbage collector."""
        self._lanes.clear()
        self._asked.clear()


class VirtualLane(Generic[S]):
    """One virtual lane.

    Args:
        lanes: all lanes.
        key: its key.
        number: its number; the one after it is for stages that the submitting thread starts.
    """

    def __init__(self, lanes: VirtualLanes[S], key: LaneKey, number: int) -> None:
        self._lanes, self.key, self._number = lanes, key, number

    def submit_stage(self, stage: S, after: Sequence[int]) -> int:
        """Queue a stage, and return the token of its end.

        The first stage of a message, with nothing before it but the submitting thread, begins when it has been
        submitted. The submission of the others is done before the first one ends, so only the submitting thread waits
        for it.
        """
        lanes, at_once = self._lanes, False
        need, submit_s = lanes.cost(stage)
        lanes.delay(submit_s)
        if not after or all(lanes.tasks[token].lane == _SUBMITTER for token in after):
            at_once, after = stage.spec.starts_immediately, (lanes.here(),)
        token = lanes.add(self._number + at_once, need, tuple(after))
        lanes.submitted.append(Submitted(stage, self.key, token, at_once))
        return token

    def submit(self, work: Callable[[], object], after: Sequence[int] = ()) -> int:
        """Queue work that is not a stage. It is not run, and takes no time."""
        return self._lanes.add(self._number, Need(), tuple(after) or (self._lanes.here(),))
