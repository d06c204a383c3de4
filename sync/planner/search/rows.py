"""Rows: the options of items as chains of stages, for :mod:`~.maxplus`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from ..machines.machine import Floats
from ..timeline.pricing import Ints

BACKWARD = 0
"""The lane of backward, or rather of the thread that submits messages."""
NOWHERE = 1
"""A lane for which nothing waits: padding."""
SINK = 2
"""A lane on which stages end that wait for no lane."""
FINISH = 3
"""A stand-in for the lane that waits for whole launches, which depends on the longest program of a plan."""
FIRST_LANE = 4
FAR_S = 1e12
"""Later than any step, for stages that wait for no lane."""
UNUSABLE_S = 1e6
"""The time of options that cannot be used."""
_ROUNDING_S = 1e-12


class Stages(NamedTuple):
    """A chain of stages, without padding.

    Attributes:
        lanes: the lane of each stage.
        before_s: seconds from the start of the chain until each stage needs its lane.
        after_s: seconds from the start of the chain until each stage ends.
    """

    lanes: Sequence[int]
    before_s: Sequence[float]
    after_s: Sequence[float]


class OptionChain(NamedTuple):
    """Everything that an option does to a state.

    Attributes:
        chains: its chains of stages.
        first_s: seconds from its start until its second stage may start.
        work_s: the work of each resource.
    """

    chains: tuple[Stages, ...]
    first_s: float
    work_s: Sequence[float]


@dataclass(frozen=True)
class Rows:
    """The options of items, as chains of stages.

    An option has one chain for each of its messages. Chains and stages that it has not are padded.

    Attributes:
        lanes: ``[chains, options, stages]``, the lane of each stage. The first one is that of backward.
        before_s: ``[kinds, chains, options, stages]``, seconds from the start of the chain until the stage needs its
            lane; :data:`FAR_S` if it does not wait for it.
        after_s: ``[kinds, chains, options, stages]``, seconds from the start of the chain until the stage ends; for
            stages in backward until backward continues.
        first_s: ``[chains, options]``, seconds from the start of the chain until its second stage may start.
        work_s: ``[kinds, options, resources]``, the work of each resource over its capacity.
        several: the options with more than one chain.
        size: the number of lanes.
    """

    lanes: Ints
    before_s: Floats
    after_s: Floats
    first_s: Floats
    work_s: Floats
    several: Ints
    size: int
    _finishing: dict[int, Rows] = field(default_factory=dict, init=False)
    _paths: dict[int, OptionChain] = field(default_factory=dict, init=False)

    def finishing_on(self, lane: int) -> Rows:
        """The rows with the lane that waits for whole launches. Results are kept."""
        if lane not in self._finishing:
            self._finishing[lane] = replace(self, lanes=np.where(self.lanes == FINISH, lane, self.lanes))
        return self._finishing[lane]

    def path(self, kind: int, option: int) -> OptionChain:
        """The chains of an option for a kind of items, without padding. Results are kept."""
        key = kind * self.lanes.shape[1] + option
        found = self._paths.get(key)
        if found is None:
            chains = []
            for chain in range(len(self.lanes) if option in self.several else 1):
                used = self.lanes[chain, option] != NOWHERE
                columns = (
                    self.lanes[chain, option],
                    self.before_s[kind, chain, option],
                    self.after_s[kind, chain, option],
                )
                chains.append(Stages(*(column[used].tolist() for column in columns)))
            found = OptionChain(tuple(chains), float(self.first_s[0, option]), self.work_s[kind, option].tolist())
            self._paths[key] = found
        return found


@dataclass(frozen=True)
class Gaps:
    """The time that passes between items.

    Attributes:
        seconds: ``[items + 1]``, seconds of the submitting thread before each item, and behind the last one.
        work_s: ``[items + 1, resources]``, the work of each resource over its capacity meanwhile.
    """

    seconds: Floats
    work_s: Floats


# -------------------------------------------------------------------- dominance


def undominated(rows: Rows) -> Ints:
    """The options for which no other one is as good for every item, whatever the rest of the step.

    One option is as good as another if its stages need the same lanes, and every one of them needs its lane no later
    and ends no later, and it has no more work on any resource.
    """
    waits = rows.before_s.min(axis=0) < FAR_S
    same: dict[bytes, list[int]] = {}
    for option in range(rows.lanes.shape[1]):
        same.setdefault(rows.lanes[:, option].tobytes() + waits[:, option].tobytes(), []).append(option)
    kept: list[int] = []
    for members in same.values():
        kept += _front(_costs(rows, members), members) if len(members) > 1 else members
    return np.array(sorted(kept), dtype=np.intp)


def _costs(rows: Rows, members: list[int]) -> Floats:
    """``[members, costs]``, everything in which one of the members, which need the same lanes, may be better.

    The costs of all options at once would be several times as large as the rows.
    """
    before_s, after_s = rows.before_s[:, :, members], rows.after_s[:, :, members]
    rest_s = after_s[..., :1] - rows.first_s[None, :, members, None]
    ends_s = after_s - np.where(rows.lanes[:, members] == BACKWARD, rest_s, 0.0)
    waits = before_s < FAR_S
    starts_s = np.concatenate([np.zeros_like(rest_s), ends_s[..., :-1]], axis=3)
    leads_s = np.where(waits, before_s - starts_s, 0.0)
    loads_s = ends_s - np.where(waits, before_s, starts_s)
    shape = (len(members), len(before_s), -1)
    costs = [np.moveaxis(each, 2, 0).reshape(shape) for each in (rest_s, leads_s, loads_s)]
    table: Floats = np.concatenate([*costs, np.moveaxis(rows.work_s[:, members], 1, 0)], axis=2)
    table[(after_s[:, 0, :, 0] >= UNUSABLE_S).T] = UNUSABLE_S
    return table.reshape(len(members), -1)


def _front(costs: Floats, members: list[int]) -> list[int]:
    """The members for which no other one is as cheap in all columns; the first one of equals."""
    front: list[int] = []
    order = np.argsort(costs.sum(axis=1), kind="stable")
    for each in order:
        if not any((costs[other] <= costs[each] + _ROUNDING_S).all() for other in front):
            front.append(int(each))
    return [members[each] for each in front]
