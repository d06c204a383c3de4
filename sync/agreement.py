"""Before anything is built: every rank is without a problem, and all have the same settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from .communicators import exchange_text

T = TypeVar("T")


def agreed(what: str, group: dist.ProcessGroup, device: torch.device, check: Callable[[], tuple[T, str]]) -> T:
    """What ``check`` returns, when it returns on every rank, with the same text of settings.

    Every rank of ``group`` calls this. A rank on which ``check`` raises takes part in the exchange all the same: the
    others are waiting in it.

    Raises:
        Exception: what ``check`` has raised on this rank.
        RuntimeError: it has raised on another rank, or the texts are not the same. Every rank raises.
    """
    problem, result, settings = None, None, ""
    try:
        result, settings = check()
    except Exception as error:  # of the caller's functions, too: any
        problem = error
    texts = exchange_text(group, device, f"problem: {problem}" if problem else f"settings: {settings}")
    if problem is not None:
        raise problem
    for rank, text in enumerate(texts):
        if text.startswith("problem: "):
            raise RuntimeError(f"{what}: rank {rank} could not {what}: {text.removeprefix('problem: ')}")
    if len(set(texts)) > 1:
        listed = "\n  ".join(f"rank {rank}: {text.removeprefix('settings: ')}" for rank, text in enumerate(texts))
        raise RuntimeError(f"{what}: the ranks do not have the same settings:\n  {listed}")
    assert result is not None
    return result
