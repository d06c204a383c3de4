"""Buckets of an exact step that also sends everything that residuals hold, before another plan follows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ..communication.communicators import Communicators
from ..plans.grouping import PlacedUnit
from ..programs.sizes import allreduce_sent_nbytes
from ..programs.stages import IN_PLACE_STAGES
from ..resources.feedback import Feedback
from ..states.unsent import unsent
from .message import Message, Stage, as_work


class DrainMessage(Message):
    """A bucket that is averaged in place without compression, together with what its residuals hold; these become zero.

    Args:
        grad: the bucket, ``[numel]``.
        units: all units in it.
        communicators: the process groups of this rank.
        feedback: the residuals.
        shares: whether the bucket has already been divided by the number of ranks when a step begins.
    """

    def __init__(
        self,
        grad: torch.Tensor,
        units: Sequence[PlacedUnit],
        communicators: Communicators,
        feedback: Feedback,
        shares: bool,
    ) -> None:
        self._grad, self._group, self._unused = grad, communicators.averaging, feedback.unused
        self._factor = None if shares else 1.0 / communicators.world_size
        topology, rank = communicators.topology, communicators.rank
        self._unsent = [
            (unit.plan.key, grad[unit.start : unit.stop], list(unsent(unit.plan, topology, rank, feedback.get)))
            for unit in units
        ]
        self._residuals = [(key, each.values) for key, _, held in self._unsent for each in held]
        self.keys = tuple(unit.plan.key for unit in units)
        self.sent_nbytes = allreduce_sent_nbytes(grad.nbytes, communicators.world_size)
        (spec,) = IN_PLACE_STAGES
        self.stages = (Stage(spec, as_work(self._average), self.sent_nbytes, grad.numel(), grad.nbytes, grad.nbytes),)

    @torch.no_grad()
    def _average(self) -> None:
        if self._factor is not None:
            self._grad.mul_(self._factor)
        self._unused.keep(self._residuals)  # they come back if no rank has used the unit
        for _, piece, held in self._unsent:
            for each in held:
                values = each.values.to(piece.device)
                piece[each.start : each.start + values.numel()].add_(values, alpha=each.weight)
                each.values.zero_()
        dist.all_reduce(self._grad, group=self._group)
