"""Text, names and pairs in the place of a compressor, a program, a topology or a rule of exemption."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gckernels
from gckernels import BlockQuant
from gckernels.sync import ALLTOALL, HIERARCHICAL, PROGRAMS, Plan, Synchronizer, Topology, attach, uniform_plan
from models import build
from ranks import run_ranks, values_of

PARAMETERS = [("weight", nn.Parameter(torch.zeros(3, 4))), ("bias", nn.Parameter(torch.zeros(4)))]


def planned(compressor: object = "BlockQuant", **more: object) -> Plan:
    return uniform_plan(PARAMETERS, compressor, 4, **more)


@pytest.mark.parametrize("name", sorted(gckernels.METHODS))
def test_a_spec_is_its_compressor(name):
    assert planned(name) == planned(gckernels.METHODS[name]())


def test_a_spec_has_fields():
    assert planned("BlockQuant(bits=4, block=64)") == planned(BlockQuant(bits=4, block=64))


@pytest.mark.parametrize("name", list(PROGRAMS))
def test_a_program_goes_by_its_name(name):
    want = planned(BlockQuant(), program=PROGRAMS[name])
    assert planned(BlockQuant(), program=name) == planned(BlockQuant(), program=name.upper()) == want


def test_a_topology_is_machines_and_devices():
    plan = planned(program="hierarchical", topology=(1, 4))
    assert plan == planned(program=HIERARCHICAL, topology=Topology(machines=1, devices=4))


def test_exemptions_are_a_rule_a_list_or_nothing():
    everything = {"weight": BlockQuant(), "bias": BlockQuant()}
    exact = gckernels.Identity()
    for exempt, changed in (
        (None, {}),
        ([], {}),
        (["weight"], {"weight": exact}),
        ({"bias", "weight"}, {"weight": exact, "bias": exact}),
        ((name for name in ["bias"]), {"bias": exact}),
        (lambda name, parameter: name == "weight", {"weight": exact}),
    ):
        plan = planned(exempt=exempt)
        assert {unit.parameter: unit.compressor for unit in plan.units} == everything | changed


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"compressor": BlockQuant}, TypeError, r"uniform_plan: compressor must be .*the class BlockQuant; write"),
        ({"compressor": Plan}, TypeError, "got the class Plan$"),
        ({"compressor": None}, TypeError, "got NoneType"),
        ({"compressor": "BlokQuant"}, ValueError, "compressor cannot be 'BlokQuant': .*unknown name.*BlockQuant"),
        ({"compressor": "BlockQuant(bits=5)"}, ValueError, "bits must be one of"),
        ({"program": "ring"}, ValueError, r"program must be a name \(allreduce, .*got 'ring'"),
        ({"program": 7}, TypeError, "program must be None, a name .*, got 7"),
        ({"program": ("Encode",)}, TypeError, "program must be None, a name"),
        ({"exempt": "bias"}, TypeError, "exempt must be None, .*, got 'bias'"),
        ({"exempt": 3}, TypeError, "exempt must be None, .*, got 3"),
        ({"exempt": [PARAMETERS[0][1]]}, TypeError, "exempt must be None"),
        ({"exempt": ["bias", "wait"]}, ValueError, "exempt names what is not a parameter.*: 'wait'$"),
        ({"exempt": [str(i) for i in range(30)]}, ValueError, r"'9', \.\.\.$"),
        ({"topology": 4}, TypeError, r"topology must be None, a Topology or a pair \(machines, devices\), got 4"),
        ({"topology": (1, 2, 3)}, TypeError, "topology must be None"),
        ({"topology": (2, 0)}, ValueError, r"topology cannot be \(2, 0\): Topology: devices must be"),
        ({"topology": (2, 2.0)}, ValueError, r"devices must be an int"),
        ({"topology": "22"}, TypeError, "topology must be None"),
    ],
    ids=str,
)
def test_anything_else_is_refused_by_name(arguments, error, text):
    with pytest.raises(error, match=text):
        planned(**{"compressor": BlockQuant()} | arguments)


def both_ways() -> list[Plan]:
    """The plans that attach and Synchronizer make of texts, and of the objects that they name."""
    plans = []
    texts = ("BlockQuant(bits=4)", {"program": "AllToAll", "exempt": ["layers.0.bias"], "topology": (2, 1)})
    rule = lambda name, parameter: name == "layers.0.bias"
    objects = (BlockQuant(bits=4), {"program": ALLTOALL, "exempt": rule, "topology": Topology(2)})
    for compressor, settings in (texts, objects):
        for way in (attach, Synchronizer):
            module = build("Mlp")
            model = DistributedDataParallel(module) if way is attach else module
            taken = way(model, compressor, **settings)
            plans.append(taken.plan)
            taken.close()
    return plans


def test_attach_and_synchronizer_take_texts():
    for plans in values_of(run_ranks(2, both_ways)):
        assert len(plans) == 4
        assert all(plan == plans[0] for plan in plans)
        assert [unit.parameter for unit in plans[0].units if unit.compressor != BlockQuant(bits=4)] == ["layers.0.bias"]
