"""Updates are averaged between sites, inside of which DDP averages gradients or FSDP2 shards the model."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from gckernels import EFSignSGD, sync
from ranks import run_ranks, values_of
from workloads import digest_of, topology

NESTEROV = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)


def net() -> nn.Sequential:
    """A network whose last bias has fewer elements than some numbers of ranks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 37), nn.Tanh(), nn.Linear(37, 1))


def meshes() -> tuple[DeviceMesh, Any, Any]:
    """Two sites of two ranks; the mesh inside and the group between sites."""
    mesh = init_device_mesh(torch.get_default_device().type, (2, 2), mesh_dim_names=("between", "inside"))
    return mesh, mesh["inside"], mesh["between"].get_group()


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, rank: int) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + rank)
        optimizer.zero_grad()
        model(torch.randn(8, 6, generator=generator)).square().mean().backward()
        optimizer.step()


def whole(model: nn.Module) -> list[torch.Tensor]:
    each = (one.full_tensor() if isinstance(one, DTensor) else one for one in model.parameters())
    return [parameter.detach() for parameter in each]


def everyone(thing: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, thing)
    return found


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def like_ddp(spec: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Models of FSDP2 and of DDP inside a site, each averaged with the other site, and their parameters."""
    _, inside, between = meshes()
    sharded = net()
    fully_shard(sharded[0], mesh=inside)
    fully_shard(sharded, mesh=inside)
    optimizer = adamw(sharded)
    settings: dict[str, Any] = {"every": 2, "outer": NESTEROV}
    attachment = sync.attach(sharded, sync.Updates(optimizer, spec, **settings), process_group=between)
    trained(sharded, optimizer, range(9), dist.get_rank())
    assert attachment.steps == 4 and attachment.stats()["world_size"] == 2
    found = whole(sharded)
    assert len(set(everyone(digest_of(found)))) == 2  # inside a round sites differ
    trained(sharded, optimizer, range(9, 10), dist.get_rank())
    found = whole(sharded)
    assert len(set(everyone(digest_of(found)))) == 1
    attachment.close()
    wrapped = DistributedDataParallel(net(), process_group=inside.get_group())
    optimizer = adamw(wrapped)
    attachment = sync.attach(wrapped, sync.Updates(optimizer, spec, **settings), process_group=between)
    assert "0.weight" in attachment.parameters()
    trained(wrapped, optimizer, range(9), dist.get_rank())
    digests = everyone(digest_of(wrapped.parameters()))
    assert digests[0] == digests[1] != digests[2] == digests[3]
    trained(wrapped, optimizer, range(9, 10), dist.get_rank())
    attachment.close()
    return found, whole(wrapped)


@pytest.fixture(scope="module")
def exact() -> Any:
    """The parameters of :func:`like_ddp` with exact averages, by rank."""
    return values_of(run_ranks(4, like_ddp, "Identity", fresh=True, exits=False))


def test_shards_as_whole_parameters(exact: Any):
    """With exact averages FSDP2 inside a site gives the parameters of DDP there; signs differ, as blocks are others."""
    for found, expected in exact:
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    values_of(run_ranks(4, like_ddp, "EFSignSGD", fresh=True, exits=False))


def over_all_ranks() -> list[torch.Tensor]:
    """DDP inside a site, and updates over all ranks through a program with levels."""
    _, inside, _ = meshes()
    wrapped = DistributedDataParallel(net(), process_group=inside.get_group())
    optimizer = adamw(wrapped)
    plan = sync.uniform_plan(wrapped.module, "Identity", program="hierarchical", topology=topology(4))
    attachment = sync.attach(wrapped, sync.Updates(optimizer, plan, every=2, outer=NESTEROV))
    trained(wrapped, optimizer, range(10), dist.get_rank())
    attachment.close()
    return whole(wrapped)


def test_ddp_inside_a_program_with_levels(exact: Any):
    expected = exact[0][1]
    for found in values_of(run_ranks(4, over_all_ranks)):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def sharded(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer, sync.Attachment]:
    _, inside, between = meshes()
    model = net()
    for module in (model[0], model):
        fully_shard(module, mesh=inside)
    optimizer = adamw(model)
    return (
        model,
        optimizer,
        sync.attach(model, sync.Updates(optimizer, EFSignSGD(), every=4, delay=2), process_group=between),
    )


def resumed(folder: str) -> None:
    model, optimizer, attachment = sharded()
    trained(model, optimizer, range(5), dist.get_rank())
    state = attachment.state_dict()
    dcp.save({"gckernels": attachment.checkpoint()}, checkpoint_id=folder)
    trained(model, optimizer, range(5, 12), dist.get_rank())
    expected = digest_of(whole(model))
    attachment.close()
    for form in ("list", "dcp"):
        model, optimizer, attachment = sharded()
        if form == "list":
            attachment.load_state_dict(copy.deepcopy(state))
        else:
            dcp.load({"gckernels": attachment.checkpoint(reads=folder)}, checkpoint_id=folder)
        trained(model, optimizer, range(5, 12), dist.get_rank())
        assert digest_of(whole(model)) == expected, form
        attachment.close()


def test_resumed(tmp_path: Any):
    values_of(run_ranks(4, resumed, str(tmp_path), fresh=True, exits=False))


def refusals() -> None:
    _, inside, _ = meshes()
    model = net()
    fully_shard(model, mesh=inside)
    optimizer = adamw(model)
    crossed = dist.new_subgroups_by_enumeration([[0, 3], [1, 2]])[0]
    for group, text in ((None, "is sharded over rank"), (crossed, "the ranks do not have the same settings")):
        try:
            sync.attach(model, sync.Updates(optimizer, EFSignSGD()), process_group=group)
        except (ValueError, RuntimeError) as error:
            assert text in str(error), error
        else:
            raise AssertionError("no error")


def test_ranks_with_other_shards():
    values_of(run_ranks(4, refusals, fresh=True, exits=False))
