"""Buckets of an exact step that also sends everything that residuals hold, before another plan follows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from ..plans.grouping import PlacedUnit
from ..programs.sizes import allreduce_sent_nbytes
from ..programs.stages import IN_PLACE_STAGES
from ..resources.communicators import Communicators
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
        keep_unused: whether a unit whose gradient is all zero on every rank leaves its residuals unchanged, as in
            :class:`~.encoded.EncodedMessage`.
        shares: whether the bucket has already been divided by the number of ranks when a step begins.
    """

    def __init__(
        self,
        grad: torch.Tensor,
        units: Sequence[PlacedUnit],
        communicators: Communicators,
        feedback: Feedback,
        keep_unused: bool,
        shares: bool,
    ) -> None:
        self._grad, self._group = grad, communicators.averaging
        self._factor = None if shares else 1.0 / communicators.world_size
        self._pieces = [grad[unit.start : unit.stop] for unit in units]
        topology, rank = communicators.topology, communicators.rank
        self._unsent = [list(unsent(unit.plan, topology, rank, feedback.get)) for unit in units]
        self._keep_unused = keep_unused and any(unit.plan.feedback for unit in units)
        self.keys = tuple(unit.plan.key for unit in units)
        self.sent_nbytes = allreduce_sent_nbytes(grad.nbytes, communicators.world_size)
        (spec,) = IN_PLACE_STAGES
        self.stages = (Stage(spec, as_work(self._average), self.sent_nbytes, grad.numel(), grad.nbytes, grad.nbytes),)

    @torch.no_grad()
    def _average(self) -> None:
        add = self._add_used() if self._keep_unused else self._add_all
        if self._factor is not None:
            self._grad.mul_(self._factor)
        add()
        dist.all_reduce(self._grad, group=self._group)

    def _add_all(self) -> None:
        for piece, held in zip(self._pieces, self._unsent, strict=True):
            for each in held:
                values = each.values.to(piece.device)
                piece[each.start : each.start + values.numel()].add_(values, alpha=each.weight)
                each.values.zero_()

    def _add_used(self) -> Callable[[], None]:
        """Ask all ranks which units have a gradient, and return a function that adds the residuals of these."""
        used = torch.stack([piece.any() for piece in self._pieces]).to(torch.int32)
        dist.all_reduce(used, op=dist.ReduceOp.MAX, group=self._group)

        def add() -> None:
            for piece, held, is_used in zip(self._pieces, self._unsent, used, strict=True):
                for each in held:
                    sent = each.values * is_used.to(each.values.device)
                    values = sent.to(piece.device)
                    piece[each.start : each.start + values.numel()].add_(values, alpha=each.weight)
                    each.values.sub_(sent)

        return add
