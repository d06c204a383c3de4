"""Construction of messages from their specs."""

from __future__ import annotations

from typing import assert_never

import torch

from ..communication.communicators import Communicators
from ..plans.grouping import MessageSpec
from ..programs.named import SHARDS
from ..programs.stages import MessageKind
from ..resources.feedback import Feedback
from .encoded import EncodedMessage
from .lowrank import LowRankMessage
from .message import DenseMessage, Message, Unit
from .seeds import Seeds
from .shards import ShardMessage


def build_message(
    spec: MessageSpec,
    buffer: torch.Tensor,
    communicators: Communicators,
    feedback: Feedback,
    seeds: Seeds,
    shares: bool = False,
    room: torch.Tensor | None = None,
) -> Message:
    """The message that a spec describes, with new buffers.

    Args:
        spec: the spec.
        buffer: ``[numel]``, the bucket with the units of the message; ``[ranks, numel]`` if their means end in shards.
        communicators: the process groups of this rank.
        feedback: the residuals and factors.
        seeds: the seeds of the stochastic compressors.
        shares: as for :class:`~.message.DenseMessage`.
        room: as for :class:`~.shards.ShardMessage`.
    """
    if spec.program == SHARDS:
        assert room is not None
        return ShardMessage(spec.units, buffer, room, communicators, feedback, seeds, spec.channel)
    if spec.kind == MessageKind.IN_PLACE:
        return DenseMessage(buffer[spec.start : spec.stop], spec.keys, communicators, shares)
    units = [Unit(unit.plan, buffer[unit.start : unit.stop]) for unit in spec.units]
    match spec.kind:
        case MessageKind.ENCODED:
            return EncodedMessage(units, communicators, feedback, seeds, spec.channel)
        case MessageKind.LOW_RANK:
            return LowRankMessage(units, communicators, feedback, seeds)
        case _:
            assert_never(spec.kind)
