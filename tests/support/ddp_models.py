"""Small models with either front end, and digests of trainings under DDP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gckernels.sync import attach
from models import SMALL_BUCKETS, build
from workloads import digest_of


def wrapped(seed: int = 0, group: dist.ProcessGroup | None = None, **settings: bool) -> DistributedDataParallel:
    module = build("Mlp", seed=seed)
    return DistributedDataParallel(module, bucket_cap_mb=SMALL_BUCKETS, process_group=group, **settings)


def attached(
    front: str, module: torch.nn.Module, what: Any, ddp: Mapping[str, Any] | None = None, **settings: Any
) -> tuple[Any, Any]:
    """The model to train, which is the module itself or a DDP model of it, and its attachment.

    Args:
        front: ``"module"`` for the module itself.
        module: the module.
        what: a plan or a compressor.
        ddp: settings of the DDP model.
        settings: settings of the attachment.
    """
    if front == "module":
        return module, attach(module, what, **{"bucket_cap_mb": SMALL_BUCKETS} | settings)
    model = DistributedDataParallel(module, bucket_cap_mb=SMALL_BUCKETS, **ddp or {})
    return model, attach(model, what, **settings)


def trained(model: DistributedDataParallel, steps: range) -> str:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    digests = []
    for step in steps:
        optimizer.zero_grad()
        model(model.module.batch(step, dist.get_rank())).backward()
        digests.append(digest_of(parameter.grad for parameter in model.parameters()))
        optimizer.step()
    return digest_of(model.parameters()) + "".join(digests)
