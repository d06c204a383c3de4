"""The load of shared resources over the time of a simulation."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..machines.machine import Floats
from .simulator import Shares
from .virtual_lanes import Run


@dataclass(frozen=True)
class Utilisation:
    """The load of a resource over time, which changes in steps.

    Attributes:
        times_s: ``float64 [n + 1]``, the times of the changes, and the end.
        load: ``float64 [n]``, the load from each time to the next, in the unit of the capacity.
    """

    times_s: Floats
    load: Floats

    @property
    def work_s(self) -> float:
        """The seconds of work that the resource does in all."""
        return float(self.load @ np.diff(self.times_s))


def utilisation_of(run: Run, capacities: Shares) -> dict[Any, Utilisation]:
    """The utilisation of every resource that a task of the run loads.

    Between two events the tasks that load something are known, and with them all speeds.

    Args:
        run: the run.
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
