"""Chains of priced stages: the stages of a program on their lanes, for many messages at once."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from ...programs.lanes import IN_FLIGHT, lane_key
from ...programs.stages import Resource, StageSpec
from ..drafts.drafts import MAX_CHANNELS, Option
from ..machines.machine import Floats, Machine, Price, Shared
from ..timeline.launches import phases_of
from ..timeline.priced_stages import PricedStage
from .rows import BACKWARD, FAR_S, FINISH, FIRST_LANE, NOWHERE, SINK

_HEAD, _TAIL = 9, 3
"""Stages of a ring that wait for their lanes, at its start and at its end."""


@dataclass(frozen=True)
class Chain:
    """The stages of a program on their lanes, for ``n`` messages; the last entry of every array is for no message.

    The first stage is the submission, the last one of a message that is not averaged in place the end of its launch.

    Attributes:
        lanes: for each channel of the message the lanes of the stages.
        before_s, after_s: ``[stages, n + 1]``, as in :class:`~.rows.Rows`.
        first_s: likewise.
        work_s: ``[n + 1, resources]``, the work of each resource over its capacity.
        flying_s: ``[stages, n + 1]``, half the seconds of stages that may overlap with one other on their lane.
    """

    lanes: Sequence[Sequence[int]]
    before_s: Floats
    after_s: Floats
    first_s: float
    work_s: Floats
    flying_s: Floats


class NumberedLanes:
    """The lanes of a machine by number, and chains of stages on them.

    Args:
        machine: the machine.
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

    def chain(self, stages: Sequence[PricedStage], option: Option, count: int) -> Chain:
        """The chain of the priced stages of ``count`` messages with an option.

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
        return Chain(lanes, before_s[used], after_s[used], first_s, work_s, (alone_s * flying)[used])

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
