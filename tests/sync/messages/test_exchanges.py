"""Exchanges over both directions of a link against the collectives of Gloo, in trains in which ranks are late."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from gckernels.sync import Topology
from gckernels.sync.communication.collectives import all_gather
from gckernels.sync.communication.communicators import Communicators
from gckernels.sync.communication.links import ONE_WAY_NBYTES, RankConnections
from gckernels.sync.messages import exchanges
from gckernels.sync.programs import Level, Place
from gckernels.sync.programs.lanes import IN_FLIGHT
from gckernels.sync.programs.rules import Site
from gckernels.sync.resources.memory_spaces import Places
from gckernels.sync.resources.stage import Wait
from ranks import run_ranks, values_of

SIZES = (0, 1, 777, ONE_WAY_NBYTES - 1, ONE_WAY_NBYTES, exchanges.AROUND_NBYTES - 1, exchanges.AROUND_NBYTES, 300_001)
SITE = Site(0, Level.FLAT, Place.DEVICE, exchanges=True)


def linked(channels: int = 1) -> Communicators:
    topology = Topology(dist.get_world_size())
    return Communicators(dist.group.WORLD, Places.of(torch.device("cpu")), topology, [SITE], channels)


def exchanged() -> dict[str, list[int]]:
    """The sizes for which an exchange has given other bytes than Gloo's collective, by kind of exchange."""
    communicators = linked()
    link, wrong = communicators.link(0), {"gather": [], "all-to-all": [], "hop": []}
    late = random.Random(link.index)
    trains = []
    for size in SIZES:
        row, received = torch.randint(256, (size,), dtype=torch.uint8), torch.zeros(link.ranks, size, dtype=torch.uint8)
        expected = torch.zeros_like(received)
        all_gather(expected.view(-1), row, group=link.group)
        trains.append(("gather", size, exchanges.bind_all_gather(link, row, received), received, expected))
        sent, received = torch.randint(256, (2, link.ranks, size), dtype=torch.uint8)
        expected_rows = torch.zeros_like(received)
        dist.all_to_all_single(expected_rows.view(-1), sent.view(-1), group=link.group)
        trains.append(("all-to-all", size, exchanges.bind_all_to_all(link, sent, received), received, expected_rows))
        hop = torch.zeros_like(row)
        trains.append(("hop", size, exchanges.bind_hop(link, row, hop), hop, expected[(link.index - 1) % link.ranks]))
    for _ in range(3):
        for *_, received, _ in trains:
            received.zero_()
        waits: list[Wait] = []
        for _, _, exchange, _, _ in trains:
            if len(waits) == IN_FLIGHT:
                waits.pop(0)()
            time.sleep(late.choice((0, 0, 0.003)))
            waits.append(exchange())
        for wait in waits:
            wait()
        for kind, size, _, received, expected in trains:
            if not torch.equal(received, expected):
                wrong[kind].append(size)
    communicators.close()
    return wrong


@pytest.mark.host_only("these messages are the host's")
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_exchanges_give_the_bytes_of_collectives(ranks):
    for wrong in values_of(run_ranks(ranks, exchanged)):
        assert wrong == {"gather": [], "all-to-all": [], "hop": []}


class Recorded(RankConnections):
    """A link that notes which groups carry data from whom to whom."""

    def __init__(self, ranks: int, index: int) -> None:
        super().__init__(ranks, index, ["group", "back"])

    def send(self, tensor, to, turn):
        return self._note(self.index, to, tensor)

    def receive(self, tensor, sender, turn):
        return self._note(sender, self.index, tensor)

    def _note(self, sender, receiver, tensor):
        carried.add((self._group(sender, receiver, tensor), sender < receiver))
        return Work()


class Work:
    def wait(self) -> None:
        pass


carried: set[tuple[str, bool]] = set()


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize(
    ("nbytes", "groups"),
    [
        (ONE_WAY_NBYTES - 1, {("group", True), ("group", False)}),
        (ONE_WAY_NBYTES, {("group", True), ("back", False)}),
        (exchanges.AROUND_NBYTES, {("group", True), ("back", False)}),
    ],
)
def test_a_connection_carries_large_data_one_way_only(ranks, nbytes, groups):
    carried.clear()
    rows = torch.zeros(2, ranks, nbytes, dtype=torch.uint8)
    for index in range(ranks):
        link = Recorded(ranks, index)
        exchanges.bind_all_gather(link, rows[0, 0], rows[1])()()
        exchanges.bind_all_to_all(link, rows[0], rows[1])()()
        exchanges.bind_hop(link, rows[0, 0], rows[0, 1])()()
    assert carried == groups


def counted() -> tuple[int, int, int]:
    """The process groups, the threads and the sockets that one more channel takes."""

    def now() -> tuple[int, int, int]:
        sockets = [each for each in Path("/proc/self/fd").iterdir() if "socket" in str(each.resolve())]
        return len(dist.distributed_c10d._world.pg_map), len(list(Path("/proc/self/task").iterdir())), len(sockets)

    one, before = linked(1), now()
    two, after = linked(2), now()
    dist.barrier()
    one.close()
    two.close()
    groups, threads, sockets = (b - a for a, b in zip(before, after, strict=True))
    return groups, threads, sockets


@pytest.mark.parametrize("ranks", [2, 4])
def test_groups_threads_and_sockets_are_counted(ranks):
    """Two channels and the averages take five groups: each has three threads, and a socket for each other rank."""
    for groups, threads, sockets in values_of(run_ranks(ranks, counted)):
        assert groups == 5
        assert threads <= 3 * groups
        assert sockets <= groups * ranks  # one for each other rank, and one that listens
