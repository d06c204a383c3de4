"""Wrappers that average the gradients of a model, and are silent while its updates are averaged in their place.

Trainers wrap every model. A wrapper that averaged gradients beside :class:`~gckernels.sync.Updates` would send what
updates are there to save, and nobody would see it.
"""

from __future__ import annotations

from typing import Protocol

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from .kinds import served_by


class Silence(Protocol):
    """The silence of what averages the gradients of a model. It keeps neither of them."""

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks over which gradients are averaged otherwise."""

    @property
    def averages(self) -> DistributedDataParallel | None:
        """The DDP model that is silent; ``None`` if it is another one."""

    def check(self, caller: str) -> None:
        """Raise a ValueError in the name of a caller if it cannot be silent."""

    def begin(self) -> None:
        """Let no backward average gradients from now on, and let one raise that does so nevertheless."""

    def end(self) -> None:
        """Let it average gradients as before."""


def silence_of(model: object, group: dist.ProcessGroup | None = None) -> Silence | None:
    """The silence of what averages the gradients of a model over the ranks of a group, by default over any; ``None`` if
    nothing does.

    Args:
        model: the model, with its wrapper.
        group: the ranks that average updates. A wrapper that averages over others goes on, as inside a site.
    """
    if (made := served_by(model).silence) is None:
        return None
    found = made()(model)
    ranks = [sorted(dist.get_process_group_ranks(each)) for each in (found.group, group or found.group)]
    return found if ranks[0] == ranks[1] else None
