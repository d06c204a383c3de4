"""Parameters keep the names that the model gave them; parameters that cannot be synchronised are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from gckernels import BlockQuant, Identity, sync
from gckernels.sync import Attachment, Plan, UnitPlan, attach, record_timeline
from gckernels.sync.plans.arguments import differentiable, plain_name
from gckernels.sync.programs import ALLREDUCE
from models import build
from ranks import run_ranks, values_of
from workloads import digest_of

# -------------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("given", "plain"),
    [
        ("layers.0.weight", "layers.0.weight"),
        ("_orig_mod.layers.0.weight", "layers.0.weight"),
        ("layers.0._orig_mod.weight", "layers.0.weight"),
        ("_orig_mod.layers._checkpoint_wrapped_module.0._orig_mod.weight", "layers.0.weight"),
        ("my_orig_mod.weight", "my_orig_mod.weight"),
    ],
)
def test_plain_names(given, plain):
    assert plain_name(given) == plain
    unit = UnitPlan(given, 5, Identity(), ALLREDUCE, False, also=(given + "2",))
    assert unit.parameters == (plain, plain + "2") and unit.key == f"{plain}+{plain}2"


def test_two_parameters_of_one_plain_name():
    module = nn.Linear(2, 2)
    module._orig_mod = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="two parameters are called weight"):
        differentiable(module.named_parameters())


def test_a_plan_of_a_compiled_model_is_one_of_the_model():
    module = build("Mlp")
    compiled = torch.compile(module, backend="eager")
    assert next(iter(dict(compiled.named_parameters()))).startswith("_orig_mod.")
    how: dict[str, Any] = {"exempt": ["_orig_mod.layers.2.weight", "layers.0.bias"]}
    plan = sync.uniform_plan(compiled.named_parameters(), BlockQuant(), **how, world_size=2)
    assert plan == sync.uniform_plan(module.named_parameters(), BlockQuant(), **how, world_size=2)
    assert {unit.parameter for unit in plan.units if unit.compressor == Identity()} == {
        "layers.0.bias",
        "layers.2.weight",
    }
    for parameters in (module.named_parameters(), compiled.named_parameters()):
        plan.check(parameters, 2)
    assert plan.fitted(compiled.named_parameters()) == (plan, [])
    record = json.loads(json.dumps(plan.to_json()).replace('"layers.', '"_orig_mod.layers.'))
    assert Plan.from_json(record) == plan


def changed(module: nn.Module, how: str) -> nn.Module:
    """The model, wrapped by PyTorch as a whole or in part."""
    match how:
        case "compiled":
            return torch.compile(module, backend="eager")
        case "a part compiled":
            module.layers[2] = torch.compile(module.layers[2], backend="eager")
        case "a part checkpointed":
            module.layers[2] = checkpoint_wrapper(module.layers[2])
    return module


FRONTS = [
    (True, "as written"),
    (True, "as written"),
    (True, "compiled"),
    (True, "a part compiled"),
    (False, "compiled"),
    (False, "a part checkpointed"),
]
"""Whether the DDP hook is used, and the wrapper around the model."""


def named(folder: Path) -> list[tuple[str, ...]]:
    """For every front end and wrapper: digests of the gradients, and the names of the units in states, plans and
    traces."""
    rank, found = dist.get_rank(), []
    state: dict[str, Any] | None = None
    for by_hook, how in FRONTS:
        module = build("Mlp")
        model = changed(module, how)
        model = DistributedDataParallel(model) if by_hook else model
        front = attach(model, BlockQuant())
        if state is not None:  # continue after the first step of the first front end
            front.load_state_dict(state)
        digests = []
        with record_timeline(folder / "trace.json"):
            for step in range(2):
                model.zero_grad()
                model(module.batch(step, rank)).backward()
                digests.append(digest_of(parameter.grad for parameter in module.parameters()))
        traced = json.loads((folder / "trace.json").read_text())["traceEvents"] if rank == 0 else []
        units = {unit for event in traced for unit in event["args"].get("units", ())}
        kept = front.state_dict()
        keys = sorted(kept["feedback"]["worker"]), [unit["parameter"] for unit in kept["plan"]["units"]]
        found.append((*digests, str(sorted(units)), *map(str, keys)))
        state = state or kept
        front.close()
    return found


@pytest.mark.slow
def test_wrappers_do_not_show(tmp_path):
    for found in values_of(run_ranks(2, named, tmp_path)):
        assert len(set(found[1:])) == 1  # the first front end starts from scratch, the others from its state
        assert "layers.0.weight" in found[0][-1] and "_" not in found[0][-1]


# -------------------------------------------------------------------- parameters without a gradient


class Counting(nn.Module):
    """A layer, and parameters that are integers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)
        self.number = nn.Parameter(torch.arange(3, dtype=torch.int8), requires_grad=False)
        self.mask = nn.Parameter(torch.ones(3, dtype=torch.bool), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layer(x) * self.number * self.mask).square().sum()


