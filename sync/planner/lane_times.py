"""Times of steps on lanes, for searches that change the option of one launch at a time.

A lane is a queue. A launch goes through the lanes of its option's stages in order, and waits at each for the launches
before it. Backward is lane 0. Stages that compute on the device before anything is sent are on lane 0, too: they delay
the rest of backward, and so all later launches. In addition no resource can do its work in less time than that takes.
Nothing else is shared. So the times are lower bounds of those of a timeline.

Option tables have a row for each option, padded with stages that take no time on a lane of their own.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .machine import Floats

BACKWARD = 0
"""The number of the lane of backward."""


@dataclass(frozen=True)
class OptionTable:
    """The stages of every option, and their times for every launch.

    Attributes:
        lanes: ``[options, stages]``, the lane of each stage; ``num_lanes - 1`` for padding.
        seconds: ``[launches, options, stages]``, the time of each stage; 0 for padding.
        work_s: ``[launches, options, resources]``, the work of each shared resource.
        num_lanes: the number of lanes.
    """

    lanes: npt.NDArray[np.intp]
    seconds: Floats
    work_s: Floats
    num_lanes: int


class LaneTimes:
    """The time of a step for any choice of one option per launch.

    Times of launches before and behind a change are kept, so that calls for neighbouring launches are cheap.

    Args:
        gaps_s: ``[launches]``, the seconds of backward between the launch before, or its start, and each launch.
        table: the options.
        choice: the first choice, an option for each launch.
        backward_work_s: ``[resources]``, the work of backward on each shared resource.
    """

    def __init__(self, gaps_s: Floats, table: OptionTable, choice: Sequence[int], backward_work_s: Floats) -> None:
        self._table, self._choice, self._gaps_s = table, list(choice), gaps_s.tolist()
        self._stages: dict[tuple[int, int], list[tuple[int, float]]] = {}
        self._rows = np.arange(len(table.lanes))
        # the times of all lanes before each launch, and from each launch to the end of the step
        self._before: list[list[float]] = [[0.0] * table.num_lanes]
        self._behind: dict[int, list[float]] = {len(self._gaps_s): [0.0] * table.num_lanes}
        self._behind_from = len(self._gaps_s)
        self._backward_work_s = backward_work_s
        self._work_s = backward_work_s + table.work_s[np.arange(len(gaps_s)), self._choice].sum(axis=0)

    @property
    def choice(self) -> tuple[int, ...]:
        """The option of each launch."""
        return tuple(self._choice)

    def step_s(self) -> float:
        """Seconds from the start of backward until every launch is done."""
        work_s: list[float] = self._work_s.tolist()
        return max(*self._lanes_before(len(self._gaps_s)), *work_s)

    def choose(self, launch: int, option: int) -> None:
        """Change the option of a launch."""
        if self._choice[launch] != option:
            work_s = self._table.work_s[launch]
            self._work_s = self._work_s + work_s[option] - work_s[self._choice[launch]]
            self._choice[launch] = option
            del self._before[launch + 1 :]
            self._behind_from = max(self._behind_from, launch + 1)

    def choose_all(self, choice: Sequence[int]) -> None:
        """Change the options of all launches."""
        for launch, option in enumerate(choice):
            self.choose(launch, option)

    def options_s(self, launch: int) -> Floats:
        """The time of the step with each option for one launch, the others as they are."""
        table = self._table
        lanes = np.tile(np.array(self._lanes_before(launch)), (len(self._rows), 1))
        lanes[:, BACKWARD] += self._gaps_s[launch]
        at_s = lanes[:, BACKWARD]
        for stage in range(table.lanes.shape[1]):
            on = self._rows, table.lanes[:, stage]
            at_s = np.maximum(at_s, lanes[on]) + table.seconds[launch, :, stage]
            lanes[on] = at_s
        paths_s = (lanes + np.array(self._lanes_behind(launch + 1))).max(axis=1)
        work_s = table.work_s[launch]
        others_s = self._work_s - work_s[self._choice[launch]]
        result: Floats = np.maximum(paths_s, (others_s + work_s).max(axis=1))
        return result

    def work_s(self, launch: int) -> Floats:
        """``[options]``, the work of each option for a launch, on all resources together."""
        total: Floats = self._table.work_s[launch].sum(axis=1)
        return total

    def is_hidden(self, launch: int) -> bool:
        """Whether the step takes as long without the launch.

        With one lane for all communication these are the launches before a pause of it: if they were sent faster, the
        pause would be longer and nothing else.
        """
        lanes = self._lanes_before(launch).copy()
        lanes[BACKWARD] += self._gaps_s[launch]
        path_s: float = max(map(operator.add, lanes, self._lanes_behind(launch + 1)))
        work_s = float((self._work_s - self._table.work_s[launch, self._choice[launch]]).max())
        shortest_s: float = max(path_s, work_s)
        return shortest_s >= self.step_s() * (1 - 1e-12)

    def _path(self, launch: int, option: int) -> list[tuple[int, float]]:
        """The lanes and times of an option's stages, without the padding."""
        key = launch, option
        if key not in self._stages:
            lanes, seconds = self._table.lanes[option], self._table.seconds[launch, option]
            used = lanes < self._table.num_lanes - 1
            self._stages[key] = list(zip(lanes[used].tolist(), seconds[used].tolist(), strict=True))
        return self._stages[key]

    def _lanes_before(self, launch: int) -> list[float]:
        while len(self._before) <= launch:
            index = len(self._before) - 1
            lanes = self._before[-1].copy()
            lanes[BACKWARD] += self._gaps_s[index]
            at_s = lanes[BACKWARD]
            for lane, seconds in self._path(index, self._choice[index]):
                at_s = max(at_s, lanes[lane]) + seconds
                lanes[lane] = at_s
            self._before.append(lanes)
        return self._before[launch]

    def _lanes_behind(self, launch: int) -> list[float]:
        """For each lane the longest way from its time before a launch to the end of the step."""
        while self._behind_from > launch:
            index = self._behind_from - 1
            lanes = self._behind[self._behind_from].copy()
            rest_s = 0.0
            for lane, seconds in reversed(self._path(index, self._choice[index])):
                rest_s = lanes[lane] = max(rest_s, lanes[lane]) + seconds
            lanes[BACKWARD] = max(lanes[BACKWARD], rest_s) + self._gaps_s[index]
            self._behind[index] = lanes
            self._behind_from = index
        return self._behind[launch]
