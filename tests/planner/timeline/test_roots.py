"""Roots are spread over ranks, machines and devices."""

from __future__ import annotations

from collections import Counter

import pytest

from gckernels.planner.drafts.drafts import spread
from gckernels.sync import Topology

TOPOLOGIES = [Topology(1), Topology(4), Topology(1, 4), Topology(2, 8), Topology(3, 2), Topology(4, 6), Topology(8, 8)]


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_equal_messages_have_roots_on_as_many_ranks_machines_and_devices_as_there_are(topology):
    roots = list(spread(dict.fromkeys(range(3 * topology.world_size), 10), topology).values())
    assert set(Counter(roots).values()) == {3}
    assert len({root // topology.devices for root in roots[: topology.machines]}) == topology.machines
    assert len({root % topology.devices for root in roots[: topology.devices]}) == topology.devices


def test_the_largest_message_has_a_root_of_its_own():
    roots = spread({0: 1, 1: 100, 2: 1, 3: 1}, Topology(2))
    assert roots[1] == 0 and {roots[0], roots[2], roots[3]} == {1}


def test_few_messages_on_many_ranks_take_no_time():
    assert spread({7: 5}, Topology(1 << 20, 8)) == {7: 0}