def with_integers() -> list[str]:
    """Digests of the gradients under both front ends, for a compressor and for a plan."""
    rank, found = dist.get_rank(), []
    torch.manual_seed(0)
    module = Counting()
    if rank == 1:
        module.number.data.add_(1)  # rank 0's values replace these
    plan = sync.uniform_plan(module.named_parameters(), BlockQuant(), world_size=2)
    assert [unit.parameter for unit in plan.units] == ["layer.weight", "layer.bias"]
    for what in (BlockQuant(), plan):
        for by_hook in (True, False):
            model = DistributedDataParallel(module) if by_hook else module
            front = attach(model, what)
            assert module.number.tolist() == [0, 1, 2]
            for step in range(2):
                module.zero_grad()
                x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))
                model(x).backward()
            found.append(digest_of(parameter.grad for parameter in module.layer.parameters()))
            front.close()
    return found


def test_integers_that_are_parameters():
    found = values_of(run_ranks(2, with_integers))
    assert {digest for digests in found for digest in digests} == {found[0][0]}


# -------------------------------------------------------------------- refused parameters


def linear(**how: Any) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)).to(**how)


class Lookup(nn.Module):
    """A table whose gradient is sparse, although no module announces it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.table = nn.Linear(4, 2), nn.Parameter(torch.randn(9, 4))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.layer(nn.functional.embedding(tokens, self.table, sparse=True)).sum()


def _fsdp(mesh: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    return fully_shard(linear(), mesh=mesh)


def _first_layer() -> nn.Module:
    from torch.distributed.tensor import distribute_module

    module = linear()
    distribute_module(module[0], init_device_mesh(torch.get_default_device().type, (dist.get_world_size(),)))
    return module


def _hybrid() -> Attachment:
    mesh = init_device_mesh(torch.get_default_device().type, (2, 1), mesh_dim_names=("replicate", "shard"))
    return attach(_fsdp(mesh), BlockQuant(), process_group=mesh.get_group("replicate"))


def _in_backward(front: Callable[[nn.Module], Any]) -> None:
    model = front(Lookup())
    model(torch.tensor([1, 2])).backward()


def _under_ddp(model: nn.Module) -> nn.Module:
    model = DistributedDataParallel(model)
    _KEPT.append(attach(model, BlockQuant()))
    return model


def _under_an_attachment(model: nn.Module) -> nn.Module:
    _KEPT.append(attach(model, BlockQuant()))
    return model


_KEPT: list[Any] = []

REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "FSDP2 with a group": (_hybrid, "ValueError: attach: process_group is only for bare modules"),
    "a DTensor": (
        lambda: attach(_first_layer(), BlockQuant()),
        "TypeError: attach: parameter 0.weight is a DTensor",
    ),
    "no values": (
        lambda: attach(linear(device="meta"), BlockQuant()),
        "ValueError: attach: parameter 0.weight is on the device meta and has no values",
    ),
    "no values to attach": (
        lambda: attach(DistributedDataParallel(linear(device="meta"), init_sync=False), BlockQuant()),
        "ValueError: attach: parameter 0.weight is on the device meta and has no values",
    ),
    "no shape": (
        lambda: attach(nn.LazyLinear(3), BlockQuant()),
        "ValueError: attach: parameter weight has no shape yet",
    ),
    "only integers": (
        lambda: attach(nn.ParameterList([nn.Parameter(torch.ones(3, dtype=torch.int8), False)]), BlockQuant()),
        "ValueError: attach: model has no parameters that can have a gradient",
    ),
    "a sparse embedding": (
        lambda: attach(nn.Sequential(nn.EmbeddingBag(5, 3, sparse=True)), BlockQuant()),
        "ValueError: attach: parameter 0.weight has a sparse gradient",
    ),
    "a sparse gradient": (
        lambda: _in_backward(_under_an_attachment),
        "RuntimeError: gckernels: parameter table has a sparse gradient",
    ),
    "a sparse gradient under DDP": (
        lambda: _in_backward(_under_ddp),
        "RuntimeError: gckernels: parameter table has a sparse gradient",
    ),
}


def refused() -> dict[str, str]:
    found = {}
    for name, (attempt, _) in REFUSED.items():
        try:
            attempt()
            found[name] = "nothing was raised"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
        ranks = torch.tensor([dist.get_rank()])
        dist.all_reduce(ranks)  # the group still works
        assert ranks.item() == 1, name
    while _KEPT:
        _KEPT.pop().close()
    frozen = nn.Sequential(nn.Embedding(5, 3, sparse=True).requires_grad_(False), nn.Linear(3, 2))
    attachment = attach(frozen, BlockQuant())
    frozen(torch.tensor([1, 2])).sum().backward()  # a frozen table has no gradient, so it has no sparse one
    attachment.close()
    return found


@pytest.mark.host_only("the simulated device has no sparse tensors")
def test_what_is_refused():
    for found in values_of(run_ranks(2, refused, group_timeout_s=20)):
        for name, (_, expected) in REFUSED.items():
            assert found[name].startswith(expected), name
