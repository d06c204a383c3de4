"""Steps on the host of a device: which copies are made, where all tensors lie, and that streams run their work in
order."""

from __future__ import annotations

import contextlib
import functools
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from gckernels import BlockQuant, TopK, sync
from gckernels.sync import (
    ALLTOALL,
    AllGather,
    AllToAll,
    Decode,
    Encode,
    Level,
    Place,
    Program,
    ReduceScatter,
    Synchronizer,
    Topology,
    UnitPlan,
    enumerate_programs,
    ring,
)
from gckernels.sync.messages.encoded import EncodedMessage
from gckernels.sync.messages.message import Unit
from gckernels.sync.messages.seeds import Seeds
from gckernels.sync.programs.lanes import MAX_PHASES
from gckernels.sync.programs.rules import sites
from gckernels.sync.programs.stages import Resource
from gckernels.sync.resources.communicators import DryCommunicators
from gckernels.sync.resources.feedback import Feedback
from gckernels.sync.resources.lane_kinds import FedStreamLane, ThreadLane
from gckernels.sync.resources.lanes import DeviceLanes
from gckernels.sync.resources.places import Places
from gckernels.sync.resources.workers import Failure, Pool, Queue, Token
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


def check_stages(program: Program, rank: int, keep_unused: bool) -> None:
    units = [
        Unit(UnitPlan(f"p{numel}", numel, BlockQuant(), program, True, root=1), torch.zeros(numel, device=DEVICE))
        for numel in (40, 1000)
    ]
    sent_from: set[str] = set()
    communicators = DryCommunicators(rank, TWO_BY_TWO, APART)
    message = EncodedMessage(program, units, communicators, Feedback(APART), Seeds(0, APART), keep_unused)
    for stage in message.stages:
        sent_from.clear()
        with Touched() as touched, no_collectives(sent_from):
            stage.work(0)
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
        check_stages(program, rank, keep_unused=number % 2 == 0)


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
        check_stages(program, 3, keep_unused=False)


# -------------------------------------------------------------------- copies


def copies(program: Program) -> list[str]:
    unit = Unit(UnitPlan("p", 1000, BlockQuant(), program, True), torch.zeros(1000, device=DEVICE))
    communicators = DryCommunicators(0, TWO_BY_TWO, APART)
    message = EncodedMessage(program, [unit], communicators, Feedback(APART), Seeds(0, APART), False)
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
    assert feedback.residual("worker", "a", 3).device == DEVICE
    kept = feedback.residual("worker", "b", 3, Place.HOST)
    assert kept.device == HOST and feedback.residual("worker", "b", 3, Place.HOST) is kept


# -------------------------------------------------------------------- training


