"""Messages: units that travel together, with their stages.

The units of a *message* have the same program and lie side by side in one buffer, so that each phase needs only one
collective. Buffers are allocated once, when a message is built.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from gckernels.codec import Codec

from ..communication.communicators import Communicators
from ..plans.plan import UnitPlan
from ..programs.lanes import Route
from ..programs.sizes import allreduce_sent_nbytes
from ..programs.stages import IN_PLACE_STAGES, StageSpec


@dataclass(frozen=True)
class Unit:
    """One piece of gradient to synchronise.

    Attributes:
        plan: its plan.
        grad: the piece itself, ``[numel]``, contiguous.
    """

    plan: UnitPlan
    grad: torch.Tensor


def compressor_of(unit: Unit, kind: str = "worker") -> Codec:
    """The compressor of one of the encodings of a unit whose method is a :class:`~gckernels.Codec`."""
    compressor = unit.plan.encoder(kind)
    assert isinstance(compressor, Codec)
    return compressor


# -------------------------------------------------------------------- stages


Work = Callable[[int], None]
"""A function that runs a stage. Its argument is the number of the training step."""

Wait = Callable[[], object]
"""Waits for the end of a collective; on a CUDA device, lets the current stream wait."""

Issue = Callable[[int], Wait]
"""Issues a collective without waiting for it. Its argument is that of a :data:`Work`."""


def as_work(call: Callable[[], object]) -> Work:
    """``call`` as the work of a stage that does the same in every training step."""

    def work(step: int) -> None:
        call()

    return work


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
    """

    spec: StageSpec
    work: Work
    sent_nbytes: float = 0.0
    elements: int = 0
    read_nbytes: int = 0
    written_nbytes: int = 0
    begin: Callable[[], torch.futures.Future[Any]] | None = None
    issue: Issue | None = None


class Message:
    """Units that travel together.

    Attributes:
        keys: keys of the units.
        compressors: names of the units' compressors, each once.
        channel: channel of its communicators.
        sent_nbytes: bytes that a rank sends in a training step, as a mean over all ranks.
        stages: the stages in order, the same on all ranks except those in which this rank takes no part.
        route: the way of the stages through the lanes of the engine; ``None`` before the first submission.
    """

    keys: Sequence[str]
    compressors: Sequence[str] = ()
    channel: int = 0
    sent_nbytes: float
    stages: Sequence[Stage]
    route: Route[Stage, Any] | None = None


def compressor_names(units: Sequence[Unit]) -> tuple[str, ...]:
    """The names of the compressors of all units, each once."""
    return tuple(dict.fromkeys(unit.plan.compressor.name for unit in units))


class DenseMessage(Message):
    """A stretch of gradient that is averaged in place without compression, with the same bits as in DDP.

    Args:
        grad: the stretch, ``[numel]``.
        keys: keys of the units in it.
        communicators: the process groups of this rank.
        shares: whether the stretch has already been divided by the number of ranks when a step begins.
    """

    def __init__(
        self, grad: torch.Tensor, keys: Sequence[str], communicators: Communicators, shares: bool = False
    ) -> None:
        self._grad, self.keys = grad, tuple(keys)
        self._group = communicators.averaging
        # a product, as in DDP: division would give other bits
        self._factor = None if shares else 1.0 / communicators.world_size
        self.sent_nbytes = allreduce_sent_nbytes(grad.nbytes, communicators.world_size)
        (spec,) = IN_PLACE_STAGES
        sizes = grad.numel(), grad.nbytes, grad.nbytes
        self.stages = (Stage(spec, as_work(self._average), self.sent_nbytes, *sizes, begin=self._begin),)

    def _average(self) -> None:
        self._share()
        dist.all_reduce(self._grad, group=self._group)

    def _begin(self) -> torch.futures.Future[Any]:
        self._share()
        work: Any = dist.all_reduce(self._grad, group=self._group, async_op=True)
        future: torch.futures.Future[Any] = work.get_future()
        return future

    def _share(self) -> None:
        if self._factor is not None:
            self._grad.mul_(self._factor)
