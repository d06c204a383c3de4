"""The memory of a device beside a plan, which must be enough for the steps of the training."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gckernels.devices import allocated_nbytes, is_accelerator

from ..plans.numbers import volume


@dataclass(frozen=True)
class Room:
    """The memory of a device at some time.

    Attributes:
        taken_nbytes: the bytes of all tensors.
        peak_nbytes: the largest number of them so far.
        limit_nbytes: the largest number that there can be.
    """

    taken_nbytes: int
    peak_nbytes: int
    limit_nbytes: int

    @staticmethod
    def of(device: torch.device) -> Room | None:
        """The memory of an accelerator now; ``None`` for a CPU, and if the allocator does not say."""
        nbytes = allocated_nbytes(device) if is_accelerator(device) else None
        return None if nbytes is None else Room(*nbytes)


def require_room(before: Room | None, after: Room | None) -> None:
    """Raise a MemoryError if a step as large as the largest one so far has no room beside a plan.

    Args:
        before: the memory before the plan was built; ``None`` if it is not known.
        after: the memory since then.
    """
    if before is None or after is None:
        return
    plan_nbytes = after.taken_nbytes - before.taken_nbytes
    left_nbytes = after.limit_nbytes - before.peak_nbytes
    if plan_nbytes > left_nbytes:
        raise MemoryError(
            f"the plan takes {volume(plan_nbytes)}, and the largest step so far leaves {volume(max(left_nbytes, 0))}"
        )
