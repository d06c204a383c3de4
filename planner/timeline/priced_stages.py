"""Stages with their prices on a machine: their needs in the simulation, and the work that they give to ranks and links.

Where programs have roots, ranks do different work. The root's rank decodes and encodes alone, its machine's card
receives what all others send. Loads add up these seconds by *spot*: the machine and the device that do the work, with
``None`` where all of them do it.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np

from gckernels.sync.programs.lanes import LaneKey, lane_key
from gckernels.sync.programs.stages import StageSpec
from gckernels.sync.programs.steps import Level
from gckernels.sync.programs.topology import Topology
from gckernels.sync.traces.model_trace import ModelTrace

from ..machines.machine import Floats, Machine, Overheads, Price, Shared
from .simulator import Need
from .stage_templates import NO_ROOTS, Roots


@dataclass(frozen=True)
class PricedStage:
    """A stage and its price, for any number of messages with the same stages."""

    spec: StageSpec
    price: Price  # its price in every message
    roots: Roots = NO_ROOTS  # its dependence on the root of the message

    @functools.cached_property
    def need(self) -> Need:
        """The needs of the stage of the first message. Results are kept, because many messages have equal stages."""
        return need_of(self.price)

    def lane(self, channel: int = 0) -> LaneKey:
        """The lane of the stage in a message on ``channel``."""
        return lane_key(self.spec.resource, self.spec.phase, channel)


def need_here(uneven: Mapping[Shared, float], stage: PricedStage) -> Need:
    """The needs of a stage on a lane of the engine, with links as uneven as :func:`unevenness` says."""
    return need_of(stage.price, uneven) if uneven and stage.price.busiest_s else stage.need


def need_elsewhere(uneven: Mapping[Shared, float], stage: PricedStage) -> Need:
    """The needs of a stage in which another rank takes part: of what ranks share, which are links."""
    need = need_here(uneven, stage)
    links = {shared: share for shared, share in need.shares.items() if shared.is_link}
    return Need(need.latency_s, need.loaded_s, links)


def need_without_hook(overheads: Overheads, stage: PricedStage) -> Need:
    """The needs of an average that DDP starts itself. The engine has no part in it."""
    price = stage.price
    return need_of(Price(price.alone_s - overheads.stage_s, price.work_s, price.submit_s - overheads.submit_s))


def need_of(price: Price, uneven: Mapping[Shared, float] | None = None) -> Need:
    """The needs of a stage with the price.

    The link, device or copy engine that has the greatest part in the stage is loaded fully, once the latency is over;
    the rest of the time that the stage takes alone is its latency. Cores come in any number, so they limit a stage only
    if it needs nothing else.

    Args:
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
        return Need(alone_s, submit_s=price.submit_s)
    shares = {shared: seconds / loaded_s for shared, seconds in work_s}
    return Need(alone_s - loaded_s, loaded_s, shares, price.submit_s)


# -------------------------------------------------------------------- loads


class Load(NamedTuple):
    """Something that is loaded."""

    shared: Shared  # the resource
    is_mean: bool = False  # whether it is the mean over all links of a kind, of collectives for which the links differ
    # machine, device: the spot. For a link that several devices share, the number of the link in its machine.
    machine: int | None = None
    device: int | None = None


Loads: TypeAlias = Mapping[Load, float]
"""Seconds of work by what is loaded."""


def imbalance(
    messages: Iterable[tuple[Iterable[PricedStage], int]], trace: ModelTrace, machine: Machine
) -> tuple[int | None, dict[Shared, float]]:
    """The rank with the most work in a step, as :func:`busiest_rank`, and the unevenness of links, as
    :func:`unevenness`.

    Args:
        messages: the stages of each message, with the prices of one message, and the rank that is its root.
        trace: the step.
    """
    loads: dict[Load, float] = defaultdict(float)
    capacity = min(1.0, machine.capacities.get(machine.computes_on, 1.0))
    loads[Load(machine.computes_on)] = trace.computing_s * capacity
    for stages, root in messages:
        for load, seconds in loads_of(stages, root, machine).items():
            loads[load] += seconds
    return busiest_rank(loads, machine), unevenness(loads)


