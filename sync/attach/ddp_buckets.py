"""The buckets that DDP hands over, and the messages of the units in them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch._C._distributed_c10d import GradBucket

from ..engine.runtime import Runtime
from ..messages.message import Message
from ..plans.grouping import PlacedUnit
from ..plans.plan import UnitPlan
from ..plans.strides import in_reals


@dataclass(frozen=True)
class _Bucket:
    """A bucket with its messages.

    Attributes:
        milestone: the milestone of the runtime for which they were built.
        buffer: its gradients, ``[numel]``.
        members: the ids of its parameters, in order.
        starts: for each of them the index of its first element in the buffer.
        messages: the messages.
    """

    milestone: int | None
    buffer: torch.Tensor
    members: tuple[int, ...]
    starts: tuple[int, ...]
    messages: list[Message]

    def fits(self, milestone: int | None, members: tuple[int, ...]) -> bool:
        """Whether the messages are right for a bucket of these parameters."""
        return self.milestone == milestone and self.members == members


class DdpBuckets:
    """The buckets of a DDP model with their messages for one runtime.

    Args:
        runtime: executes the plan.
        parameters: the parameters of the plan, by name.

    Attributes:
        runtime: as given.
    """

    def __init__(self, runtime: Runtime, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        self.runtime = runtime
        self._units: dict[int, list[UnitPlan]] = {}
        for unit in runtime.plan.units:
            self._units.setdefault(id(parameters[unit.parameter]), []).append(unit)
        self._known: dict[int, _Bucket] = {}
        self._zeros: set[int] = set()  # the buckets among them that DDP does not read

    def __len__(self) -> int:
        """The number of buckets that DDP has handed over."""
        return len(self._known)

    def messages(self, bucket: GradBucket) -> list[Message]:
        """The messages of a bucket. They are built when DDP hands it over for the first time or has rebuilt it, and
        when compression begins or its compressors reach a milestone."""
        members = tuple(id(parameter) for parameter in bucket.parameters())
        known = self._known.get(bucket.index())
        is_same = known is not None and known.buffer.data_ptr() == bucket.buffer().data_ptr()
        if known is None or not is_same or not known.fits(self.runtime.milestone, members):
            known = self._build(bucket.index(), bucket.buffer(), members, _starts(bucket))
        return known.messages

    def of_zeros(self, bucket: GradBucket) -> tuple[list[Message], torch.Tensor]:
        """The messages of a bucket of zeros, which DDP's ``join()`` makes anew in every step, and the zeros that they
        send. Results in them are of no use."""
        members = tuple(id(parameter) for parameter in bucket.parameters())
        known = self._known.get(bucket.index())
        if known is not None and bucket.index() in self._zeros and known.fits(self.runtime.milestone, members):
            known.buffer.zero_()
        else:
            known = self._build(bucket.index(), bucket.buffer(), members, _starts(bucket))
            self._zeros.add(bucket.index())
        return known.messages, known.buffer

    def prepare(self, other: DdpBuckets) -> None:
        """Build the messages of all buckets that another runtime has got, for the next step."""
        for index, known in other._known.items():
            self._build(index, known.buffer, known.members, known.starts)
        self._zeros |= other._zeros

    def clear(self) -> None:
        """Free the messages and their buffers."""
        self._known.clear()

    def _build(self, index: int, buffer: torch.Tensor, members: tuple[int, ...], starts: tuple[int, ...]) -> _Bucket:
        units = [
            PlacedUnit(unit, start + (unit.start or 0))
            for member, start in zip(members, starts, strict=True)
            for unit in self._units[member]
        ]
        messages = self.runtime.messages(buffer, units)
        self._zeros.discard(index)
        known = self._known[index] = _Bucket(self.runtime.milestone, buffer, members, starts, messages)
        return known


def _starts(bucket: GradBucket) -> tuple[int, ...]:
    # bucket.gradients() would give wrong offsets: it counts a complex element once, the buffer holds two reals
    numels = [in_reals(parameter).numel() for parameter in bucket.parameters()]
    assert sum(numels) == bucket.buffer().numel()
    return (0, *itertools.accumulate(numels[:-1]))
