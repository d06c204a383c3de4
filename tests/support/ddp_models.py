"""Small models under DDP, and digests of their trainings."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from models import SMALL_BUCKETS, build
from workloads import digest_of


def wrapped(seed: int = 0, group: dist.ProcessGroup | None = None, **settings: bool) -> DistributedDataParallel:
    module = build("Mlp", seed=seed)
    return DistributedDataParallel(module, bucket_cap_mb=SMALL_BUCKETS, process_group=group, **settings)


def trained(model: DistributedDataParallel, steps: range) -> str:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    digests = []
    for step in steps:
        optimizer.zero_grad()
        model(model.module.batch(step, dist.get_rank())).backward()
        digests.append(digest_of(parameter.grad for parameter in model.parameters()))
        optimizer.step()
    return digest_of(model.parameters()) + "".join(digests)
