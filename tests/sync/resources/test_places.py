"""Steps on the host of a device: which copies are made, and where all tensors lie."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from gckernels import BlockQuant, TopK, sync
from gckernels.sync import Topology, UnitPlan, attach
from gckernels.sync.communication.communicators import DryCommunicators
from gckernels.sync.communication.links import RankConnections
from gckernels.sync.messages.encoded import EncodedMessage
from gckernels.sync.messages.message import Unit
from gckernels.sync.messages.seeds import Seeds
from gckernels.sync.programs import (
    ALLTOALL,
    AllGather,
    AllToAll,
    Decode,
    Encode,
    Level,
    Place,
    Program,
    ReduceScatter,
    enumerate_programs,
    ring,
)
from gckernels.sync.programs.rules import sites
from gckernels.sync.programs.stages import Resource
from gckernels.sync.resources.feedback import Feedback
from gckernels.sync.resources.memory_spaces import Places
from ranks import run_ranks, values_of
from workloads import digest_of, placed

DEVICE, HOST = torch.device("meta"), torch.device("cpu")  # two memories, of which the device's has no bytes
APART = Places(DEVICE, HOST, apart=True)
TWO_BY_TWO = Topology(2, 2)
E, D = Encode, Decode


class Touched(TorchDispatchMode):
    """Records the devices of all tensors that go through an op, and skips copies between devices."""

    def __init__(self) -> None:
        super().__init__()
        self.devices: set[tuple[str, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [each for each in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        self.devices.add(tuple(tensor.device.type for tensor in tensors))
        copies = func.overloadpacket is torch.ops.aten.copy_ and len({tensor.device for tensor in tensors}) > 1
        return args[0] if copies else func(*args, **(kwargs or {}))


@contextlib.contextmanager
def no_collectives(devices: set[str]) -> Iterator[None]:
    """Replace every collective by one that adds the devices of its tensors to ``devices``."""

    def look(*args: Any, **kwargs: Any) -> Any:
        for each in torch.utils._pytree.tree_leaves((args, kwargs)):
            if isinstance(each, torch.Tensor):
                devices.add(each.device.type)
        return mock.Mock()

    names = ("all_reduce", "reduce", "broadcast", "gather", "all_to_all_single")
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(RankConnections, "group", None))
        for name in names:
            stack.enter_context(mock.patch(f"gckernels.sync.messages.collectives.dist.{name}", look))
        for name in ("all_gather", "reduce_scatter"):
            stack.enter_context(mock.patch(f"gckernels.sync.messages.collectives.{name}", look))
        yield


ALLOWED = {
    Resource.COMPUTE: {"meta"},
    Resource.COMMUNICATE: {"meta"},
    Resource.HOST_COMPUTE: {"cpu"},
    Resource.HOST_COMMUNICATE: {"cpu"},
    Resource.TO_HOST: {"cpu", "meta"},
    Resource.TO_DEVICE: {"meta", "cpu"},
}


def check_stages(program: Program, rank: int, *unused: str) -> None:
    units = [
        Unit(UnitPlan(f"p{numel}", numel, BlockQuant(), program, True, root=1), torch.zeros(numel, device=DEVICE))
        for numel in (40, 1000)
    ]
    sent_from: set[str] = set()
    communicators = DryCommunicators(rank, TWO_BY_TWO, APART)
    feedback = Feedback(APART)
    feedback.unused.add(unused)
    message = EncodedMessage(units, communicators, feedback, Seeds(0, APART))
    for stage in message.stages:
        sent_from.clear()
        with Touched() as touched, no_collectives(sent_from):
            stage.work()
        found = sent_from.union(*touched.devices)
        assert found <= ALLOWED[stage.spec.resource], (program, stage)
        if not stage.spec.name.startswith("Hop"):  # hops are replaced by nothing
            assert bool(sent_from) == (stage.spec.level is not None), (program, stage)
        if stage.spec.resource in (Resource.TO_HOST, Resource.TO_DEVICE):
            to = "cpu" if stage.spec.resource == Resource.TO_HOST else "meta"
            assert {each for each in touched.devices if len(each) == 2} == {(to, "cpu" if to == "meta" else "meta")}


@pytest.mark.parametrize("stride", [53, pytest.param(16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("rank", range(4))
def test_every_stage_has_its_data_where_it_works(rank, stride):
    for number, program in enumerate(list(enumerate_programs(TWO_BY_TWO, tuple(Place)))[rank::stride]):
        check_stages(program, rank, *(["p40"] if number % 2 == 0 else []))


def test_a_ring_on_the_host():
    _, *hops, gather, _ = ring(2, Level.INTER)
    program = (
        ReduceScatter(Level.INTRA),
        E(Place.HOST),
        *hops,
        gather,
        D(Place.HOST),
        AllGather(Level.INTRA),
    )
    dist = "gckernels.sync.messages.collectives.dist"
    with mock.patch(f"{dist}.P2POp"), mock.patch(f"{dist}.batch_isend_irecv", return_value=[]):
        check_stages(program, 3)


# -------------------------------------------------------------------- copies


def copies(program: Program) -> list[str]:
    unit = Unit(UnitPlan("p", 1000, BlockQuant(), program, True), torch.zeros(1000, device=DEVICE))
    communicators = DryCommunicators(0, TWO_BY_TWO, APART)
    message = EncodedMessage([unit], communicators, Feedback(APART), Seeds(0, APART))
    return [f"{stage.spec.resource.value}-{stage.spec.phase}" for stage in message.stages]


@pytest.mark.parametrize(
    ("program", "stages"),
    [
        ((E(), AllGather(), D()), ["compute-0", "communicate-0", "compute-1"]),
        (
            (E(Place.HOST), AllGather(), D(Place.HOST)),
            ["to-host-0", "host-compute-0", "host-communicate-0", "host-compute-1", "to-device-1"],
        ),
        (
            (E(Place.HOST), AllGather(), D()),
            ["to-host-0", "host-compute-0", "host-communicate-0", "to-device-1", "compute-1"],
        ),
        (
            (E(), AllGather(), D(Place.HOST)),
            ["compute-0", "communicate-0", "to-host-1", "host-compute-1", "to-device-1"],
        ),
        (  # decoding and encoding share a place: one stage, no copies
            (E(), AllToAll(), D(Place.HOST), E(Place.HOST), AllGather(), D()),
            [
                *("compute-0", "communicate-0", "to-host-1", "host-compute-1"),
                *("host-communicate-1", "to-device-2", "compute-2"),
            ],
        ),
        (
            (E(), AllToAll(), D(Place.HOST), E(), AllGather(), D()),
            [
                *("compute-0", "communicate-0", "to-host-1", "host-compute-1", "to-device-1", "compute-1"),
                *("communicate-1", "compute-2"),
            ],
        ),
        (  # the device sends raw data
            (E(Place.HOST), AllToAll(), D(Place.HOST), AllGather()),
            [
                *("to-host-0", "host-compute-0", "host-communicate-0", "host-compute-1", "to-device-1"),
                *("communicate-1", "compute-2"),
            ],
        ),
    ],
)
def test_what_is_copied(program, stages):
    assert copies(program) == stages


def test_where_collectives_take_place():
    exchange = (E(Place.HOST), AllToAll(Level.INTER), D(), AllGather(Level.INTER))
    program = (ReduceScatter(Level.INTRA), *exchange, AllGather(Level.INTRA))
    assert sites(program) == [
        (0, Level.INTRA, Place.DEVICE, False),
        (1, Level.INTER, Place.HOST, True),
        (2, Level.INTER, Place.DEVICE, True),
        (3, Level.INTRA, Place.DEVICE, True),
    ]


def test_one_memory_has_no_places():
    places = Places.of(HOST)
    assert not places.apart and places.actual(Place.HOST) == Place.DEVICE
    assert Places.of(torch.device("cuda", 3)).memory(Place.HOST) == HOST


def test_a_residual_is_where_its_encoding_is():
    feedback = Feedback(APART)
    assert feedback.residual("worker", "a", 3).tensor.device == DEVICE
    kept = feedback.residual("worker", "b", 3, Place.HOST)
    assert kept.tensor.device == HOST and feedback.residual("worker", "b", 3, Place.HOST) is kept


# -------------------------------------------------------------------- training


def trained(on_host: bool) -> tuple[str, float, float]:
    """A digest of the parameters after some steps, the bytes sent per step, and the bytes of the residuals."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 60), nn.ReLU(), nn.Linear(60, 3))
    program = placed(ALLTOALL, Place.HOST if on_host else Place.DEVICE)
    apart = mock.patch.object(Places, "of", staticmethod(lambda device: Places(device, HOST, apart=on_host)))
    with apart:
        attachment = attach(model, sync.uniform_plan(model, TopK(ratio=0.1), program=program))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        generator = torch.Generator().manual_seed(torch.distributed.get_rank())
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.randn(8, 40, generator=generator)).square().sum().backward()
            optimizer.step()
        state = attachment.state_dict()
        attachment.load_state_dict(state)
        sent = attachment.sent_nbytes_per_step()
        attachment.close()
    return digest_of(list(model.parameters())), sent, attachment.residual_nbytes()


def test_a_training_with_steps_on_the_host():
    found, wanted = (values_of(run_ranks(3, trained, on_host)) for on_host in (True, False))
    assert found == wanted and len({digest for digest, *_ in found}) == 1
