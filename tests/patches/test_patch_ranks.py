"""Several ranks publish one model: each its shards, what all have once, and a version on all ranks or on none.

Ranks are new in each call: torch keeps meshes by the numbers of their ranks, and ranks of the pool have changing ones.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from gckernels import patches
from patch_stores import Cut, Unreliable
from ranks import run_ranks, values_of


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(13, 7), nn.Linear(7, 5, bias=False), nn.Linear(5, 1))


def sharded(replicas: int) -> nn.Sequential:
    """The network over all ranks, with shards that some ranks have no row of."""
    ranks = dist.get_world_size()
    shape = (ranks,) if replicas == 1 else (replicas, ranks // replicas)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    model = network()
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def train(model: nn.Module, seed: int) -> None:
    """A step in which shards change as those of a whole model would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1e-3 * float(torch.randn((), generator=generator)))


def expected(steps: int) -> dict[str, torch.Tensor]:
    model = network()
    for seed in range(steps):
        train(model, seed)
    return {name: tensor.bfloat16() for name, tensor in model.state_dict().items()}


def published(path: str, kind: str, first: int, until: int) -> list[object]:
    """Publish on all ranks; a store that fails on one rank is an error on all. Returns what this rank has seen."""
    model = network() if kind == "ddp" else sharded(2 if kind == "hsdp" else 1)
    for seed in range(first):
        train(model, seed)
    store = patches.Folder(path)
    module = DistributedDataParallel(model) if kind == "ddp" else model
    publisher = patches.publish(module, store, anchor_every=3)
    seen: list[object] = [publisher.version]
    for seed in range(first, until):
        train(model, seed)
        if seed == first + 1 and dist.get_rank() == 1:
            publisher._store = Unreliable(store, 0, False)
        try:
            publisher.publish()
            assert seed != first + 1
        except (RuntimeError, Cut) as error:
            seen.append(str(error))
            publisher._store = store
            publisher.publish()
    return [*seen, publisher.version, publisher.digest, publisher.nbytes]


@pytest.mark.parametrize("kind", ["fsdp", "hsdp", "ddp"])
def test_ranks_publish_a_model_together(tmp_path, kind):
    ranks = 4 if kind == "hsdp" else 2
    replica = {name: torch.zeros_like(tensor) for name, tensor in expected(0).items()}
    follower, digests = patches.follow(replica, patches.Folder(tmp_path)), []
    for first, until in ((0, 4), (4, 7)):  # the second call is a restart
        found = values_of(run_ranks(ranks, published, str(tmp_path), kind, first, until, fresh=True, exits=False))
        follower.apply(follower.fetch())
        wanted = expected(until)
        assert all(torch.equal(replica[name], wanted[name]) for name in wanted)
        assert all(each[:-2] == [first, each[1], until] and "cut (rank 1)" in each[1] for each in found)
        digests.append(sum(each[-2] for each in found) % 2**64)
        assert digests[-1] == follower.digest == patches.digest(replica)
        writers = [rank for rank, each in enumerate(found) if each[-1] > 200]
        assert writers == {"fsdp": [0, 1], "hsdp": [0, 1], "ddp": [0]}[kind]
    assert follower.version == 7


def test_another_number_of_ranks_goes_on_with_all_weights(tmp_path):
    values_of(run_ranks(2, published, str(tmp_path), "fsdp", 0, 4, fresh=True, exits=False))
    replica = {name: torch.zeros_like(tensor) for name, tensor in expected(0).items()}
    follower = patches.follow(replica, patches.Folder(tmp_path))
    follower.apply(follower.fetch())
    found = values_of(run_ranks(3, published, str(tmp_path), "fsdp", 4, 7, fresh=True, exits=False))
    assert [each[0] for each in found] == [5, 5, 5], "a version with all weights"
    staged = follower.fetch()
    assert staged.base is None and staged.version == 8
    follower.apply(staged)
    assert all(torch.equal(replica[name], tensor) for name, tensor in expected(7).items())


def _by_columns(path: str) -> str:
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    try:
        patches.publish({"w": distribute_tensor(torch.zeros(4, 4), mesh, [Shard(1)])}, patches.Folder(path))
    except RuntimeError as error:
        return str(error)
    return ""


def test_other_cuts_than_rows_are_refused(tmp_path):
    for text in values_of(run_ranks(2, _by_columns, str(tmp_path))):
        assert "w is placed as" in text and "only rows may be cut, once" in text
