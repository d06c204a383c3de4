"""Construction of messages from their specs."""

from __future__ import annotations

from typing import assert_never

import torch

from ..communication.communicators import Communicators
from ..plans.grouping import MessageSpec
from ..programs.named import SHARDS
from ..programs.stages import MessageKind
from ..resources.feedback import Feedback
from ..resources.memory_spaces import Allocate
from .encoded import EncodedMessage
from .message import DenseMessage, Message, Unit
from .seeds import Seeds


def build_message(
    spec: MessageSpec,
    buffer: torch.Tensor,
    communicators: Communicators,
    feedback: Feedback,
    seeds: Seeds,
    shares: bool = False,
    allocate: Allocate | None = None,
) -> Message:
    """The message that a spec describes.

    Args:
        buffer: ``[numel]``, the bucket with the units of the message; ``[ranks, numel]`` if their means end in shards.
        communicators: the process groups of this rank.
        feedback: the residuals and factors.
        seeds: the seeds of the stochastic compressors.
        shares: as for :class:`~.message.DenseMessage`.
        allocate: makes the buffers of the message; by default each has memory of its own.
    """
    message: Message
    if spec.program == SHARDS:
        from . import shards

        message = shards.ShardMessage(spec.units, buffer, communicators, feedback, seeds, spec.channel, allocate)
        return message
    if spec.kind == MessageKind.IN_PLACE:
        return DenseMessage(buffer[spec.start : spec.stop], spec.keys, communicators, shares)
    units = [Unit(unit.plan, buffer[unit.start : unit.stop]) for unit in spec.units]
    match spec.kind:
        case MessageKind.ENCODED:
            return EncodedMessage(units, communicators, feedback, seeds, spec.channel, allocate)
        case MessageKind.LOW_RANK:
            from . import lowrank

            message = lowrank.LowRankMessage(units, communicators, feedback, seeds, allocate)
            return message
        case _:
            assert_never(spec.kind)
