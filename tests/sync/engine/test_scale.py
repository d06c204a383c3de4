"""A simulated job of a thousand ranks: each rank derives the same collectives in the same order from the plan alone."""

from __future__ import annotations

import collections
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from gckernels import EFSignSGD, sync
from gckernels.sync import Plan, Topology
from gckernels.sync.communication.links import RankConnections
from gckernels.sync.messages import collectives
from gckernels.sync.programs import (
    ALLGATHER,
    ALLREDUCE,
    ALLTOALL,
    HIERARCHICAL,
    PARAMETER_SERVER,
    AllGather,
    Broadcast,
    Decode,
    Encode,
    Level,
    Place,
    Program,
    Reduce,
    ring,
)
from harness.one_of_many import OneOfMany, built, transformer

LAYERS, HIDDEN = 100, 1024
LARGE = Topology(128, 8)
BUCKET_CAP_MB = 25.0


@dataclass(frozen=True)
class Collective:
    """The facts about one collective that must be equal on all ranks of a communicator."""

    call: str
    units: tuple[str, ...]
    nbytes: tuple[int, ...]
    root: int | None


@dataclass(frozen=True)
class Group:
    """A process group as one rank identifies it: which of its groups it is."""

    phase: int
    level: Level
    channel: int
    place: Place = Place.DEVICE


@dataclass(frozen=True)
class Asked(OneOfMany):
    """Communicators that give out the groups' identities in the place of process groups."""

    @property
    def averaging(self) -> RankConnections:
        """The link with the identity of the group for averages."""
        link: Any = super().averaging
        return replace(link, groups=[Group(0, Level.FLAT, 0)])

    def link(
        self, phase: int, level: Level = Level.FLAT, channel: int = 0, place: Place = Place.DEVICE
    ) -> RankConnections:
        link: Any = super().link(phase, level, channel, place)
        return replace(link, groups=[Group(phase, level, channel, place)])


@dataclass
class Wire:
    """A record of the collectives that would be sent."""

    sent: dict[Group, list[Collective]] = field(default_factory=lambda: collections.defaultdict(list))
    order: list[Group] = field(default_factory=list)
    units: tuple[str, ...] = ()

    def call(self, name: str) -> Callable[..., Any]:
        def noted(*args: Any, group: Group, **where: Any) -> Any:
            assert not {"src", "dst"} & set(where), "roots are ranks of the group"
            # the list into which a gather's root receives is left out, because the other ranks have none
            tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
            root = where.get("group_src", where.get("group_dst"))
            self._note(group, Collective(name, self.units, tuple(each.nbytes for each in tensors), root))
            return mock.Mock()

        return noted

    def exchange(self, calls: list[tuple[Any, ...]]) -> list[Any]:
        names = tuple(name for name, *_ in calls)
        group, sizes = calls[0][2], tuple(nbytes for _, nbytes, _ in calls)
        self._note(group, Collective("+".join(names), self.units, sizes, None))
        return []

    def _note(self, group: Group, collective: Collective) -> None:
        self.sent[group].append(collective)
        self.order.append(group)


@pytest.fixture
def wire(monkeypatch) -> Iterator[Callable[[], Wire]]:
    """A function that puts a new wire in the place of ``torch.distributed``."""

    def new() -> Wire:
        made = Wire()
        for name in ("all_reduce", "reduce", "broadcast", "gather", "all_to_all_single"):
            monkeypatch.setattr(dist, name, made.call(name))
        for name in ("all_gather", "reduce_scatter"):
            monkeypatch.setattr(collectives, name, made.call(name))
        monkeypatch.setattr(dist, "P2POp", lambda op, tensor, group, group_peer: (op.__name__, tensor.nbytes, group))
        monkeypatch.setattr(dist, "batch_isend_irecv", made.exchange)
        return made

    return new


@pytest.fixture(scope="module")
def parameters() -> dict[str, torch.nn.Parameter]:
    """The parameters of a transformer with 1.26 billion elements, which take no memory."""
    found = transformer(LAYERS, HIDDEN, "meta")
    assert len(found) == 12 * LAYERS
    return found


def plan_of(parameters: dict[str, torch.nn.Parameter], program: Program, topology: Topology) -> Plan:
    plan = sync.uniform_plan(
        parameters.items(), EFSignSGD(), program=program, topology=topology, world_size=topology.world_size
    )
    plan.check(parameters.items(), topology.world_size)
    return plan


def sent_by(
    wire: Callable[[], Wire], plan: Plan, parameters: dict[str, torch.nn.Parameter], rank: int, topology: Topology
) -> Wire:
    """The collectives of rank ``rank`` in a step, called one message after the other.

    Within a phase, level and channel this is the order on the lane.
    """
    found = wire()
    for message in built(plan, parameters, Asked(rank, topology), BUCKET_CAP_MB):
        found.units = tuple(message.keys)
        for stage in message.stages:
            if stage.spec.resource.does == "communicate":
                before = len(found.order)
                stage.work()
                (group,) = found.order[before:]
                assert (group.phase, group.channel) == (stage.spec.phase, message.channel)
    return found


