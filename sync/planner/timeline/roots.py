"""Roots: the ranks that are the roots of messages, spread over machines and devices."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping

from ...programs.topology import Topology


def spread(numels: Mapping[int, int], topology: Topology) -> dict[int, int]:
    """The root of each message: from the largest message to the smallest, the rank that is the root of the fewest
    elements so far. Between equals a rank on another machine and another place than those before comes first.

    Args:
        numels: the elements of each message, by number.
        topology: the topology of the ranks.
    """
    machines, devices = topology.machines, topology.devices
    places = range(min(topology.world_size, len(numels)))
    around = math.lcm(machines, devices)  # places until machine and device are those of the first one together
    order = [place % machines * devices + (place + place // around) % devices for place in places]
    load = [(0, place) for place in places]  # a heap
    roots = {}
    for message in sorted(numels, key=lambda each: (-numels[each], each)):
        least, place = load[0]
        roots[message] = order[place]
        heapq.heapreplace(load, (least + numels[message], place))
    return roots
