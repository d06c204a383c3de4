"""The kinds of models, and their front ends, each of which is imported when there is a model of its kind."""

from __future__ import annotations

import importlib
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from ..plans.plan import Frontend
from .checks.models import is_sharded

_CLASSES = {
    Frontend.DDP: (".ddp.ddp_frontend", "DdpFrontend"),
    Frontend.MODULE: (".module.module_frontend", "ModuleFrontend"),
    Frontend.HSDP: (".sharded.replicated_frontend", "ReplicatedFrontend"),
    Frontend.FSDP: (".sharded.fully_sharded_frontend", "FullyShardedFrontend"),
}


def kind_of(model: object) -> Frontend:
    """The kind of a model; ``MODULE`` if it is none at all, which is refused elsewhere."""
    if isinstance(model, DistributedDataParallel):
        return Frontend.DDP
    if not is_sharded(model):
        return Frontend.MODULE
    groups = importlib.import_module(".sharded.shard_groups", __package__).shard_groups(model)
    return Frontend.HSDP if groups and groups[0].is_replicated else Frontend.FSDP


def frontend_of(kind: Frontend) -> Any:
    """The front end of models of a kind, a subclass of :class:`~.frontend.ModelFrontend`."""
    module, name = _CLASSES[kind]
    return getattr(importlib.import_module(module, __package__), name)