def loads_of(stages: Iterable[PricedStage], root: int, machine: Machine) -> Loads:
    """The loads of a message with a root. Links are left out where all of a kind have the same work.

    Args:
        stages: the stages of the message, with the prices of one message.
        root: the rank that is its root.
    """
    topology = machine.topology
    loads: dict[Load, float] = defaultdict(float)
    for stage in stages:
        price = stage.price
        spot = _spot(stage.roots.ranks, root, topology)
        if stage.roots.ranks:  # ranks differ even if only links have work
            loads[Load(machine.computes_on, False, *spot)] += 0.0
        for shared, work_s in price.work_s.items():
            seconds = work_s.item(0)
            if not shared.is_link:
                loads[Load(shared, False, *spot)] += seconds
            elif shared in price.busiest_s:
                at, device = _spot(stage.roots.link, root, topology)
                link = None if device is None else device // machine.shared_by.get(shared, 1)
                loads[Load(shared, False, at, link)] += price.busiest_s[shared].item(0)
                loads[Load(shared, True)] += seconds
    return loads


def busiest_rank(loads: Loads, machine: Machine) -> int | None:
    """The rank of which some resource of its own has more to do than any resource of other ranks, the first of equals;
    ``None`` if all ranks do the same."""
    own = [load for load in loads if not load.shared.is_link]
    if all(load.machine is None and load.device is None for load in own):
        return None
    machines, devices = _indices(load.machine for load in own), _indices(load.device for load in own)
    most = np.zeros((len(machines), len(devices)))
    for shared in dict.fromkeys(load.shared for load in own):
        seconds = _summed([load for load in own if load.shared is shared], loads, machines, devices)
        most = np.maximum(most, seconds / machine.capacities.get(shared, np.inf))
    at, device = np.unravel_index(int(most.argmax()), most.shape)
    return machines[at] * machine.topology.devices + devices[device]


def unevenness(loads: Loads) -> dict[Shared, float]:
    """The part of the difference between the mean and the busiest links that counts, by kind of link: 1 if the busiest
    links of all messages are the same one."""
    found = {}
    for shared in Shared:
        busiest = [load for load in loads if load.shared is shared and not load.is_mean]
        if not shared.is_link or not busiest:
            continue
        machines, links = _indices(load.machine for load in busiest), _indices(load.device for load in busiest)
        mean_s, total_s = loads[Load(shared, True)], sum(loads[load] for load in busiest)
        highest_s = float(_summed(busiest, loads, machines, links).max())
        if highest_s > mean_s * (1.0 + 1e-9):
            found[shared] = (highest_s - mean_s) / (total_s - mean_s)
    return found


def _spot(levels: Sequence[Level], root: int, topology: Topology) -> tuple[int | None, int | None]:
    """The machine and the device whose ranks have the index of the root on some levels."""
    machine, device = divmod(root, topology.devices)
    return (
        machine if Level.INTER in levels or Level.FLAT in levels else None,
        device if Level.INTRA in levels or Level.FLAT in levels else None,
    )


def _indices(found: Iterable[int | None]) -> list[int]:
    """The machines or devices that differ from others; any one if all are alike."""
    return sorted({each for each in found if each is not None}) or [0]


def _summed(of: Iterable[Load], loads: Mapping[Load, float], machines: list[int], devices: list[int]) -> Floats:
    """``[machines, devices]``, the seconds of some loads at each spot."""
    rows: dict[int | None, int | slice] = {None: slice(None), **{each: row for row, each in enumerate(machines)}}
    columns: dict[int | None, int | slice] = {None: slice(None), **{each: at for at, each in enumerate(devices)}}
    seconds = np.zeros((len(machines), len(devices)))
    for load in of:
        seconds[rows[load.machine], columns[load.device]] += loads[load]
    return seconds
