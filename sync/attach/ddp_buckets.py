"""The buckets that DDP hands over, and the messages of the units in them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from ..engine.failures import FailedBucket, Outcome
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
        self._sent_zeros: list[Future[Outcome]] = []  # futures of the current step

    def __len__(self) -> int:
        """The number of buckets that DDP has handed over."""
        return len(self._known)

    def send(self, bucket: GradBucket) -> Future[Outcome]:
        """Submit the messages of a bucket, and return its future. They are built when DDP hands it over for the first
        time or has rebuilt it, and when compression begins or its compressors reach a milestone."""
        members, buffer = tuple(id(parameter) for parameter in bucket.parameters()), bucket.buffer()
        known = self._known.get(bucket.index())
        is_same = known is not None and known.buffer.data_ptr() == buffer.data_ptr()
        if known is None or not is_same or not known.fits(self.runtime.milestone, members):
            known = self._build(bucket.index(), buffer, members, _starts(bucket))
        return self._submit(bucket, known.messages, buffer)

    def send_zeros(self, bucket: GradBucket) -> Future[Outcome]:
        """Submit messages of zeros in place of a bucket of zeros, which DDP's ``join()`` makes anew in every step, and
        return a future without a result of use. The last bucket waits for all of them.

        Raises:
            RuntimeError: sending has failed, at which DDP would not look.
        """
        members = tuple(id(parameter) for parameter in bucket.parameters())
        known = self._known.get(bucket.index())
        if known is not None and bucket.index() in self._zeros and known.fits(self.runtime.milestone, members):
            known.buffer.zero_()
        else:
            known = self._build(bucket.index(), bucket.buffer(), members, _starts(bucket))
            self._zeros.add(bucket.index())
        self._sent_zeros.append(self._submit(bucket, known.messages, known.buffer))
        last = self._sent_zeros[-1]
        while bucket.is_last() and self._sent_zeros:
            if isinstance(outcome := self._sent_zeros.pop().wait(), FailedBucket):
                raise outcome.error
        return last

    def _submit(self, bucket: GradBucket, messages: list[Message], buffer: torch.Tensor) -> Future[Outcome]:
        return self.runtime.submit(messages, buffer, first=bucket.index() == 0, last=bucket.is_last())

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
