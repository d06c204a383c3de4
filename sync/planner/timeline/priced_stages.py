"""Stages with their prices on a machine, and the needs in the simulation that follow from these."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from ...programs.lanes import LaneKey, lane_key
from ...programs.stages import StageSpec
from ..machines.machine import Overheads, Price, Shared
from .simulator import Need
from .stage_templates import NO_ROOTS, Roots
from .virtual_lanes import Cost


@dataclass(frozen=True)
class PricedStage:
    """A stage and its price, for any number of messages with the same stages.

    Attributes:
        spec: the stage.
        price: its price in every message.
        roots: its dependence on the root of the message.
    """

    spec: StageSpec
    price: Price
    roots: Roots = NO_ROOTS

    @functools.cached_property
    def need(self) -> Need:
        """The needs of the stage of the first message. Results are kept, because many messages have equal stages."""
        return need_of(self.price)

    def lane(self, channel: int = 0) -> LaneKey:
        """The lane of the stage in a message on ``channel``."""
        return lane_key(self.spec.resource, self.spec.phase, channel)


def cost_of(uneven: Mapping[Shared, float], stage: PricedStage) -> Cost:
    """The cost of a stage on a lane of the engine, with links as uneven as :func:`~.loads.unevenness` says."""
    return Cost(_need_on(uneven, stage), stage.price.submit_s)


def need_elsewhere(uneven: Mapping[Shared, float], stage: PricedStage) -> Need:
    """The needs of a stage in which another rank takes part: of what ranks share, which are links."""
    need = _need_on(uneven, stage)
    links = {shared: share for shared, share in need.shares.items() if shared.is_link}
    return Need(need.latency_s, need.loaded_s, links)


def _need_on(uneven: Mapping[Shared, float], stage: PricedStage) -> Need:
    return need_of(stage.price, uneven) if uneven and stage.price.busiest_s else stage.need


def cost_without_hook(overheads: Overheads, stage: PricedStage) -> Cost:
    """The cost of an average that DDP starts itself. The engine has no part in it."""
    price = stage.price
    need = need_of(Price(price.alone_s - overheads.stage_s, price.work_s))
    return Cost(need, price.submit_s - overheads.submit_s)


def need_of(price: Price, uneven: Mapping[Shared, float] | None = None) -> Need:
    """The needs of a stage with the price.

    The link, device or copy engine that has the greatest part in the stage is loaded fully, once the latency is over;
    the rest of the time that the stage takes alone is its latency. Cores come in any number, so they limit a stage only
    if it needs nothing else.

    Args:
        price: the price.
        uneven: for links that do not have the same work, the part of the difference between the mean and the busiest
            one that a link has to bear.
    """
    alone_s: float = price.alone_s.item(0)
    loaded_s, cores_s, work_s = 0.0, 0.0, []
    for shared, each in price.work_s.items():
        seconds: float = each.item(0)
        if uneven and shared in price.busiest_s:
            seconds += uneven.get(shared, 0.0) * (price.busiest_s[shared].item(0) - seconds)
        if seconds > 0:
            work_s.append((shared, seconds))
            if shared is Shared.CORES:
                cores_s = seconds
            elif seconds > loaded_s:
                loaded_s = seconds
    loaded_s = min(alone_s, loaded_s or cores_s)
    if loaded_s <= 0:
        return Need(alone_s)
    return Need(alone_s - loaded_s, loaded_s, {shared: seconds / loaded_s for shared, seconds in work_s})
