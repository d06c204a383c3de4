"""The messages of a bucket in the steps of a training."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..messages.message import Message
from ..plans.grouping import PlacedUnit
from ..resources.memory_spaces import BufferArena
from .runtime import Runtime


class BucketMessages:
    """The messages of a bucket. They are built when compression begins, and when its compressors reach a milestone.

    The messages of exact steps are kept beside them, because a training may come back to such steps at any time. When
    the gradients have moved, as by ``share_memory_``, or the arena has, all are built anew, because bound calls keep
    addresses.

    Args:
        runtime: executes the plan.
        buffer: the gradients of the bucket, ``[numel]``.
        units: all units in it.
        shares, arena: as for :meth:`~.runtime.Runtime.messages`.

    Attributes:
        buffer: as given.
    """

    def __init__(
        self,
        runtime: Runtime,
        buffer: torch.Tensor,
        units: Sequence[PlacedUnit],
        shares: bool = False,
        arena: BufferArena | None = None,
    ) -> None:
        self.buffer, self._runtime, self._units, self._shares, self._arena = buffer, runtime, units, shares, arena
        self._built: dict[int | None, list[Message]] = {}  # by the milestone of the runtime
        self._where = (0, 0)  # the gradients and the arena were there when messages were built

    def now(self) -> list[Message]:
        """The messages of the current step."""
        milestone = self._runtime.milestone
        if self._where != self._is_now():
            self._built = {}
        if milestone not in self._built:
            self._built = {each: built for each, built in self._built.items() if each is None}
            self._built[milestone] = self._runtime.messages(self.buffer, self._units, self._shares, self._arena)
            self._where = self._is_now()
        return self._built[milestone]

    def _is_now(self) -> tuple[int, int]:
        return self.buffer.data_ptr(), 0 if self._arena is None else self._arena.version
