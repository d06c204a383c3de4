"""Who talks to whom: ranks, and one communicator for every phase.

Collectives of different phases are in flight at the same time, and those of DDP itself besides; each phase therefore
has a process group of its own, in which the order of issue is the order of submission.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

_TEXT_NBYTES = 4096

# torch 2.13 deprecates the older name, torch 2.11 has no other
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Communicators:
    """The process groups of the phases. Building it is collective: every rank of ``group`` must.

    Attributes:
        rank, world_size: of the calling process in ``group``.
        phases: one process group per phase, with the ranks and the timeout of ``group``.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, phases: int) -> None:
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        ranks = dist.get_process_group_ranks(group)
        backend = group._get_backend(device)  # where torch keeps a group's timeout; new_group would take the default
        self.phases = tuple(
            dist.new_group(
                ranks,
                timeout=backend.options._timeout,
                backend=dist.get_backend(group),
                use_local_synchronization=len(ranks) != dist.get_world_size(),
                group_desc=f"gckernels-phase-{phase}",
            )
            for phase in range(phases)
        )

    def close(self) -> None:
        """Destroy the phases' groups; further calls do nothing."""
        for group in self.phases:
            if group in dist.distributed_c10d._world.pg_map:
                dist.destroy_process_group(group)
        self.phases = ()


def exchange_text(group: dist.ProcessGroup, device: torch.device, text: str) -> list[str]:
    """Every rank's ``text``, in rank order; what is longer than 4096 bytes in UTF-8 is cut. Nothing is unpickled."""
    encoded = text.encode()[:_TEXT_NBYTES]
    sent = torch.zeros(_TEXT_NBYTES, dtype=torch.uint8)
    sent[: len(encoded)] = torch.frombuffer(bytearray(encoded or b"\0"), dtype=torch.uint8)[: len(encoded)]
    received = torch.empty(dist.get_world_size(group), _TEXT_NBYTES, dtype=torch.uint8, device=device)
    all_gather(received.view(-1), sent.to(device), group=group)
    return [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in received.cpu()]
