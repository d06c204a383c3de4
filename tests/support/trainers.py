"""Trainers in the ranks of tests: the environment that they look for, their data, and digests of what they have
trained."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

STEPS, SAVED = 8, 4
"""Steps of a training, and the step at which it saves a checkpoint."""


class Rows(torch.utils.data.Dataset):
    """Rows of numbers, each drawn from its index."""

    def __len__(self) -> int:
        return 128

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(64, generator=torch.Generator().manual_seed(index))


def network() -> torch.nn.Module:
    """A small network, the same in every call."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.GELU(), torch.nn.Linear(96, 64))


def loss_of(model: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """A loss of rows."""
    return (model(rows) - rows.flip(1)).square().mean()


def as_launched() -> None:
    """Set the variables by which a launcher says to a trainer which rank this is, and let tqdm start no thread."""
    import tqdm  # an import of trainers, which need not be there

    tqdm.tqdm.monitor_interval = 0
    rank, ranks = dist.get_rank(), dist.get_world_size()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29500", TOKENIZERS_PARALLELISM="false")


def digest(parameters: Iterator[torch.nn.Parameter]) -> float:
    """The sum of all squares of parameters; of those of all ranks if they are sharded."""
    total = torch.zeros((), dtype=torch.float64)
    is_sharded = False
    for each in parameters:
        local, is_sharded = (each.to_local(), True) if hasattr(each, "to_local") else (each, is_sharded)
        total += local.detach().double().square().sum()
    if is_sharded:
        dist.all_reduce(total)
    return total.item()


def shard_on_cpu(plugin: Any) -> None:
    """Let Accelerate shard models as its FSDP plugin says, which it leaves out on a CPU.

    Args:
        plugin: the ``FullyShardedDataParallelPlugin``.
    """
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    AcceleratorState._shared_state.update(fsdp_plugin=plugin)
    for state in (PartialState, AcceleratorState):
        state._shared_state.update(distributed_type=DistributedType.FSDP)