def trained(on_host: bool) -> tuple[str, float, float]:
    """A digest of the parameters after some steps, the bytes sent per step, and the bytes of the residuals."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 60), nn.ReLU(), nn.Linear(60, 3))
    program = placed(ALLTOALL, Place.HOST if on_host else Place.DEVICE)
    apart = mock.patch.object(Places, "of", staticmethod(lambda device: Places(device, HOST, apart=on_host)))
    with apart:
        synchronizer = Synchronizer(model, sync.plan(model, TopK(ratio=0.1), program=program))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        generator = torch.Generator().manual_seed(torch.distributed.get_rank())
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.randn(8, 40, generator=generator)).square().sum().backward()
            optimizer.step()
        state = synchronizer.state_dict()
        synchronizer.load_state_dict(state)
        sent = synchronizer.sent_nbytes_per_step()
        synchronizer.close()
    return digest_of(list(model.parameters())), sent, synchronizer.residual_nbytes()


def test_a_training_with_steps_on_the_host():
    found, wanted = (values_of(run_ranks(3, trained, on_host)) for on_host in (True, False))
    assert found == wanted and len({digest for digest, *_ in found}) == 1


# -------------------------------------------------------------------- streams fed by threads


@dataclass
class Stream:
    """A fake stream that logs its operations in order."""

    log: list[Any] = field(default_factory=list)
    broken: bool = False

    def wait_event(self, event: Event | str) -> None:
        self.log.append(("wait", event))

    def synchronize(self) -> None:
        self.log.append("synchronize")


@dataclass(eq=False)
class Event:
    """A fake event after the work of a stream. A thread may wait for it only if the event blocks, so that the thread
    sleeps."""

    blocking: bool = False
    where: int = 0

    def record(self, stream: Stream) -> None:
        if stream.broken:
            raise RuntimeError("device-side assert")
        stream.log.append("record")
        self.where = len(stream.log)

    def synchronize(self) -> None:
        assert self.blocking and self.where


@pytest.fixture
def streams() -> Iterator[list[Stream]]:
    """The list of all streams that are created; each logs the events that it records or waits for."""
    made: list[Stream] = []

    def make(device: Any = None) -> Stream:
        made.append(Stream())
        return made[-1]

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch("torch.cuda.stream", lambda stream: contextlib.nullcontext()))
        stack.enter_context(mock.patch("torch.cuda.Event", Event))
        stack.enter_context(mock.patch("torch.cuda.Stream", make))
        stack.enter_context(mock.patch("torch.cuda.current_stream", lambda device: Stream()))
        yield made


@pytest.fixture
def stream(streams: list[Stream]) -> Stream:
    return Stream()


@pytest.fixture
def pools() -> Iterator[list[Pool]]:
    made = [Pool(name, Failure()) for name in ("host", "device")]
    yield made
    for pool in made:
        pool.close()


def test_a_fed_stream_waits_for_threads_and_lets_the_device_wait_for_events(stream, pools):
    host, lane = (
        ThreadLane("host", Failure(), Queue(pools[0])),
        FedStreamLane("fed", Failure(), Queue(pools[1]), stream),
    )
    gate, threads = threading.Event(), set()
    thread = host.submit(lambda: (gate.wait(10), threads.add(threading.current_thread())))
    device = Token("other stream", is_done=True)  # type: ignore[arg-type]
    first = lane.submit(lambda: (stream.log.append("first"), threads.add(threading.current_thread())), (thread, device))
    second = lane.submit(lambda: stream.log.append("second"))
    assert not second.join(0.05) and stream.log == []  # work stays in order, and submitting does not wait
    gate.set()
    assert second.join(10) and first.is_done
    assert stream.log == [("wait", "other stream"), "first", "record", "second", "record"]
    assert (first.event.where, second.event.where) == (3, 5)  # type: ignore[union-attr]
    first.wait()  # allowed, because the event blocks
    assert len(threads) == 2  # the stream keeps a thread of its own


def test_a_device_that_fails_is_told_of(stream, pools):
    lane, notified = FedStreamLane("fed", Failure(), Queue(pools[1]), stream), set()
    stream.broken = True
    token = lane.submit(lambda: None, (), lambda error: notified.add(("first", str(error))))
    after = lane.submit(lambda: None, (token,), lambda error: notified.add(("second", str(error))))
    assert after.join(10) and token.is_done
    assert notified == {("first", "device-side assert"), ("second", "device-side assert")}


# -------------------------------------------------------------------- collectives of several communicators

MESSAGES = 7
PHASES = (  # for each phase, whether its collective is on the host
    (False, True, True, False),
    (False, False),
    (True, False, True),
    (False, *[True] * 8, False, False),  # more phases than lanes
    (False,),
)


def launched(streams: list[Stream], seed: int, steps: int) -> list[tuple[int, int]]:
    """The order in which a device's collectives are launched when the host takes its time, as ``(message, phase)``.
    Each collective of a message depends on the ones before it."""
    lanes, choose, order = DeviceLanes(torch.device("cuda"), offloads=True), random.Random(seed), []
    for step in range(steps):
        tokens = []
        for number in range(step * MESSAGES, (step + 1) * MESSAGES):
            token = lanes.here()
            phases = PHASES[number % len(PHASES)]
            lanes.next_message(len(phases) - 1)
            for phase, on_host in enumerate(phases):
                pause_s = choose.random() * 0.004
                token = lanes.lane(Resource.HOST_COMPUTE, phase).submit(lambda s=pause_s: time.sleep(s), (token,))
                if on_host:
                    token = lanes.lane(Resource.HOST_COMMUNICATE, phase).submit(lambda: None, (token,))
                else:
                    resource = Resource.COMMUNICATE if phase else Resource.AVERAGE
                    launch = functools.partial(order.append, (number, phase))
                    token = lanes.lane(resource, phase, number % 2).submit(launch, (token,))
            tokens.append(token)
        lanes.end_step()
        assert all(token.join(30) for token in tokens)
    lanes.close()
    assert lanes.failure.error is None
    return order


def test_collectives_of_different_communicators_are_launched_in_one_order(streams):
    orders = [launched(streams, seed, steps=2) for seed in range(6)]
    assert all(order == orders[0] for order in orders)
    assert len(orders[0]) == len(set(orders[0]))
    for lane in range(MAX_PHASES):
        of_lane = [launch for launch in orders[0] if launch[1] % MAX_PHASES == lane]
        assert of_lane == sorted(of_lane)  # each communicator follows the order of the messages


def test_messages_overlap_on_their_way_through_the_host(streams):
    """A message's last collective is launched after the first ones of the messages behind it."""
    order = launched(streams, 0, steps=1)
    assert order.index((1, 0)) < order.index((1, 1)) < order.index((0, 3))


def test_closing_waits_for_the_device(streams):
    lanes = DeviceLanes(torch.device("cuda"))
    lanes.lane(Resource.COMPUTE, 0).submit(lambda: None)
    lanes.close()
    assert streams[0].log == ["record", "synchronize"]


def test_closing_after_a_failure_waits_for_no_device(streams):
    lanes = DeviceLanes(torch.device("cuda"), offloads=True)
    lanes.lane(Resource.COMMUNICATE, 0).submit(lambda: None)
    lanes.failure.set(RuntimeError("another rank is gone"))
    lanes.close()
    assert "synchronize" not in streams[0].log
