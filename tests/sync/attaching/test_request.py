"""``sync.uniform_plan`` and the front ends take text, names and pairs as well as objects."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gckernels
from gckernels import BlockQuant, Cast16, PowerSGD, sync
from gckernels.compressor import Compressor
from gckernels.sync import Plan, PlanError, Topology, attach
from gckernels.sync.programs import ALLTOALL, HIERARCHICAL, PROGRAMS
from models import build
from ranks import run_ranks, values_of

PARAMETERS = [("weight", nn.Parameter(torch.zeros(3, 4))), ("bias", nn.Parameter(torch.zeros(4)))]


def planned(compressor: Any = "BlockQuant", model: Any = PARAMETERS, **more: Any) -> Plan:
    return sync.uniform_plan(model, compressor, **{"world_size": 4} | more)


@pytest.mark.parametrize("name", sorted(gckernels.COMPRESSORS))
def test_a_spec_is_its_compressor(name):
    assert planned(name) == planned(gckernels.COMPRESSORS[name]())


def test_a_spec_has_fields():
    assert planned("BlockQuant(bits=4, block=64)") == planned(BlockQuant(bits=4, block=64))


@pytest.mark.parametrize("name", list(PROGRAMS))
def test_a_program_goes_by_its_name(name):
    compressor = {"encoded_allreduce": Cast16(), "powersgd": PowerSGD()}.get(name, BlockQuant())
    want = planned(compressor, program=PROGRAMS[name], topology=(2, 2))
    assert {unit.program for unit in want.units} == {PROGRAMS[name]}
    for each in (name, name.upper()):
        assert planned(compressor, program=each, topology=(2, 2)) == want


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
        ({"program": "ring"}, ValueError, r"program must be a name \(allreduce, .*got 'ring': .*'ring' is no step"),
        ({"program": 7}, TypeError, "program must be None, a name .*, got 7"),
        ({"program": ("Encode",)}, TypeError, "program must be None, a name"),
        ({"exempt": "bias"}, TypeError, "exempt must be 'default', None, .*, got 'bias'"),
        ({"exempt": 3}, TypeError, "exempt must be 'default', None, .*, got 3"),
        ({"exempt": [PARAMETERS[0][1]]}, TypeError, "exempt must be 'default', None"),
        ({"exempt": ["bias", "wait"]}, ValueError, "exempt must list parameters that need a gradient, got 'wait'$"),
        ({"exempt": [str(i) for i in range(30)]}, ValueError, r"'9', \.\.\.$"),
        ({"topology": 4}, TypeError, r"topology must be None, a Topology or a pair \(machines, devices\), got 4"),
        ({"topology": (1, 2, 3)}, TypeError, "topology must be None"),
        ({"topology": (2, 0)}, ValueError, r"topology cannot be \(2, 0\): Topology: devices must be"),
        ({"topology": (2, 2.0)}, ValueError, r"devices must be an int"),
        ({"topology": "22"}, TypeError, "topology must be None"),
        ({"topology": (2, 4)}, PlanError, r"plan is for Topology\(machines=2, devices=4\), here are 4 ranks"),
        (
            {"program": "encoded_allreduce"},
            PlanError,
            "plan does not fit the model:\n  weight: program Encode AllReduce",
        ),
        ({"program": "hierarchical"}, PlanError, "the plan has no topology"),
        ({"world_size": None}, ValueError, "world_size must be given, because torch.distributed is not initialised"),
        ({"world_size": 0}, ValueError, "world_size must be None or an int from 1 up, got 0"),
        ({"world_size": 4.0}, ValueError, "world_size must be None or an int from 1 up, got 4.0"),
        (
            {"model": dict(PARAMETERS)},
            TypeError,
            "model must be a torch.nn.Module, or pairs .* dict; call its items",
        ),
        (
            {"model": [parameter for _, parameter in PARAMETERS]},
            TypeError,
            "model must be .*named_parameters.*, got list",
        ),
        ({"model": nn.LazyLinear(3)}, ValueError, "plan: parameter weight has no shape yet; run the model once before"),
        ({"model": 7}, TypeError, "model must be a torch.nn.Module, or pairs of name and parameter .*, got int"),
        ({"model": [*PARAMETERS, PARAMETERS[0]]}, ValueError, "two parameters are called weight"),
    ],
    ids=str,
)
def test_anything_else_is_refused_by_name(arguments, error, text):
    with pytest.raises(error, match=text):
        planned(**{"compressor": BlockQuant()} | arguments)


class WithAnExtra(nn.Module):
    """A layer, a frozen layer, and an integer parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.frozen = nn.Linear(3, 3, bias=False).requires_grad_(False)
        self.counts = nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False)


