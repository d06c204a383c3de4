"""Rows: the options of items as chains of priced stages on their lanes, for :mod:`~.maxplus`."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from gckernels.sync.programs.lanes import IN_FLIGHT, lane_key
from gckernels.sync.programs.stages import Resource, StageSpec

from ..drafts.drafts import MAX_CHANNELS, Option
from ..machines.machine import Floats, Machine, Price, Shared
from ..timeline.launches import phases_of
from ..timeline.priced_stages import PricedStage
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
_HEAD, _TAIL = 9, 3
"""Stages of a ring that wait for their lanes, at its start and at its end."""


class Chain(NamedTuple):
    """Stages one after the other, those of a message, without padding."""

    lanes: Sequence[int]
    before_s: Sequence[float]
    after_s: Sequence[float]


class OptionChains(NamedTuple):
    """Everything that an option does to a state: the columns of :class:`Rows` for one kind of items."""

    chains: tuple[Chain, ...]
    first_s: float
    work_s: Sequence[float]


@dataclass(frozen=True)
class Rows:
    """The options of items, as chains of stages.

    An option has one chain for each of its messages. Chains and stages that it has not are padded.
    """

    lanes: Ints  # [chains, options, stages], the lane of each stage. The first one is that of backward.
    before_s: Floats
    """``[kinds, chains, options, stages]``, seconds from the start of the chain until the stage needs its lane;
    :data:`FAR_S` if it does not wait for it."""
    after_s: Floats
    """``[kinds, chains, options, stages]``, seconds from the start of the chain until the stage ends; for stages in
    backward until backward continues."""
    first_s: Floats  # [chains, options], seconds from the start of the chain until its second stage may start
    work_s: Floats  # [kinds, options, resources], the work of each resource over its capacity
    several: Ints  # the options with more than one chain
    size: int  # the number of lanes
    _finishing: dict[int, Rows] = field(default_factory=dict, init=False)
    _paths: dict[int, OptionChains] = field(default_factory=dict, init=False)

    def finishing_on(self, lane: int) -> Rows:
        """The rows with the lane that waits for whole launches. Results are kept."""
        if lane not in self._finishing:
            self._finishing[lane] = replace(self, lanes=np.where(self.lanes == FINISH, lane, self.lanes))
        return self._finishing[lane]

    def path(self, kind: int, option: int) -> OptionChains:
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
                chains.append(Chain(*(column[used].tolist() for column in columns)))
            found = OptionChains(tuple(chains), float(self.first_s[0, option]), self.work_s[kind, option].tolist())
            self._paths[key] = found
        return found


@dataclass(frozen=True)
class Gaps:
    """The time that passes between items."""

    seconds: Floats  # [items + 1], seconds of the submitting thread before each item, and behind the last one
    work_s: Floats  # [items + 1, resources], the work of each resource over its capacity meanwhile


# -------------------------------------------------------------------- chains of priced stages


@dataclass(frozen=True)
class MessageRows:
    """The stages of ``n`` messages with the same program on their lanes, as in :class:`Rows`; the last entry of every
    array is for no message.

    The first stage is the submission, the last one of a message that is not averaged in place the end of its launch.
    """

    lanes: Sequence[Sequence[int]]  # for each channel of the message the lanes of the stages
    before_s: Floats  # before_s, after_s: [stages, n + 1]
    after_s: Floats
    first_s: float
    work_s: Floats  # [n + 1, resources]
    flying_s: Floats  # [stages, n + 1], half the seconds of stages that may overlap with one other on their lane


class NumberedLanes:
    """The lanes of a machine by number, and chains of stages on them.

    Args:
        sharing: as for :class:`~.item_rows.RowMaker`.

    Attributes:
        resources: the resources of limited capacity, which have work lanes.
        capacities: ``[resources]``, their capacities.
    """

    def __init__(self, machine: Machine, sharing: bool) -> None:
        self._machine, self._on_host = machine, machine.computes_on == Shared.CORES
        limits = {shared: capacity for shared, capacity in machine.capacities.items() if capacity < np.inf}
        self._delays_backward = sharing and limits.get(machine.computes_on, np.inf) <= 1.0
        self.resources = [shared for shared in Shared if shared in limits]
        self.capacities = np.array([limits[shared] for shared in self.resources])
        self._numbers: dict[Hashable, int] = {}
        for phase in range(8):  # one of them waits for launches
            self._number(lane_key(Resource.COMPUTE, phase))

    @property
    def size(self) -> int:
        """The number of lanes so far."""
        return FIRST_LANE + len(self._numbers)

    def behind(self, options: Sequence[Option]) -> int:
        """The lane that waits for whole launches of a plan with the options."""
        return self._number(lane_key(Resource.COMPUTE, phases_of(option.program for option in options)))

    def rows_of(self, stages: Sequence[PricedStage], option: Option, count: int) -> MessageRows:
        """The priced stages of ``count`` messages with an option.

        Most ranks are the roots of few messages if these have different roots. So without a root it is that of a rank
        on another machine than the root, and with another place on it: where it has no part, it waits.
        """
        total = len(stages) + (not option.in_place)
        alone_s, lead_s = np.zeros((total + 1, count + 1)), np.zeros((total + 1, count + 1))
        work_s, submit_s = np.zeros((count + 1, len(self.resources))), [0.0] * (total + 2)
        routes = [[BACKWARD] * MAX_CHANNELS] + [[NOWHERE] * MAX_CHANNELS for _ in stages]
        waits = np.ones(total + 1, dtype=bool)
        flying = np.zeros((total + 1, 1))
        for column, stage in enumerate(stages, 1):
            price = stage.price
            elsewhere = option.root is None and any(
                self._machine.topology.size(level) > 1 for level in stage.roots.ranks
            )
            alone_s[column, :-1] = price.alone_s
            for shared, seconds in price.work_s.items():
                if shared in self.resources and (shared.is_link or not elsewhere):
                    at = self.resources.index(shared)
                    work_s[:-1, at] += seconds / self.capacities[at]
            if elsewhere:
                continue
            submit_s[column] = price.submit_s
            if column <= _HEAD or column > len(stages) - _TAIL:
                for channel in range(MAX_CHANNELS):
                    routes[column][channel], leads, waits[column] = self._route(stage.spec, channel)
                if leads:
                    lead_s[column, :-1] = price.alone_s - _loaded_s(price)
                    flying[column] = 1 / IN_FLIGHT
        if not option.in_place:
            routes.append([FINISH] * MAX_CHANNELS)
        alone_s[0] = first_s = submit_s[1]
        after_s = alone_s.cumsum(axis=0)
        before_s = after_s - alone_s + lead_s
        before_s[~waits] = FAR_S
        after_s[[route[0] == BACKWARD for route in routes]] += sum(submit_s[2:])
        before_s[:, -1], after_s[:, -1] = FAR_S, 0.0
        used = [route[0] != NOWHERE for route in routes]
        lanes = [[route[channel] for route in routes if route[0] != NOWHERE] for channel in range(MAX_CHANNELS)]
        return MessageRows(lanes, before_s[used], after_s[used], first_s, work_s, (alone_s * flying)[used])

    def _route(self, spec: StageSpec, channel: int) -> tuple[int, bool, bool]:
        """The lane of a stage; whether it has a lead; whether it waits for the lane."""
        if self._delays_backward and spec.resource == Resource.COMPUTE and spec.phase == 0:
            return BACKWARD, False, True
        key = lane_key(spec.resource, spec.phase, channel)
        if spec.starts_immediately:
            return (SINK, True, False) if self._on_host else (self._number(("at once", key)), False, True)
        overlaps = key.resource == Resource.HOST_COMMUNICATE
        return self._number(key), overlaps or (self._on_host and key.resource == Resource.COMMUNICATE), True

    def _number(self, key: Hashable) -> int:
        return self._numbers.setdefault(key, self.size)


def _loaded_s(price: Price) -> Floats:
    """``[n]``, the seconds in which a stage loads a link, a device or a copy engine; or else the cores."""
    loaded_s = np.zeros_like(price.alone_s)
    for shared, seconds in price.work_s.items():
        if shared != Shared.CORES:
            loaded_s = np.maximum(loaded_s, seconds)
    cores_s = price.work_s.get(Shared.CORES, loaded_s)
    return np.minimum(price.alone_s, np.where(loaded_s > 0, loaded_s, cores_s))


# -------------------------------------------------------------------- dominance


def undominated(rows: Rows) -> Ints:
    """The options for which no other one is as good for every item, whatever the rest of the step.

    An option dominates another if it uses the same lanes, starts and ends each stage no later, and puts no more work on
    any resource.
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
