"""Stages of messages, bound to buffers: what lanes run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.futures import Future

from ..programs.stages import StageSpec
from .workers import Work

Wait = Callable[[], object]
"""Waits for the end of a collective; on a CUDA device, lets the current stream wait."""

Issue = Callable[[], Wait]
"""Issues a collective without waiting for it."""


@dataclass(frozen=True)
class Stage:
    """One stage of a message, bound to its buffers."""

    spec: StageSpec  # its specification
    work: Work  # runs it
    sent_nbytes: float = 0.0  # bytes that a rank sends in it, as a mean over all ranks
    elements: int = 0  # number of elements that a rank has before it or, for a rank that only receives, after it
    read_nbytes: int = 0  # bytes of the units, raw or encoded, before it
    written_nbytes: int = 0  # bytes of the units after it
    begin: Callable[[], Future[Any]] | None = None
    """Starts the work in the calling thread and returns the future of its end; only for stages with
    ``spec.starts_immediately``."""
    issue: Issue | None = None  # issues the collective, whose end work also waits for; None for other stages
    keys: Sequence[str] = ()  # keys of the units of its message, for errors
