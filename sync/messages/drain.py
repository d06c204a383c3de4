"""Buckets of an exact step that also sends everything that residuals hold, before another plan follows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from ..communication.communicators import Communicators
from ..plans.grouping import PlacedUnit
from ..programs.residuals import ENCODINGS
from ..resources.feedback import Feedback
from ..states.unsent import taken
from .message import DenseMessage, Message


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
        self._dense = DenseMessage(grad, [unit.plan.key for unit in units], communicators, shares)
        self._feedback, self._of = feedback, (communicators.topology, communicators.rank)
        self._units = [(unit.plan, grad[unit.start : unit.stop]) for unit in units]
        self.keys, self.sent_nbytes = self._dense.keys, self._dense.sent_nbytes
        (stage,) = self._dense.stages
        self.stages = (replace(stage, work=self._average, begin=None),)

    @torch.no_grad()
    def _average(self) -> None:
        self._dense.share()
        for plan, piece in self._units:
            residuals = [found for kind in ENCODINGS if (found := self._feedback.find(kind, plan.key)) is not None]
            # they come back if no rank has used the unit
            self._feedback.unused.keep((plan.key, each.tensor) for each in residuals)
            for each in taken(plan, *self._of, self._feedback):
                values = each.values.to(piece.device)
                piece[each.start : each.start + values.numel()].add_(values, alpha=each.weight)
        self._dense.all_reduce()
