"""Prices of described machines: hand-worked, monotone, and never more work than time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import gckernels
from gckernels import Codec
from gckernels.planner.machines.description import Description
from gckernels.planner.machines.files import load_machine, machine_names
from gckernels.planner.machines.machine import Machine, MachineError, Price, Shared
from gckernels.planner.machines.parts import Copies, DescribedLink, Gpu, Host
from gckernels.sync.programs.stages import StageKind
from gckernels.sync.programs.steps import KINDS, Collective, Level, Place
from gckernels.sync.programs.topology import Topology

COLLECTIVES = [name for name, kind in KINDS.items() if issubclass(kind, Collective)]
CODECS = [StageKind.ENCODE, StageKind.ENCODE_SHARD, StageKind.DECODE, StageKind.RECODE, StageKind.ADD]
LOW_RANK = [StageKind.PROJECT, StageKind.RECONSTRUCT]
SIZES = np.array([0.0, 1.0, 1e3, 1e5, 1e6, 4e6, 5e6, 1e8, 2e9])


def machine(machines: int = 4, devices: int = 2, cards: int = 2, gpu: bool = True) -> Description:
    """A machine with round numbers: 1 GB/s between machines, 10 GB/s inside, 100 GB/s of memory."""
    return Description(
        "round",
        Topology(machines, devices),
        Host(cores=4, memory_byte_per_s=2e10, codec_byte_per_core_s=1e9, network_byte_per_core_s=2e9, call_s=1e-5),
        {Shared.INTER: DescribedLink(1.6e10, 0.5, 1e-4, cards), Shared.INTRA: DescribedLink(8e10, 1.0, 1e-5, 1)},
        Gpu(memory_byte_per_s=1.25e11, codec_efficiency=0.8, launch_s=1e-6) if gpu else None,
        Copies(bandwidth_byte_per_s=1e10, latency_s=1e-5, shared_by=2) if gpu else None,
    )


def one(price: Price) -> tuple[float, dict[Shared, float]]:
    """The entries of a price of one stage."""
    return float(price.alone_s[0]), {shared: float(work[0]) for shared, work in price.work_s.items()}


def collective(step: str, level: Level, wire: float, described: Description, place: Place = Place.DEVICE):
    return one(described.collective(step, level, place, np.array([wire])))


W = 1e6  # bytes that a rank sends as a mean over all ranks

HAND_WORKED = [
    # one level, 4 machines: hops of 0.1 ms, and both devices of a machine send their megabyte over one card
    ("AllReduce", Level.INTER, 6 * 1e-4 + 2e-3, {Shared.INTER: 2e-3}),
    ("AllGather", Level.INTER, 3 * 1e-4 + 2e-3, {Shared.INTER: 2e-3}),
    ("AllToAll", Level.INTER, 3 * 1e-4 + 2e-3, {Shared.INTER: 2e-3}),
    ("Hop", Level.INTER, 1e-4 + 2e-3, {Shared.INTER: 2e-3}),
    # the root's card receives the payloads of 3 machines for both devices: 2 * 4 * 1 MB
    ("Gather", Level.INTER, 3 * 1e-4 + 8e-3, {Shared.INTER: 2e-3}),
    ("Broadcast", Level.INTER, 2 * 1e-4 + 2e-3 * 4 / 3, {Shared.INTER: 2e-3 * 4 / 3}),
    # inside a machine, 2 devices at 10 GB/s
    ("AllReduce", Level.INTRA, 2 * 1e-5 + 1e-4, {Shared.INTRA: 1e-4}),
    ("Gather", Level.INTRA, 1e-5 + 2e-4, {Shared.INTRA: 1e-4}),
    ("Reduce", Level.INTRA, 1e-5 + 2e-4, {Shared.INTRA: 2e-4}),
    # all 8 ranks: a ring leaves each machine once, over 3 hops between machines and 4 inside them in each pass
    ("AllGather", Level.FLAT, 3 * 1e-4 + 4 * 1e-5 + 1e-3, {Shared.INTER: 1e-3, Shared.INTRA: 1e-4}),
    # an all-reduce adds inside machines first: 6/7 of the megabyte leaves them, 4/7 for each machine stays inside
    (
        *("AllReduce", Level.FLAT, 6 * 1e-4 + 2 * 1e-5 + 6e-3 / 7 + 4e-4 / 7),
        {Shared.INTER: 6e-3 / 7, Shared.INTRA: 4e-4 / 7},
    ),
    # 6 of 7 partners are in other machines, for both devices
    ("AllToAll", Level.FLAT, 6 * 1e-4 + 1e-5 + 12e-3 / 7, {Shared.INTER: 12e-3 / 7, Shared.INTRA: 1e-4 / 7}),
    ("Gather", Level.FLAT, 6 * 1e-4 + 1e-5 + 48e-3 / 7, {Shared.INTER: 12e-3 / 7, Shared.INTRA: 1e-4 / 7}),
]


@pytest.mark.parametrize(("step", "level", "alone_s", "work_s"), HAND_WORKED, ids=lambda each: str(each)[:20])
def test_collectives_are_as_worked_out_by_hand(step, level, alone_s, work_s):
    price = collective(step, level, W, machine())
    assert price[0] == pytest.approx(alone_s)
    assert price[1] == pytest.approx(work_s)


@pytest.mark.parametrize(
    ("machines", "level", "wire", "alone_s"),
    [
        (4, Level.INTER, 1e3, 4 * 1e-4 + 4 / 3 * 2e-6),  # a tree: two hops up and two down
        (4, Level.INTER, 1e8, 6 * 1e-4 + 0.2),  # a ring
        (2, Level.INTER, 1e6, 2 * 1e-4 + 2e-3),  # both are the same
        (4, Level.FLAT, 1e3, 4 * 1e-4 + 2 * 1e-5 + 8 / 7 * 1e-6),
        (4, Level.FLAT, 1e8, 6 * 1e-4 + 2 * 1e-5 + 0.6 / 7 + 0.04 / 7),  # hierarchical
        (2, Level.FLAT, 1e6, 2 * 1e-4 + 2 * 1e-5 + 2e-3 / 3),  # a tree: each half of the vector crosses once
        (1024, Level.FLAT, 1e3, 20 * 1e-4 + 2 * 1e-5 + 2048 / 2047 * 1e-6),
    ],
)
def test_all_reduces_take_the_fastest_way(machines, level, wire, alone_s):
    described = machine(machines)
    assert collective("AllReduce", level, wire, described)[0] == pytest.approx(alone_s)
    ring_s = collective("AllReduce", level, wire, described, Place.HOST)[0]
    assert ring_s >= (1.0 - 1e-9) * alone_s  # Gloo has a ring


@pytest.mark.parametrize("devices", [1, 8])
def test_what_cards_carry_in_an_all_reduce_has_bounds(devices):
    """No all-reduce sends less than ``2 (M - 1) / M`` of the vector out of a machine, and none here more than twice."""
    for machines in (2, 3, 8, 100):
        described = machine(machines, devices, cards=devices)
        for level in (Level.FLAT, Level.INTER):
            ranks = described.topology.size(level)
            for vector in (1e2, 1e6, 1e10):
                price = collective("AllReduce", level, 2 * (ranks - 1) / ranks * vector, described)[1][Shared.INTER]
                whole = vector if level == Level.FLAT else vector * devices
                assert 2 * (machines - 1) / machines * (1 - 1e-9) <= price * 1e9 / whole <= 2.0 + 1e-9


def test_a_card_for_every_device_doubles_what_a_machine_sends():
    shared, own = machine(cards=2), machine(cards=1)
    for step, level in (("AllReduce", Level.INTER), ("AllGather", Level.FLAT), ("AllToAll", Level.FLAT)):
        (_, both), (_, single) = collective(step, level, W, shared), collective(step, level, W, own)
        assert both[Shared.INTER] == pytest.approx(2 * single[Shared.INTER])


def test_a_flat_reduction_of_one_level_is_that_of_the_level():
    inside, between = machine(machines=1), machine(devices=1)
    for step in COLLECTIVES:
        assert collective(step, Level.FLAT, W, inside) == collective(step, Level.INTRA, W, inside)
        assert collective(step, Level.FLAT, W, between) == collective(step, Level.INTER, W, between)


def test_one_medium_carries_what_all_machines_send():
    """With one device in each, or with one card for all devices of a machine, or with one for each of them."""
    for devices, cards in ((1, 1), (2, 2), (2, 1)):
        usual, used = machine(4, devices, cards), np.array([W])
        medium = replace(usual.links[Shared.INTER], one_medium=True)
        radio = replace(usual, links={**usual.links, Shared.INTER: medium})
        for step in COLLECTIVES:
            price, all_links = (each.collective(step, Level.INTER, Place.DEVICE, used) for each in (radio, usual))
            links = 4 * devices / min(cards, devices)
            assert price.work_s[Shared.INTER] == pytest.approx(links * all_links.work_s[Shared.INTER])
            assert not price.busiest_s and price.alone_s >= price.work_s[Shared.INTER]
        gathered_s = radio.collective("Gather", Level.INTER, Place.DEVICE, used).work_s[Shared.INTER]
        assert gathered_s == pytest.approx(4 * devices * W / 1e9)


def test_devices_of_a_machine_have_links_of_their_own():
    inside = replace(machine().links[Shared.INTRA], one_medium=True)
    with pytest.raises(MachineError, match=r"links\.intra\.one_medium: only links between machines"):
        replace(machine(), links={**machine().links, Shared.INTRA: inside})


def test_collectives_of_the_host_take_cores():
    (alone_s, work_s) = collective("AllGather", Level.INTER, W, machine(), Place.HOST)
    assert work_s == pytest.approx({Shared.INTER: 2e-3, Shared.CORES: 0.5e-3})
    assert alone_s == pytest.approx(3 * 1e-4 + 2e-3)
    (alone_s, work_s) = collective("AllGather", Level.INTRA, W, machine(), Place.HOST)  # in the memory of the host
    assert work_s == pytest.approx({Shared.CORES: 0.5e-3})
    assert alone_s == pytest.approx(1e-5 + 0.5e-3)
    # a root's copies on a host: a binomial tree of depth 2 sends the result of 4/3 MB twice, for two groups
    assert collective("Broadcast", Level.INTER, W, machine(gpu=False))[0] == pytest.approx(2e-4 + 4 * 4 / 3 * 1e-3)


def codec(described: Description, work: StageKind, spec: str, elements: float, sources: int = 1, place=Place.DEVICE):
    compressor = gckernels.from_spec(spec)
    return one(described.codec(work, compressor, place, np.array([1.0]), np.array([elements]), sources))


@pytest.mark.parametrize(
    ("work", "spec", "sources", "nbytes"),
    [
        (StageKind.ENCODE, "EFSignSGD(block=1024)", 1, 12.129),
        (StageKind.ENCODE, "BlockQuant(block=1024)", 1, 13.004),
        (StageKind.ENCODE, "QSGD(levels=7, bucket=1024)", 1, 4.504),
        (StageKind.ENCODE, "Cast16", 1, 6),
        (StageKind.DECODE, "EFSignSGD(block=1024)", 8, 5.031),
        (StageKind.DECODE, "Cast16", 1, 6),
        (StageKind.RECODE, "EFSignSGD(block=1024)", 8, 9.160),
        (StageKind.ADD, "EFSignSGD(block=1024)", 1, 12.258),
        (StageKind.PROJECT, "PowerSGD(rows=1024)", 1, 8),
        (StageKind.PROJECT, "PowerSGD(rows=1024, one_sided=True)", 1, 12),
        (StageKind.RECONSTRUCT, "PowerSGD(rows=1024)", 1, 12),
        (StageKind.PROJECT, "Identity", 1, 8),  # sent exactly beside factors
        (StageKind.RECONSTRUCT, "Identity", 1, 8),
    ],
)
def test_codecs_move_the_fewest_bytes_at_nine_tenths_of_the_bandwidth(work, spec, sources, nbytes):
    """Here at eight tenths, which are 100 GB/s. The tolerance is for rounding."""
    for elements in (1e6, 1e8):
        alone_s, work_s = codec(machine(), work, spec, elements, sources)
        assert work_s[Shared.DEVICE] == pytest.approx(elements * nbytes / 1e11, rel=1e-3)
        assert alone_s - work_s[Shared.DEVICE] == pytest.approx(1e-6, rel=3)  # launches
    alone_s, work_s = codec(machine(), work, spec, 1e6, sources, Place.HOST)
    assert work_s == pytest.approx({Shared.CORES: 1e6 * nbytes / 1e9}, rel=1e-3)
    assert alone_s == pytest.approx(work_s[Shared.CORES] + 1e-5)


def test_published_times_replace_estimates_on_the_device_alone():
    described = load_machine("espresso-nvlink")
    assert isinstance(described, Description)
    assert codec(described, StageKind.ENCODE, "DGC", 1e6)[0] == pytest.approx(400e-6)  # 4 MB
    assert codec(described, StageKind.ENCODE, "DGC", 100)[0] == pytest.approx(400e-6)
    assert codec(described, StageKind.DECODE, "EFSignSGD", 32e6)[0] == pytest.approx(3300e-6)  # 128 MB
    assert codec(described, StageKind.ENCODE, "OneBit", 63e6)[0] == pytest.approx(7000e-6 + 6360e-6)
    # merging 8 payloads of 5 bytes for 32 elements moves 5.25 bytes where one moves 4.15625
    merged = 230e-6 + (3300e-6 - 230e-6) * 5.25 / 4.15625
    assert codec(described, StageKind.DECODE, "EFSignSGD", 32e6, 8)[0] == pytest.approx(merged, rel=1e-3)
    assert codec(described, StageKind.RECODE, "EFSignSGD", 32e6, 8)[0] == pytest.approx(merged + 3700e-6, rel=1e-3)
    host = codec(described, StageKind.ENCODE, "DGC", 1e6, place=Place.HOST)
    assert host == codec(replace(described, codecs={}), StageKind.ENCODE, "DGC", 1e6, place=Place.HOST)


def test_copies():
    described, nbytes = machine(), np.array([1e6])
    worked_out = {Shared.TO_HOST: (2.1e-4, 2e-4), Shared.DEVICE: (2.1e-5, 2e-5), Shared.CORES: (2.1e-4, 2e-4)}
    for resource, (expected_s, busy_s) in worked_out.items():
        alone_s, work_s = one(described.copy(resource, nbytes))
        assert alone_s == pytest.approx(expected_s) and work_s == pytest.approx({resource: busy_s})
    for resource in (Shared.INTER, Shared.INTRA):
        with pytest.raises(MachineError, match="has no copies"):
            described.copy(resource, nbytes)
    with pytest.raises(MachineError, match="has no copies"):
        machine(gpu=False).copy(Shared.TO_HOST, nbytes)


# -------------------------------------------------------------------- of all machines


def all_prices(described: Machine):
    """The prices of everything that a machine can do, for all sizes in ascending order."""
    for place in Place:
        for step in COLLECTIVES:
            for level in Level:
                yield step, described.collective(step, level, place, SIZES)
        for name, kind in gckernels.COMPRESSORS.items():
            compressor = kind()
            works = CODECS if isinstance(compressor, Codec) else LOW_RANK
            for work in works:
                for sources in (1, described.topology.world_size):
                    yield name, described.codec(work, compressor, place, np.minimum(SIZES, 7), SIZES, sources)
    copies = [Shared.CORES] if described.computes_on == Shared.CORES else [*Shared]
    for resource in copies:
        if resource not in (Shared.INTER, Shared.INTRA):
            yield resource, described.copy(resource, SIZES)


@pytest.mark.parametrize("name", machine_names())
def test_prices_are_monotone_and_work_fits_into_the_time(name):
    described = load_machine(name)
    count = 0
    for what, price in all_prices(described):
        count += 1
        assert price.alone_s.shape == SIZES.shape, what
        assert np.isfinite(price.alone_s).all() and (np.diff(price.alone_s) >= 0).all() and price.alone_s[0] >= 0, what
        for shared, work_s in price.work_s.items():
            assert (np.diff(work_s) >= 0).all() and work_s[0] >= 0, what
            assert (work_s <= price.alone_s * described.capacities[shared] * (1 + 1e-12)).all(), (what, shared)
        if what in gckernels.COMPRESSORS:
            assert price.alone_s[0] == 0, what
    assert count > 2 * 5 * len(gckernels.CODECS)


def test_errors_say_what_a_machine_cannot_do():
    with pytest.raises(MachineError, match="'Encode': is no collective"):
        machine().collective("Encode", Level.FLAT, Place.DEVICE, SIZES)
    with pytest.raises(MachineError, match="PowerSGD: neither encodes nor decodes"):
        machine().codec(StageKind.ENCODE, gckernels.PowerSGD(), Place.DEVICE, SIZES, SIZES, 1)
    with pytest.raises(MachineError, match="copy: is no work of codecs"):
        machine().codec(StageKind.COPY, gckernels.Identity(), Place.DEVICE, SIZES, SIZES, 1)
