"""Fluid simulation: tasks wait for each other, queue in lanes, and share resources.

A task begins with a latency, in which it loads nothing. Then it loads shares of resources for some seconds, fewer than
the clock shows if a resource has to serve more than it can: everything that loads the resource then slows down by the
same factor. So latency passes while the link serves the tasks of other lanes, and is not made longer by them.

A share may be larger than the capacity. It does not slow down a task that has the resource for itself, but those beside
it: two threads on one core take more from each other than their processor time, because they share caches, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any, NamedTuple, TypeAlias

Shares: TypeAlias = Mapping[Any, float]
"""Shares by resource. A resource is any hashable object."""

_TOLERANCE = 1e-12  # relative: rounding must not make a resource too small for what just fits


@dataclass(frozen=True, slots=True)
class Need:
    """The needs of a task."""

    latency_s: float = 0.0  # seconds before it loads any resource. They pass at the same speed whatever else runs.
    loaded_s: float = 0.0  # seconds after that, if all resources are free
    shares: Shares = field(default_factory=dict)
    """For each resource the part of it that the task takes meanwhile, in the unit of its capacity."""
    submit_s: float = 0.0  # seconds of the thread that submits the task, which are no part of the task


class SimulatedTask(NamedTuple):
    """A task."""

    lane: int  # the number of its lane
    need: Need
    after: tuple[int, ...] = ()
    """The numbers of tasks that must have ended before it begins. They are earlier in the list of tasks."""


@dataclass(frozen=True)
class Times:
    """The times of all tasks, in seconds from the start of the simulation."""

    start_s: list[float]  # when each task began
    load_s: list[float]  # when its latency was over and it began to load resources
    end_s: list[float]  # when it ended


def simulate(tasks: Sequence[SimulatedTask], widths: Sequence[float], capacities: Shares | None = None) -> Times:
    """The times of tasks that are submitted in order, each of which begins as soon as it can.

    Args:
        tasks: the tasks, in the order in which they enter their lanes.
        widths: for every lane, how many of its tasks may run at the same time. They begin in order.
        capacities: the capacities of resources; those of all others are unlimited.
    """
    return _Simulation(tasks, widths, capacities or {}).run()


class _Lane:
    """A lane.

    Attributes:
        queue: its tasks in order.
        begun: how many of them have begun.
        free: how many more may run at the same time.
    """

    __slots__ = ("begun", "free", "queue")

    def __init__(self, width: float) -> None:
        self.queue: list[int] = []
        self.begun, self.free = 0, width


class _Resource:
    """A resource of limited capacity.

    Attributes:
        capacity: its capacity.
        demand: the sum of the shares of all tasks that load it.
        loading: the number of these tasks.
        speed: the factor by which they slow down.
        groups: the groups of tasks that need it.
    """

    __slots__ = ("capacity", "demand", "groups", "loading", "speed")

    def __init__(self, capacity: float) -> None:
        self.capacity, self.demand, self.loading, self.speed = capacity, 0.0, 0, 1.0
        self.groups: list[_Group] = []


class _Group:
    """The tasks that load the same resources, and so run at the same speed.

    They share a clock, which shows the seconds that each of them has made progress. A task ends at a known time of it.

    Attributes:
        resources: the limited resources that they need.
        ends: a heap of pairs: time of the clock, number of the task that ends then.
        clock_s, at_s: the clock has shown ``clock_s`` at the time ``at_s``.
        speed: the seconds of the clock per second.
        due_s: when the first of the tasks ends at this speed.
    """

    __slots__ = ("at_s", "clock_s", "due_s", "ends", "resources", "speed")

    def __init__(self, resources: list[_Resource]) -> None:
        self.resources = resources
        self.ends: list[tuple[float, int]] = []
        self.clock_s, self.at_s, self.speed, self.due_s = 0.0, 0.0, 1.0, math.inf
        for resource in resources:
            resource.groups.append(self)


class _Simulation:
    """One simulation; the arguments are those of :func:`simulate`."""

    def __init__(self, tasks: Sequence[SimulatedTask], widths: Sequence[float], capacities: Shares) -> None:
        count = len(tasks)
        self._tasks, self._now_s = tasks, 0.0
        self._times = Times([math.nan] * count, [math.nan] * count, [math.nan] * count)
        self._lanes = [_Lane(width) for width in widths]
        self._waits = [len(task.after) for task in tasks]
        self._followers: list[list[int]] = [[] for _ in tasks]
        for number, (lane, _, after) in enumerate(tasks):
            self._lanes[lane].queue.append(number)
            for before in after:
                self._followers[before].append(number)
        self._resources = {key: _Resource(capacity) for key, capacity in capacities.items() if capacity < math.inf}
        self._groups: dict[frozenset[int], _Group] = {}  # by the identities of their resources
        self._loads: dict[int, _Load | None] = {}  # by the identity of a need
        # the times at which latencies end, with the numbers of tasks; inverted ones of tasks that end without a group
        self._timers: list[tuple[float, int]] = []
        self._ended: list[int] = []  # tasks that end now, and have not made way for others

    def run(self) -> Times:
        for lane in self._lanes:
            self._begin(lane)
        self._settle()
        timers, groups = self._timers, self._groups
        while True:
            first: _Group | None = None
            now_s = timers[0][0] if timers else math.inf
            for group in groups.values():
                if group.due_s < now_s:
                    first, now_s = group, group.due_s
            if now_s == math.inf:
                return self._times
            self._now_s = now_s
            if first is not None:
                self._unload(first)
            else:
                _, number = heappop(timers)
                if number < 0:
                    self._ended.append(~number)
                else:
                    self._load(number)
            self._settle()

    def _settle(self) -> None:
        """Let tasks that have ended make way for others, until only time changes anything."""
        ended, waits, lanes, tasks = self._ended, self._waits, self._lanes, self._tasks
        while ended:
            number = ended.pop()
            self._times.end_s[number] = self._now_s
            lane = lanes[tasks[number].lane]
            lane.free += 1
            if lane.begun < len(lane.queue):
                self._begin(lane)
            for follower in self._followers[number]:
                waits[follower] -= 1
                if not waits[follower]:
                    self._begin(lanes[tasks[follower].lane])

    def _begin(self, lane: _Lane) -> None:
        """Begin the next tasks of a lane that can begin."""
        queue, waits = lane.queue, self._waits
        while lane.free > 0 and lane.begun < len(queue):
            number = queue[lane.begun]
            if waits[number]:
                return
            lane.begun += 1
            lane.free -= 1
            self._times.start_s[number] = self._now_s
            latency_s = self._tasks[number].need.latency_s
            if latency_s > 0:
                heappush(self._timers, (self._now_s + latency_s, number))
            else:
                self._load(number)

    def _load(self, number: int) -> None:
        """Let a task whose latency is over load its resources."""
        need, now_s = self._tasks[number].need, self._now_s
        self._times.load_s[number] = now_s
        if need.loaded_s <= 0:
            self._ended.append(number)
            return
        load = self._load_of(need)
        if load is None:
            heappush(self._timers, (now_s + need.loaded_s, ~number))
            return
        group = load.group
        heappush(group.ends, (group.clock_s + (now_s - group.at_s) * group.speed + need.loaded_s, number))
        for resource, share in load.shares:
            resource.demand += share
            resource.loading += 1
        self._adapt(group)

    def _unload(self, group: _Group) -> None:
        """End the first task of a group, which is due."""
        group.clock_s, number = heappop(group.ends)
        group.at_s = self._now_s
        load = self._load_of(self._tasks[number].need)
        assert load is not None
        for resource, share in load.shares:
            resource.loading -= 1
            resource.demand = resource.demand - share if resource.loading else 0.0
        self._adapt(group)
        self._ended.append(number)

    def _adapt(self, changed: _Group) -> None:
        """Adapt the speeds of all groups to the demand for the resources of a group that has changed."""
        now_s, affected = self._now_s, {changed: True}
        for resource in changed.resources:
            fits = resource.loading == 1 or resource.demand <= resource.capacity * (1.0 + _TOLERANCE)
            speed = 1.0 if fits else resource.capacity / resource.demand
            if speed != resource.speed:
                resource.speed = speed
                affected.update(dict.fromkeys(resource.groups, True))
        for group in affected:
            speed = min([resource.speed for resource in group.resources])
            if speed != group.speed:
                group.clock_s += (now_s - group.at_s) * group.speed
                group.at_s, group.speed = now_s, speed
            ends = group.ends
            group.due_s = group.at_s + (ends[0][0] - group.clock_s) / speed if ends else math.inf

    def _load_of(self, need: Need) -> _Load | None:
        """The load of tasks with ``need``; ``None`` if they load no limited resource."""
        load = self._loads.get(id(need))
        if load is None and id(need) not in self._loads:
            known = self._resources
            shares = [(known[key], share) for key, share in need.shares.items() if share > 0 and key in known]
            if shares:
                resources = [resource for resource, _ in shares]
                key = frozenset(map(id, resources))
                if key not in self._groups:
                    self._groups[key] = _Group(resources)
                load = _Load(self._groups[key], shares)
            self._loads[id(need)] = load
        return load


class _Load(NamedTuple):
    """The load of tasks."""

    group: _Group
    shares: list[tuple[_Resource, float]]  # the limited resources, with the share of each