CASES = {
    "allreduce": (ALLREDUCE, LARGE),
    "allgather": (ALLGATHER, LARGE),
    "alltoall": (ALLTOALL, LARGE),
    "alltoall, one device each": (ALLTOALL, Topology(1024)),
    "hierarchical": (HIERARCHICAL, LARGE),
    "parameter server": (PARAMETER_SERVER, LARGE),
    "ring": (ring(8), Topology(8)),
    "ring between machines": (
        (HIERARCHICAL[0], *ring(4, Level.INTER), HIERARCHICAL[-1]),
        Topology(4, 8),
    ),
}


LONG = ("alltoall, one device each", "parameter server")
"""Cases with many messages of their own."""


@pytest.mark.parametrize(
    "case", [pytest.param(each, marks=pytest.mark.slow) if each in LONG else each for each in CASES]
)
def test_all_ranks_derive_the_same_order(wire, parameters, case):
    program, topology = CASES[case]
    if case not in LONG:  # a ring has a step for every hop, and two for each of its parts
        parameters = dict(list(parameters.items())[: 36 if "ring" in case else 96])
    plan = plan_of(parameters, program, topology)
    last = topology.world_size - 1
    first, *others = (sent_by(wire, plan, parameters, rank, topology) for rank in (0, 1, last // 2, last))
    assert all(other.sent == first.sent and other.order == first.order for other in others)
    sent_units = {unit for sent in first.sent.values() for each in sent for unit in each.units}
    assert sent_units == set(parameters)
    if case == "parameter server":
        roots = collections.Counter(each.root for sent in first.sent.values() for each in sent)
        assert len(roots) == topology.world_size and max(roots.values()) <= 4  # there are 1200 units


ROOTED: Program = (Reduce(Level.INTRA), Encode(), AllGather(Level.INTER), Decode(), Broadcast(Level.INTRA))


def test_ranks_without_a_part_leave_out_what_they_have_no_part_in(wire, parameters):
    """Between machines only the roots communicate; within machines all ranks do, in the same order."""
    parameters = dict(list(parameters.items())[:120])
    plan = plan_of(parameters, ROOTED, LARGE)
    ranks = (0, 1, 511, 1023)
    sent = {rank: sent_by(wire, plan, parameters, rank, LARGE).sent for rank in ranks}
    inside, between = Group(0, Level.INTRA, 0), Group(1, Level.INTER, 0)
    whole = Group(2, Level.INTRA, 0)
    for rank in ranks:
        assert sent[rank][inside] == sent[0][inside] and sent[rank][whole] == sent[0][whole]
        # the group joins the ranks of one device, and carries the messages whose root is there
        device = rank % LARGE.devices
        roots = [unit.root % LARGE.devices for unit in plan.units]
        mine = {unit.key for unit, root in zip(plan.units, roots, strict=True) if root == device}
        assert {key for each in sent[rank][between] for key in each.units} == mine
    assert sent[511][between] == sent[1023][between]  # both are device 7 of their machine
    assert len({unit.root % LARGE.devices for unit in plan.units}) == LARGE.devices


def test_channels_are_the_same_on_all_ranks(wire, parameters):
    """The parts of a parameter are separate messages, which take the channels in turn."""
    few = dict(list(parameters.items())[:24])
    plan = plan_of(few, HIERARCHICAL, LARGE).parted(2**18)
    plan = Plan(plan.units, plan.topology, channels=3)
    first, *others = (sent_by(wire, plan, few, rank, LARGE) for rank in (0, 1, 511, 1023))
    assert {group.channel for group in first.sent} == {0, 1, 2}
    assert all(other.sent == first.sent and other.order == first.order for other in others)


# -------------------------------------------------------------------- amount of work


def calls(work: Callable[[], object]) -> int:
    """The number of function calls in ``work``, of Python functions and others."""
    count = 0

    def counted(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(counted)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def building(program: Program, topology: Topology, layers: int, max_numel: int | None = None) -> int:
    """The number of function calls that build the messages from a model."""
    few = transformer(layers, 64, "meta")

    def work() -> None:
        plan = plan_of(few, program, topology)
        if max_numel is not None:
            plan = plan.parted(max_numel)
            plan.check(few.items(), topology.world_size)
        plan.lines()
        assert built(plan, few, Asked(1, topology), 1.0)

    work()  # the first call imports modules and fills caches
    return calls(work)


FEW = ["alltoall", "hierarchical"]
MORE = [pytest.param(each, marks=pytest.mark.slow) for each in ("allgather", "parameter server")]


@pytest.mark.parametrize("program", [*FEW, "ring", *MORE])
def test_work_grows_with_the_number_of_units(program):
    few, many = (building(*CASES[program], layers) for layers in (5, 20))
    assert 2 < many / few < 5  # for four times the units; work done once, or per bucket, lowers the ratio


def test_work_grows_with_the_number_of_parts():
    few, many = (building(ALLTOALL, LARGE, 4, max_numel) for max_numel in (4096, 1024))
    assert 2 < many / few < 5


@pytest.mark.parametrize("program", [*FEW, *MORE])
def test_work_does_not_grow_with_the_number_of_ranks(program):
    steps, _ = CASES[program]
    few, many = (building(steps, Topology(machines, 8), 8) for machines in (2, 128))
    # a root has separate messages: as many as there are units, or as there are roots if these are fewer
    assert many < 1.2 * few or (program == "parameter server" and many < 10 * few)


def test_a_ring_grows_with_its_hops():
    few, many = (building(ring(ranks), Topology(ranks), 2) for ranks in (8, 32))
    assert many < 6 * few  # 31 hops instead of 7