def test_a_module_is_planned_with_all_that_can_have_a_gradient():
    module = WithAnExtra()
    want = planned(model=[(name, each) for name, each in module.named_parameters() if name != "counts"])
    assert [unit.parameter for unit in want.units] == ["layer.weight", "layer.bias", "frozen.weight"]
    assert (
        planned(model=module)
        == planned(model=torch.compile(module))
        == planned(model=module.named_parameters())
        == want
    )


def test_a_topology_says_how_many_ranks_there_are():
    plan = sync.uniform_plan(PARAMETERS, "BlockQuant", program="parameter_server", topology=(2, 2))
    assert plan == planned(program="parameter_server", topology=(2, 2))


def of_ddp() -> tuple[list[Plan], Plan]:
    """The plans of a DDP model whose process group has one rank, and the plan of a plain module without a world
    size."""
    module = WithAnExtra()
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    model = DistributedDataParallel(module, process_group=groups[dist.get_rank()])
    plans = [sync.uniform_plan(each, "BlockQuant") for each in (model, torch.compile(model))]
    return plans, sync.uniform_plan(module, "BlockQuant")


def test_a_ddp_model_is_planned_with_what_it_averages_among_its_ranks():
    averaged = [(name, each) for name, each in WithAnExtra().named_parameters() if name.startswith("layer")]
    for plans, whole in values_of(run_ranks(3, of_ddp)):
        assert plans == [planned(model=averaged, world_size=1)] * 2
        assert whole == planned(model=WithAnExtra(), world_size=3)
        assert plans[0].units[0].program != whole.units[0].program


def both_ways(method: Compressor) -> list[Plan]:
    """The plans of attachments: from texts, from objects, and from the compressor alone."""
    plans = []
    text = str(method)
    rule = lambda name, parameter: name == "layers.0.bias"
    for wrapped in (True, False):
        module = build("Mlp")
        model = DistributedDataParallel(module) if wrapped else module
        requests = [
            sync.uniform_plan(model, text, program="AllToAll", exempt=["layers.0.bias"], topology=(2, 1)),
            sync.uniform_plan(model, method, program=ALLTOALL, exempt=rule, topology=Topology(2)),
        ]
        for request in (*requests, sync.uniform_plan(model, text), text, method):
            model = DistributedDataParallel(module) if wrapped else module
            taken = attach(model, request)
            plans.append(taken.plan)
            taken.close()
    return plans


@pytest.mark.parametrize("method", [BlockQuant(bits=4), pytest.param(Cast16(), marks=pytest.mark.slow)], ids=str)
def test_attach_takes_plans_compressors_and_specs(method):
    for plans in values_of(run_ranks(2, both_ways, method)):
        assert plans[:5] == plans[5:]
        assert plans[0] == plans[1] != plans[2] == plans[3] == plans[4]
        assert [unit.parameter for unit in plans[0].units if unit.compressor != method] == ["layers.0.bias"]


def nothing_compressed() -> list[list[str]]:
    """The warnings of compressors that take no parameter of a model."""
    found = []
    for module, method in (
        (nn.Linear(3, 3).double(), BlockQuant()),
        (nn.LayerNorm(3), BlockQuant()),
        (nn.Linear(3, 3).to(torch.complex128), BlockQuant()),
        (nn.Linear(3, 3).double(), gckernels.Identity()),
        (nn.Linear(3, 3), Cast16()),
    ):
        for wrapped in (True, False):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                attach(DistributedDataParallel(module) if wrapped else module, method).close()
            found.append([str(each.message) for each in caught if "compresses nothing" in str(each.message)])
    return found


def test_a_compressor_that_takes_no_parameter_is_warned_of():
    for found in values_of(run_ranks(2, nothing_compressed)):
        for lines, why in zip(
            found[:6],
            [text for text in ("have dtype float64", "takes none", "have dtype float64") for _ in range(2)],
            strict=True,
        ):
            ((line),) = lines
            assert "BlockQuant" in line and why in line and "averaged exactly" in line
        assert found[6:] == [[], [], [], []]
