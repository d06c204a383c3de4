"""Process groups: names are never used twice, however often a front end is attached and closed."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

from gckernels import BlockQuant, sync
from gckernels.sync import Topology, attach
from gckernels.sync.communication import groups
from gckernels.sync.communication.communicators import Communicators
from gckernels.sync.programs import ALLTOALL, HIERARCHICAL
from gckernels.sync.programs.rules import sites
from gckernels.sync.resources.memory_spaces import Places
from models import SMALL_BUCKETS, build
from ranks import run_ranks, values_of
from workloads import digest_of

ROUNDS = 8


def attached_and_closed() -> list[set[str]]:
    """Attach and close repeatedly, over one of two groups and over the levels of all ranks; return the names of each
    round."""
    rank = dist.get_rank()
    pairs = [dist.new_group(pair) for pair in ([0, 2], [1, 3])]
    mine, before = pairs[rank % 2], set(dist.distributed_c10d._world.pg_names.values())
    seen: list[set[str]] = []
    for number in range(ROUNDS):
        settings = [(mine, ALLTOALL, None), (None, HIERARCHICAL, Topology(2, 2))][number // 2 % 2]
        group, program, topology = settings
        module = build("Mlp", seed=number)
        if number % 2:
            wrapped = DistributedDataParallel(module, bucket_cap_mb=SMALL_BUCKETS, process_group=group)
            closes = attach(wrapped, sync.uniform_plan(wrapped, BlockQuant(), program=program, topology=topology))
        else:
            wrapped = module
            closes = attach(
                module,
                sync.uniform_plan(
                    module, BlockQuant(), program=program, topology=topology, world_size=dist.get_world_size(group)
                ),
                process_group=group,
            )
        for step in range(2):
            wrapped.zero_grad()
            wrapped(module.batch(step, rank)).backward()
        seen.append(set(dist.distributed_c10d._world.pg_names.values()) - before)
        expected = torch.tensor([int(digest_of(p.grad for p in module.parameters())[:12], 16)])
        everyone = expected.clone()
        dist.broadcast(everyone, group_src=0, group=group)
        assert torch.equal(everyone, expected)
        closes.close()
        assert set(dist.distributed_c10d._world.pg_names.values()) == before
    return seen


def test_no_group_has_the_name_of_a_closed_one():
    for seen in values_of(run_ranks(4, attached_and_closed, timeout_s=60)):
        assert sum(map(len, seen)) == len(set().union(*seen)) > 2 * ROUNDS


def connected(backend: str) -> list[str]:
    """The descriptions of the groups that have made a collective once all are connected, in order."""
    sent, reduce = list[str](), dist.all_reduce

    def all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup, **_: Any) -> None:
        sent.append(group.group_desc)
        reduce(tensor, dist.ReduceOp.MAX, group=group)

    places = Places.of(torch.device("cpu"))
    with (
        mock.patch("gckernels.sync.communication.groups.dist.get_backend", lambda group: backend),
        mock.patch("gckernels.sync.communication.groups.dist.all_reduce", all_reduce),
    ):
        communicators = Communicators(dist.group.WORLD, places, Topology(1, 2), sites(HIERARCHICAL), channels=2)
    connected = (group for link in communicators._links.values() for group in link.groups)
    made = [] if backend == "gloo" else [communicators.averaging.group, *connected, dist.group.WORLD]
    expected = [group.group_desc for group in (dist.group.WORLD, *made)]  # all ranks are waited for
    refused = len(sent) - len(expected)  # a busy machine may refuse a connection, and all ranks try once more
    assert sent == [dist.group.WORLD.group_desc] * refused + expected and refused < groups.ATTEMPTS
    communicators.close()
    return expected


def test_groups_that_connect_with_their_first_collective_have_that_at_once_in_one_order():
    first, second = values_of(run_ranks(2, connected, "nccl"))
    assert first == second and len(first[1:]) == len(set(first)) == 16
    values_of(run_ranks(2, connected, "gloo"))


def bound_to_a_device() -> None:
    """Communicators work in a default group with a bound device, from which torch would split every new group; one rank
    takes no part."""
    default, device = dist.group.WORLD, torch.device("cuda", 0)
    pair = dist.new_group([0, 2])
    default.bound_device_id = device
    try:
        if dist.get_rank() != 1:
            with mock.patch("torch.distributed.distributed_c10d._get_split_source", side_effect=AssertionError):
                communicators = Communicators(pair, Places.of(torch.device("cpu")), Topology(2), sites(ALLTOALL))
            summed = torch.ones(3)
            dist.all_reduce(summed, group=communicators.link(1).group)
            assert summed.tolist() == [2, 2, 2] and dist.get_process_group_ranks(communicators.link(0).group) == [0, 2]
            communicators.close()
            pair.bound_device_id = device
            for backend, expected in (("gloo", None), ("nccl", device)):
                wanted = groups.Wanted([0, 2], "some", backend, timedelta(seconds=5))
                with mock.patch.object(
                    distributed_c10d, "_new_process_group_helper", return_value=(pair, None)
                ) as made:
                    groups._make_group(wanted, 0, pair)
                assert made.call_args.kwargs["device_id"] == expected
            pair.bound_device_id = None
        assert default.bound_device_id == device
    finally:
        default.bound_device_id = None


@pytest.mark.host_only("it makes groups of Gloo")
def test_groups_of_some_ranks_are_not_split_from_that_of_all():
    values_of(run_ranks(3, bound_to_a_device))


def refusing(times: int) -> Any:
    """The outcome of connecting when rank 1 is refused in its second group some times, and the groups left over."""
    make, before = groups._make_group, set(dist.distributed_c10d._world.pg_names.values())
    calls: list[int] = []

    def refused(wanted: groups.Wanted, number: int, group: dist.ProcessGroup) -> dist.ProcessGroup:
        made = make(wanted, number, group)
        calls.append(number)
        if calls.count(number) == 2 and len(set(calls)) <= times:
            dist.barrier()  # rank 0 may still be connecting to the group, and would have an error of its own
            if dist.get_rank() == 1:
                dist.destroy_process_group(made)
                raise RuntimeError("Connection closed by peer")
        return made

    places = Places.of(torch.device("cpu"))
    with mock.patch.object(groups, "_make_group", refused):
        try:
            communicators = Communicators(dist.group.WORLD, places, Topology(2), sites(ALLTOALL))
        except groups.NotConnected as error:
            return str(error), set(dist.distributed_c10d._world.pg_names.values()) == before
    summed = torch.ones(3)
    dist.all_reduce(summed, group=communicators.link(1).group)
    communicators.close()
    return summed.tolist(), set(dist.distributed_c10d._world.pg_names.values()) == before


@pytest.mark.host_only("it makes groups of Gloo")
def test_a_refused_connection_is_tried_again_by_all_ranks():
    assert values_of(run_ranks(2, refusing, groups.ATTEMPTS - 1)) == [([2, 2, 2], True)] * 2


def test_ranks_that_cannot_connect_all_raise_the_same():
    text = "process groups could not be made: RuntimeError: Connection closed by peer (rank 1)"
    assert values_of(run_ranks(2, refusing, groups.ATTEMPTS)) == [(text, True)] * 2
