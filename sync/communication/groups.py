"""Process groups whose names are unique in the job, over its whole lifetime.

The ranks of a group find each other under the group's name in the store of the job. ``torch.distributed.new_group``
derives that name from the ranks and the number of groups that exist. After a group has been destroyed, a new one can
get its name, and then reads the addresses of the old one. Here a counter in the store numbers every set of groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from .collectives import exchange_text, on_any_rank

ATTEMPTS = 2
"""How often ranks try to connect."""

_kept: dict[tuple[int, ...], dist.ProcessGroup] = {}  # groups of some ranks


class NotConnected(RuntimeError):
    """Raised on all ranks together, with the same text, if some rank cannot connect to a new group."""


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


def group_of(ranks: Sequence[int]) -> dist.ProcessGroup:
    """The group of some ranks, which is the default one if it has no others. It is made when these ranks call this
    together for the first time, and kept until ``destroy_process_group`` ends all groups."""
    default, key = distributed_c10d._get_default_group(), tuple(sorted(ranks))
    if len(key) == default.size():
        return default
    if (kept := _kept.get(key)) not in distributed_c10d._world.pg_map:
        kept = _kept[key] = dist.new_group(list(key), use_local_synchronization=True)
    return kept


def new_group_of(ranks: Sequence[int], like: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """A new group of some ranks, with the backend and the timeout of another group. All of them call this together;
    they need no group in common, and may have made different groups before.

    Args:
        ranks: ranks of the default group, with this one.
        like: the other group.
        device: a device whose tensors both groups can send.
    """
    members, store = sorted(ranks), distributed_c10d._get_default_store()
    name = f"of {members}"
    ticket = store.add(f"gckernels/{name}", 1)  # every rank takes one for each group of these ranks
    backend = like._get_backend(device)
    wanted = Wanted(members, name, backend.name(), backend.options._timeout)
    made = _make_group(wanted, (ticket - 1) // len(members), like)
    _connect([made], made, device)
    return made


@dataclass(frozen=True)
class Wanted:
    """A process group that is to be made."""

    members: Sequence[int]  # ranks of the default group, in the order of their ranks in the new one
    name: str  # a name that no other group of the same call has on its members. Error messages of torch show it.
    backend: str  # "gloo", "nccl" or another backend that torch knows
    timeout: timedelta  # the timeout of its collectives


def make_groups(group: dist.ProcessGroup, device: torch.device, wanted: Sequence[Wanted]) -> list[dist.ProcessGroup]:
    """New process groups that all ranks of ``group`` have connected to. Collective over ``group``.

    A rank that cannot connect to one group goes on with the others, because some rank may wait there. Then all ranks
    give up their groups and try once more: with many connections at a time, a single one is refused now and then.

    Args:
        group: the members of all groups.
        device: a device whose tensors the groups can send.
        wanted: the groups that this rank is a member of, in an order that all ranks share.

    Raises:
        NotConnected: some rank cannot connect. Every rank raises.
    """
    for _ in range(ATTEMPTS):
        number, made, problem = draw_number(group, device), list[dist.ProcessGroup](), ""
        for each in wanted:
            try:
                made.append(_make_group(each, number, group))
            except Exception as error:  # also for want of memory or files
                problem = problem or f"{type(error).__name__}: {error}"
        # no rank may go on, and perhaps destroy its groups, while another one is still connecting to them
        if not any(on_any_rank(group, device, bool(problem))):
            _connect(made, group, device)
            return made
        while made:
            dist.destroy_process_group(made.pop())
    problems = enumerate(exchange_text(group, device, problem))
    rank, text = next((rank, text) for rank, text in problems if text)
    raise NotConnected(f"process groups could not be made: {text} (rank {rank})")


def _make_group(wanted: Wanted, number: int, group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A new process group, registered with ``torch.distributed``. Its members call this, and no other rank.

    Args:
        wanted: the group to make.
        number: a number that no other set of groups has.
        group: a group with all members. If it is bound to a device, so is the new one.
    """
    # the part of new_group that takes a name; its parameters have not changed since torch 2.4
    construct: Any = distributed_c10d._new_process_group_helper
    members = list(wanted.members)
    # torch 2.15 connects groups of NCCL to a device when they are made, by default that of the local rank
    device = None if wanted.backend == dist.Backend.GLOO else group.bound_device_id
    with _without_splits():
        made, _ = construct(
            len(members),
            members.index(dist.get_rank()),
            members,
            wanted.backend,
            distributed_c10d._get_default_store(),
            f"gckernels/{number}/{wanted.name}/{members[0]}",
            timeout=wanted.timeout,
            device_id=device,
            group_desc=f"gckernels-{wanted.name}",
        )
    distributed_c10d._world.pg_group_ranks[made] = {rank: index for index, rank in enumerate(members)}
    assert isinstance(made, dist.ProcessGroup)
    return made


def _connect(made: Sequence[dist.ProcessGroup], group: dist.ProcessGroup, device: torch.device) -> None:
    """Return when every rank of ``group`` has connected to groups whose backend connects in the first collective, as
    all backends but Gloo do. It takes place here: in one order, from one thread, outside any training step."""
    lazy = [each for each in made if dist.get_backend(each) != dist.Backend.GLOO]
    for each in (*lazy, *([group] if lazy else [])):
        connected = torch.ones(1, dtype=torch.float32, device=device)
        dist.all_reduce(connected, group=each)
        connected.item()  # waits for the device


@contextmanager
def _without_splits() -> Iterator[None]:
    """Prevent new groups from being split off the default group, which NCCL does if that is bound to a device.

    A split needs all ranks, but only the members of a new group take part here.
    """
    source = distributed_c10d._get_split_source
    distributed_c10d._get_split_source = lambda *_: None
    try:
        yield
    finally:
        distributed_c10d._get_split_source = source
