"""The front ends of models and the silences of their wrappers, each of which is imported when a model needs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ..plans.plan import Frontend
from .checks.models import is_sharded

if TYPE_CHECKING:
    from .frontend import ModelFrontend
    from .silence import Silence


@dataclass(frozen=True)
class Served:
    """The models that a front end serves."""

    kind: Frontend  # their kind
    serves: Callable[[object], bool]  # whether an object is one of them
    frontend: Callable[[], type[ModelFrontend]]  # returns the front end, a class
    silence: Callable[[], Callable[[Any], Silence]] | None = None
    """Returns the class that silences what averages the gradients of such a model; ``None`` if nothing does that could
    be silent."""


def served_by(model: object) -> Served:
    """The first of :data:`SERVED` that serves a model."""
    return next(each for each in SERVED if each.serves(model))


def kind_of(model: object) -> Frontend:
    """The kind of a model; ``MODULE`` if it is none at all, which is refused elsewhere."""
    return served_by(model).kind


def frontend_of(model: object) -> type[ModelFrontend]:
    """The front end of a model."""
    return served_by(model).frontend()


def _has_replicas(model: object) -> bool:
    if not isinstance(model, torch.nn.Module) or not is_sharded(model):
        return False
    from .sharded.shard_groups import shard_groups

    groups = shard_groups(model)
    return bool(groups) and groups[0].is_replicated


def _ddp() -> type[ModelFrontend]:
    from .ddp.ddp_frontend import DdpFrontend

    return DdpFrontend


def _silent_ddp() -> type[Silence]:
    from .ddp.silent_ddp import SilentDdp

    return SilentDdp


def _replicated() -> type[ModelFrontend]:
    from .sharded.replicated_frontend import ReplicatedFrontend

    return ReplicatedFrontend


def _silent_replicas() -> type[Silence]:
    from .sharded.silent_replicas import SilentReplicas

    return SilentReplicas


def _fully_sharded() -> type[ModelFrontend]:
    from .sharded.fully_sharded_frontend import FullyShardedFrontend

    return FullyShardedFrontend


def _module() -> type[ModelFrontend]:
    from .module.module_frontend import ModuleFrontend

    return ModuleFrontend


SERVED = [
    Served(Frontend.DDP, lambda model: isinstance(model, DistributedDataParallel), _ddp, _silent_ddp),
    Served(Frontend.HSDP, _has_replicas, _replicated, _silent_replicas),
    Served(Frontend.FSDP, is_sharded, _fully_sharded),
    Served(Frontend.MODULE, lambda model: True, _module),
]
"""All front ends of gradients, in the order in which they are asked. The last one serves what no other does."""
