"""Messages: units that travel together, with their stages.

The units of a *message* have the same program and lie side by side in one buffer, so that each phase needs only one
collective. Buffers are allocated once, when a message is built.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from gckernels.codec import Codec

from ..communication.communicators import Communicators
from ..plans.grouping import PlacedUnit
from ..plans.plan import UnitPlan
from ..programs.lanes import Route
from ..programs.sizes import allreduce_sent_nbytes
from ..programs.stages import IN_PLACE_STAGES
from ..resources.stage import Stage


@dataclass(frozen=True)
class Unit:
    """One piece of gradient to synchronise."""

    plan: UnitPlan
    grad: torch.Tensor  # the piece itself, [numel], contiguous


def compressor_of(unit: Unit | PlacedUnit, kind: str = "worker") -> Codec:
    """The compressor of one of the encodings of a unit whose method is a :class:`~gckernels.Codec`."""
    compressor = unit.plan.encoder(kind)
    assert isinstance(compressor, Codec)
    return compressor


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


def compressor_names(units: Sequence[Unit | PlacedUnit]) -> tuple[str, ...]:
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
        self._link = communicators.averaging
        # a product, as in DDP: division would give other bits
        self._factor = None if shares else 1.0 / communicators.world_size
        self.sent_nbytes = allreduce_sent_nbytes(grad.nbytes, communicators.world_size)
        (spec,) = IN_PLACE_STAGES
        sizes = grad.numel(), grad.nbytes, grad.nbytes
        self.stages = (Stage(spec, self._average, self.sent_nbytes, *sizes, begin=self._begin),)

    def share(self) -> None:
        """Make this rank's gradient its part of the mean."""
        if self._factor is not None:
            self._grad.mul_(self._factor)

    def all_reduce(self) -> None:
        """Add up the parts of all ranks."""
        dist.all_reduce(self._grad, group=self._link.group)

    def _average(self) -> None:
        self.share()
        self.all_reduce()

    def _begin(self) -> torch.futures.Future[Any]:
        self.share()
        work: Any = dist.all_reduce(self._grad, group=self._link.group, async_op=True)
        future: torch.futures.Future[Any] = work.get_future()
        return future
