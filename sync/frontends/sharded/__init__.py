"""The front ends of models of FSDP2: shards over all ranks, and replicas with shards or without."""

from __future__ import annotations

import torch

from ..frontend import ModelFrontend
from .fully_sharded_frontend import FullyShardedFrontend
from .replicated_frontend import ReplicatedFrontend
from .shard_groups import shard_groups


def sharded_frontend(model: torch.nn.Module) -> type[ModelFrontend]:
    """The front end of a model of FSDP2."""
    groups = shard_groups(model)
    return ReplicatedFrontend if groups and groups[0].is_replicated else FullyShardedFrontend
