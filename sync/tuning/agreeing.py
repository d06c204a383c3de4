"""Work that may fail on some ranks, with the same outcome on all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from ..resources.communicators import exchange_text

T = TypeVar("T")


@dataclass(frozen=True)
class Failure:
    """The outcome of work that has failed on some rank, the same on all ranks.

    Attributes:
        text: the error, with the rank that has raised it.
    """

    text: str


def together(group: dist.ProcessGroup, device: torch.device, work: Callable[[], T]) -> T | Failure:
    """The result of ``work`` on this rank if it returns on all ranks, otherwise a :class:`Failure`. Collective.

    Args:
        group: all ranks.
        device: a device whose tensors the group can send.
        work: what every rank does, without using ``group``.

    Raises:
        RuntimeError: a rank is gone.
    """
    result, report = None, ""
    try:
        result = work()
    except Exception as error:
        report = f"{type(error).__name__}: {error}"
    reports = exchange_text(group, device, report)
    for rank, text in enumerate(reports):
        if text:
            return Failure(f"{text} (rank {rank})")
    assert result is not None
    return result
