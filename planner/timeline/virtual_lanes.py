"""Virtual lanes, which note what is submitted to them instead of running it, and compute the times of all stages.

Messages are submitted as to real lanes, by the same function. :meth:`VirtualLanes.run` then simulates everything at
once (:mod:`~.simulator`), because a stage that shares a resource ends later if something else is submitted after it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from gckernels.sync.programs.lanes import BoundStage, LaneKey, lane_key
from gckernels.sync.programs.stages import Resource

from ..machines.machine import Floats
from .simulator import Need, Shares, SimulatedTask, Times, simulate

S = TypeVar("S", bound=BoundStage)

SUBMITTER = 0
"""The number of the submitting thread's lane."""
_RELEASES = 1  # the number of a lane for what happens at a given time


class Submitted(NamedTuple, Generic[S]):
    """A stage that has been submitted."""

    stage: S
    lane: LaneKey
    task: int  # the number of its task
    at_once: bool  # whether the submitting thread starts it, beside the others of the lane


@dataclass(frozen=True)
class Run:
    """The result of a simulation of lanes."""

    tasks: Sequence[SimulatedTask]  # all tasks: stages, work that is not a stage, the work of the submitting thread
    times: Times

    @property
    def end_s(self) -> float:
        """The time when everything is done, in seconds."""
        return max(self.times.end_s, default=0.0)


class VirtualLanes(Generic[S]):
    """Lanes with a clock.

    A token is the number of a task.

    Args:
        need: returns the needs of a stage; if the submitting thread starts it, from its start to its end.
        at_once: how many stages that the submitting thread has started on a lane may run at the same time.
        computes: the shares of resources that the submitting thread takes while it computes.
        submits: the shares that it takes while it submits.

    Attributes:
        submitted: all stages so far, in the order of submission.
    """

    def __init__(
        self,
        need: Callable[[S], Need],
        at_once: float = math.inf,
        computes: Shares | None = None,
        submits: Shares | None = None,
    ) -> None:
        self.need, self._at_once = need, at_once
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
        self._last = self.add(SUBMITTER, need, self._after)
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
        need = lanes.need(stage)
        lanes.delay(need.submit_s)
        if not after or all(lanes.tasks[token].lane == SUBMITTER for token in after):
            at_once, after = stage.spec.starts_immediately, (lanes.here(),)
        token = lanes.add(self._number + at_once, need, tuple(after))
        lanes.submitted.append(Submitted(stage, self.key, token, at_once))
        return token

    def submit(self, work: Callable[[], object], after: Sequence[int] = ()) -> int:
        """Queue work that is not a stage. It is not run, and takes no time."""
        return self._lanes.add(self._number, Need(), tuple(after) or (self._lanes.here(),))


# -------------------------------------------------------------------- the load of resources


@dataclass(frozen=True)
class Utilisation:
    """The load of a resource over time, which changes in steps."""

    times_s: Floats  # float64 [n + 1], the times of the changes, and the end
    load: Floats  # float64 [n], the load from each time to the next, in the unit of the capacity

    @property
    def work_s(self) -> float:
        """The seconds of work that the resource does in all."""
        return float(self.load @ np.diff(self.times_s))


def utilisation_of(run: Run, capacities: Shares) -> dict[Any, Utilisation]:
    """The utilisation of every resource that a task of the run loads.

    Between two events the tasks that load something are known, and with them all speeds.

    Args:
        capacities: the capacities with which it was run.
    """
    loading = [number for number, task in enumerate(run.tasks) if task.need.loaded_s > 0 and task.need.shares]
    if not loading:
        return {}
    from_s = np.array([run.times.load_s[number] for number in loading])
    to_s = np.array([run.times.end_s[number] for number in loading])
    times_s = np.unique(np.concatenate([from_s, to_s]))
    spans = np.searchsorted(times_s, from_s), np.searchsorted(times_s, to_s)
    needs = [run.tasks[number].need.shares for number in loading]
    keys = list(dict.fromkeys(key for shares in needs for key in shares))
    # the tasks that load the same resources run at the same speed
    groups: dict[tuple[Hashable, ...], list[int]] = {}
    for index, shares in enumerate(needs):
        groups.setdefault(tuple(shares), []).append(index)
    demands = {
        (group, key): _demand(spans, members, np.array([needs[index][key] for index in members]), len(times_s))
        for group, members in groups.items()
        for key in group
    }
    speeds = {key: np.ones(len(times_s) - 1) for key in keys}
    for key in keys:
        demand = sum((demands[group, key] for group in groups if key in group), np.zeros(len(times_s) - 1))
        over = demand > capacities.get(key, np.inf)
        speeds[key][over] = capacities.get(key, np.inf) / demand[over]
    found = {key: np.zeros(len(times_s) - 1) for key in keys}
    for (group, key), demand in demands.items():
        found[key] += demand * np.minimum.reduce([speeds[each] for each in group])
    return {key: Utilisation(times_s, load) for key, load in found.items()}


def _demand(
    spans: tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]], members: list[int], shares: Floats, times: int
) -> Floats:
    """``float64 [times - 1]``, the sum of the ``shares`` of tasks over time."""
    begins, ends = (span[members] for span in spans)
    changes = np.bincount(begins, shares, times) - np.bincount(ends, shares, times)
    demand: Floats = np.cumsum(changes)[:-1]
    return np.where(demand < 1e-12, 0.0, demand)
