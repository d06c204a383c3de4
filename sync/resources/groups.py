"""Process groups with names that no other group of the job has, before or after.

A group finds its ranks under its name in the store of the job. ``torch.distributed.new_group`` names the groups that
some of the ranks make after these ranks and the number of groups that there are, so one that is made after another was
destroyed gets the name, and reads the addresses, of that one. Here a counter in the store gives every set of groups a
number of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d


def draw_number(group: dist.ProcessGroup, device: torch.device) -> int:
    """A number that no other call of the job returns; the same on all ranks of ``group``, all of which call this.

    Args:
        group: all ranks that will use the number.
        device: on which the group can talk.
    """
    first = dist.get_rank(group) == 0
    drawn = distributed_c10d._get_default_store().add("gckernels/groups", 1) if first else 0
    number = torch.tensor([drawn], dtype=torch.int64, device=device)
    dist.broadcast(number, group_src=0, group=group)
    return int(number.item())


def make_group(
    members: Sequence[int], name: str, backend: str, timeout: timedelta, description: str
) -> dist.ProcessGroup:
    """A new process group, known to ``torch.distributed`` like any other. Its members call this, and no other rank.

    Args:
        members: ranks of the default group, in the order of their ranks in the new one.
        name: that no group of the job has had.
        backend: ``"gloo"``, ``"nccl"`` or another that torch knows.
        timeout: of its collectives.
        description: appears in torch's errors.
    """
    # of new_group, what can be given a name; its parameters have been the same since torch 2.4
    construct: Any = distributed_c10d._new_process_group_helper
    with _unbound(distributed_c10d._get_default_group()):
        group, _ = construct(
            len(members),
            list(members).index(dist.get_rank()),
            list(members),
            backend,
            distributed_c10d._get_default_store(),
            name,
            timeout=timeout,
            group_desc=description,
        )
    distributed_c10d._world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(members)}
    assert isinstance(group, dist.ProcessGroup)
    return group


@contextmanager
def _unbound(default: dist.ProcessGroup) -> Iterator[None]:
    """Let no group be split from the default one, as NCCL's are where that has a device: all ranks would have to take
    part, and those that are not members do not."""
    device = default.bound_device_id
    if device is not None:
        default.bound_device_id = None
    try:
        yield
    finally:
        if device is not None:
            default.bound_device_id = device
