"""Machines as they would be: descriptions with other numbers, and the same from prices alone."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

import gckernels
from gckernels.planner.machines.description import Description
from gckernels.planner.machines.files import description_to_json, load_machine, machine_from_text, machine_names
from gckernels.planner.machines.machine import Machine, MachineError, Price, Shared
from gckernels.planner.machines.scaling import FasterCodecs, scaled, sending_bit_per_s
from gckernels.planner.timeline.pricing import Pricer, Units
from gckernels.sync.programs.named import ALLGATHER
from gckernels.sync.programs.stages import MessageKind, StageKind
from gckernels.sync.programs.steps import KINDS, Collective, Level, Place
from gckernels.sync.programs.topology import Topology

COLLECTIVES = [name for name, kind in KINDS.items() if issubclass(kind, Collective)]
SIZES = np.array([0.0, 1e3, 1e5, 1e7])


def described(name: str = "h100-400gbit") -> Description:
    machine = load_machine(name)
    assert isinstance(machine, Description)
    return machine


def measured(machine: Description) -> Machine:
    """The same prices from an object that is no description, like a profile."""
    names = ("name", "topology", "computes_on", "capacities", "overheads", "memory_nbytes", "shared_by")
    prices = ("collective", "codec", "copy")
    same = {name: getattr(machine, name) for name in (*names, *prices)}
    return cast(Machine, SimpleNamespace(estimated=False, margin=0.05, **same))


def assert_same(one: Price, other: Price, what: object = None) -> None:
    np.testing.assert_allclose(one.alone_s, other.alone_s, rtol=1e-3, err_msg=str(what))
    assert {*one.work_s} == {*other.work_s}, what
    for shared, work_s in one.work_s.items():
        np.testing.assert_allclose(work_s, other.work_s[shared], rtol=1e-3, err_msg=str(what))


def test_nothing_changed_is_the_same_machine():
    machine = described()
    assert scaled(machine) is machine
    assert scaled(machine, machines=2) is machine
    assert scaled(machine, codec_speed=1) is machine


def test_a_description_gets_other_numbers_and_can_be_written():
    machine = described("espresso-nvlink")
    other = scaled(machine, bandwidth_bit_per_s=1e9, machines=3)
    assert isinstance(other, Description)
    assert other.topology == Topology(3, 8)
    assert other.links[Shared.INTER] == replace(machine.links[Shared.INTER], bandwidth_bit_per_s=1e9)
    assert other.links[Shared.INTRA] == machine.links[Shared.INTRA]
    assert other.name == "espresso-nvlink, machines: 3, 1 Gbit/s"
    assert machine_from_text(json.dumps(description_to_json(other)), "what if") == other


def test_the_limit_of_software_remains():
    machine = described("espresso-nvlink")
    wire = np.array([1e9])
    seconds = [
        float(
            scaled(machine, bandwidth_bit_per_s=rate).collective("AllGather", Level.FLAT, Place.DEVICE, wire).alone_s[0]
        )
        for rate in (1e9, 1e10, 1e11, 1e12)
    ]
    assert seconds[0] == pytest.approx(8 / 0.95, rel=1e-2)
    assert seconds[0] > 9 * seconds[1] > 1.5 * 9 * seconds[2]
    assert seconds[2] == seconds[3]


def test_a_single_machine_has_a_bandwidth_inside():
    inside = scaled(described(), machines=1)
    other = scaled(inside, bandwidth_bit_per_s=1e11)
    assert isinstance(other, Description) and other.links[Shared.INTRA].bandwidth_bit_per_s == 1e11
    assert isinstance(inside, Description) and other.links[Shared.INTER] == inside.links[Shared.INTER]
    with pytest.raises(MachineError, match="single rank"):
        scaled(scaled(described("lab"), machines=1), bandwidth_bit_per_s=1e9)


@pytest.mark.parametrize("name", ["lab", "h100-400gbit"])
@pytest.mark.parametrize("machines", [2, 3, 16])
@pytest.mark.parametrize("bandwidth_bit_per_s", [None, 1e8, 5e8])
def test_prices_alone_give_what_other_numbers_give(name, machines, bandwidth_bit_per_s):
    """One level, whose laws say everything. The bandwidth is a nominal one: a machine reaches a fraction of it."""
    machine = described(name)
    levels = [Level.INTER, Level.FLAT] if machine.topology.devices == 1 else [Level.INTER]
    reached = None
    if bandwidth_bit_per_s is not None:
        reached = sending_bit_per_s(scaled(machine, bandwidth_bit_per_s=bandwidth_bit_per_s))
    right = scaled(machine, bandwidth_bit_per_s=bandwidth_bit_per_s, machines=machines)
    derived = scaled(measured(machine), bandwidth_bit_per_s=reached, machines=machines)
    assert derived.topology == right.topology
    for step in COLLECTIVES:
        for level in levels:
            prices = [each.collective(step, level, Place.DEVICE, SIZES) for each in (derived, right)]
            assert_same(*prices, (step, level))


def test_what_is_derived_is_estimated():
    base = measured(described())
    for other in (scaled(base, bandwidth_bit_per_s=1e9), scaled(base, machines=4), scaled(base, codec_speed=2)):
        assert other.estimated and other.margin == 0.25
        assert other.name.startswith("h100-400gbit, ")
        assert other.computes_on == base.computes_on and other.overheads == base.overheads


def test_the_rate_of_a_measured_link_is_what_it_sends():
    assert sending_bit_per_s(described("lab")) == pytest.approx(0.957e9)
    assert sending_bit_per_s(scaled(measured(described("lab")), bandwidth_bit_per_s=1e8)) == pytest.approx(1e8)
    with pytest.raises(MachineError, match="no bandwidth can be derived"):
        sending_bit_per_s(scaled(described("lab"), machines=1))


def test_cores_limit_a_faster_link():
    """A hundred times the bandwidth, but one core sends 1.1 GB/s."""
    fast = scaled(measured(described("lab")), bandwidth_bit_per_s=1e11)
    price = fast.collective("AllGather", Level.FLAT, Place.DEVICE, np.array([1.1e9]))
    assert price.alone_s[0] == pytest.approx(1.0, rel=0.05)
    assert price.work_s[Shared.INTER][0] == pytest.approx(1.1e9 * 8 / 1e11)


def test_links_that_were_never_measured_are_refused():
    base = measured(described("lab"))
    with pytest.raises(MachineError, match=r"machines: lab was measured on 2 machines.*on 1 cannot be derived"):
        scaled(base, machines=1)
    single = measured(cast(Description, scaled(described(), machines=1)))
    with pytest.raises(MachineError, match=r"measured on 1 machines.*on 4 cannot be derived.*describe the machine"):
        scaled(single, machines=4)
    assert scaled(single, bandwidth_bit_per_s=1e9).topology == Topology(1, 8)


@pytest.mark.parametrize("base", [described(), measured(described())], ids=["described", "measured"])
def test_codecs_are_faster(base):
    def encoding(machine: Machine) -> Price:
        units, elements = np.array([0.0, 1.0, 9.0]), np.array([0.0, 1e6, 1e8])
        return machine.codec(StageKind.ENCODE, gckernels.EFSignSGD(), Place.DEVICE, units, elements, 1)

    for speed in (0.5, 4.0, math.inf):
        fast = scaled(base, codec_speed=speed)
        assert_same(
            encoding(fast),
            Price(encoding(base).alone_s / speed, {Shared.DEVICE: encoding(base).work_s[Shared.DEVICE] / speed}),
        )
        wire = base.collective("AllReduce", Level.FLAT, Place.DEVICE, SIZES)
        assert_same(fast.collective("AllReduce", Level.FLAT, Place.DEVICE, SIZES), wire)
        assert_same(fast.copy(Shared.TO_HOST, SIZES), base.copy(Shared.TO_HOST, SIZES))


def test_changes_of_changed_machines():
    fast = scaled(scaled(described(), codec_speed=2), codec_speed=3)
    assert isinstance(fast, FasterCodecs) and fast.codec_speed == 6 and fast.base == described()
    both = scaled(fast, bandwidth_bit_per_s=1e9, machines=4)
    assert isinstance(both, FasterCodecs) and both.codec_speed == 6
    assert both.base == scaled(described(), bandwidth_bit_per_s=1e9, machines=4)
    assert both == scaled(described(), bandwidth_bit_per_s=1e9, machines=4, codec_speed=6)


@pytest.mark.parametrize(
    "arguments",
    [
        {name: value}
        for name, values in {
            "bandwidth_bit_per_s": [0, -1.0, math.nan, math.inf, "1gbit", True],
            "machines": [0, -1, 2.0, True],
            "codec_speed": [0, -1.0, math.nan, "2"],
        }.items()
        for value in values
    ],
    ids=str,
)
def test_numbers_that_are_not_valid_are_refused(arguments: dict[str, Any]):
    (name,) = arguments
    with pytest.raises(MachineError, match=f"{name}: must be "):
        scaled(described(), **arguments)


@pytest.mark.parametrize("name", machine_names())
def test_work_fits_into_the_time_of_derived_machines(name):
    base = measured(described(name))
    for other in (
        scaled(base, bandwidth_bit_per_s=1e7),
        scaled(base, bandwidth_bit_per_s=1e13),
        scaled(base, machines=5),
    ):
        for step in COLLECTIVES:
            for level in Level:
                for place in Place:
                    price = other.collective(step, level, place, SIZES)
                    assert (np.diff(price.alone_s) >= 0).all()
                    for shared, work_s in price.work_s.items():
                        assert (work_s <= price.alone_s * other.capacities[shared] * (1 + 1e-9)).all(), (step, level)


def test_a_pricer_rests_before_every_price():
    """Its prices are those of one that does not, and so do the pricers of machines like it."""
    units, rests = [Units.of(gckernels.EFSignSGD(), [[4096]])], []
    resting = Pricer(described(), rest=lambda: rests.append(1)).on(described())
    stages = [
        pricer.stages(MessageKind.ENCODED, ALLGATHER, units, torch.float32) for pricer in (resting, Pricer(described()))
    ]
    for one, other in zip(*stages, strict=True):
        assert_same(one.price, other.price)
    assert len(rests) == len(stages[0])
