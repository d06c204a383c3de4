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
    """One stage of a message, bound to its buffers.

    Attributes:
        spec: its specification.
        work: runs it.
        sent_nbytes: bytes that a rank sends in it, as a mean over all ranks.
        elements: number of elements that a rank has before it or, for a rank that only receives, after it.
        read_nbytes: bytes of the units, raw or encoded, before it.
        written_nbytes: bytes of the units after it.
        begin: starts the work in the calling thread and returns the future of its end; only for stages with
            ``spec.starts_immediately``.
        issue: issues the collective, whose end ``work`` also waits for; ``None`` for other stages.
        keys: keys of the units of its message, for errors.
    """

    spec: StageSpec
    work: Work
    sent_nbytes: float = 0.0
    elements: int = 0
    read_nbytes: int = 0
    written_nbytes: int = 0
    begin: Callable[[], Future[Any]] | None = None
    issue: Issue | None = None
    keys: Sequence[str] = ()
