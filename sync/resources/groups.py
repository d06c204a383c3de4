"""Process groups whose names are unique in the job, over its whole lifetime.

The ranks of a group find each other under the group's name in the store of the job. ``torch.distributed.new_group``
derives that name from the ranks and the number of groups that exist. After a group has been destroyed, a new one can
get its name, and then reads the addresses of the old one. Here a counter in the store numbers every set of groups.
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
    """A number that no other call in the job returns, the same on all ranks of ``group``. Collective.

    Args:
        group: all ranks that will use the number.
        device: a device whose tensors the group can send.
    """
    first = dist.get_rank(group) == 0
    drawn = distributed_c10d._get_default_store().add("gckernels/groups", 1) if first else 0
    number = torch.tensor([drawn], dtype=torch.int64, device=device)
    dist.broadcast(number, group_src=0, group=group)
    return int(number.item())


def make_group(
    members: Sequence[int], name: str, backend: str, timeout: timedelta, description: str
) -> dist.ProcessGroup:
    """A new process group, registered with ``torch.distributed``. Its members call this, and no other rank.

    Args:
        members: ranks of the default group, in the order of their ranks in the new one.
        name: a name that no group of the job has had.
        backend: ``"gloo"``, ``"nccl"`` or another backend that torch knows.
        timeout: the timeout of the group's collectives.
        description: shown in torch's error messages.
    """
    # the part of new_group that takes a name; its parameters have not changed since torch 2.4
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
    """Prevent new groups from being split off the default group, which NCCL does if that is bound to a device.

    A split needs all ranks, but only the members of a new group take part here.
    """
    device = default.bound_device_id
    if device is not None:
        default.bound_device_id = None
    try:
        yield
    finally:
        if device is not None:
            default.bound_device_id = device
