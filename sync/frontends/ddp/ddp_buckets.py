"""The buckets that DDP hands over, and the messages of the units in them."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from ...engine.bucket_messages import BucketMessages
from ...engine.failures import Outcome, wait_for
from ...engine.runtime import Runtime
from ...plans.grouping import PlacedUnit
from ...plans.plan import UnitPlan
from ...plans.strides import in_reals

_SHOWN = 5  # names in an error


@dataclass(frozen=True)
class _Bucket:
    """A bucket with its messages.

    Attributes:
        messages: the messages, and the gradients.
        starts: for each of its parameters the index of its first element in the buffer.
        is_read: whether DDP reads the buffer when they are done.
    """

    messages: BucketMessages
    starts: tuple[int, ...]
    is_read: bool


class UnplannedError(RuntimeError):
    """Raised if DDP averages parameters that the plan does not have."""


class DdpBuckets:
    """The buckets of a DDP model with their messages for one runtime.

    A bucket is known by its parameters. Its number may be that of another one, and its memory may be new.

    Args:
        runtime: executes the plan.
        parameters: the parameters of the plan, by name.
        model: the DDP model, which is not kept. If its gradients are views of the buckets, those of parameters that no
            rank has used, which DDP leaves as they are, are restored.

    Attributes:
        runtime: as given.
    """

    def __init__(
        self,
        runtime: Runtime,
        parameters: Mapping[str, torch.nn.Parameter],
        model: weakref.ref[DistributedDataParallel],
    ) -> None:
        self.runtime, self._model = runtime, model
        ddp_model = model()
        self._has_views = ddp_model is not None and ddp_model.gradient_as_bucket_view
        self._units: dict[int, list[UnitPlan]] = {}
        for unit in runtime.plan.units:
            self._units.setdefault(id(parameters[unit.parameter]), []).append(unit)
        self._known: dict[tuple[int, ...], _Bucket] = {}  # by the ids of their parameters, in order
        self._missing = 0  # parameters of which no bucket has come in this step
        self._sent_zeros: list[Future[Outcome]] = []  # futures of the current step

    def __len__(self) -> int:
        """The number of buckets that DDP has handed over."""
        return len(self._known)

    def send(self, bucket: GradBucket, first: bool, used: Collection[int] | None = None) -> Future[Outcome]:
        """Submit the messages of a bucket, and return its future. They are built when DDP hands it over for the first
        time or has rebuilt it, and when compression begins or its compressors reach a milestone.

        Args:
            bucket: the bucket.
            first: whether it is the first one of the step.
            used: the ids of the parameters that this rank has used; ``None`` if each step uses all of them.

        Raises:
            UnplannedError: the plan does not have all parameters of the bucket.
        """
        members, buffer = tuple(id(parameter) for parameter in bucket.parameters()), bucket.buffer()
        known = self._known.get(members)
        if known is None or known.messages.buffer.data_ptr() != buffer.data_ptr():
            known = self._placed(bucket, is_read=True)
        if used is not None:
            pieces = self._pieces(members, known, used)
            self.runtime.unused.add(pieces)
            if self._has_views:
                self.runtime.unused.keep(pieces.items())
        messages = known.messages.now()
        if first:
            self.runtime.begin_step()
        sent = self.runtime.submit(messages, buffer)
        self._missing = (len(self._units) if first else self._missing) - len(members)
        if not self._missing:
            self.runtime.release()
        return sent

    def send_zeros(self, bucket: GradBucket, first: bool, last: bool, may_be_unused: bool) -> Future[Outcome]:
        """Submit messages of zeros in place of a bucket of zeros, which DDP's ``join()`` makes anew in every step, and
        return a future without a result of use. The last bucket waits for all of them.

        Args:
            bucket: the bucket.
            first: whether it is the first one of the step.
            last: whether it is the last one.
            may_be_unused: whether there may be parameters that no rank uses.

        Raises:
            RuntimeError: the plan does not have all parameters of the bucket, or sending has failed, at which DDP would
                not look.
        """
        members = tuple(id(parameter) for parameter in bucket.parameters())
        known = self._known.get(members)
        if known is None or known.is_read:
            known = self._placed(bucket, is_read=False)
        else:
            known.messages.buffer.zero_()
        if may_be_unused:
            self.runtime.unused.add(self._pieces(members, known), sends=True)
        messages = known.messages.now()
        if first:
            self.runtime.begin_step()
        sent = self.runtime.submit(messages, known.messages.buffer)
        self._sent_zeros.append(sent)
        if last:
            self.runtime.release()
            sent_zeros, self._sent_zeros = self._sent_zeros, []
            wait_for(reversed(sent_zeros))
        return sent

    def _pieces(self, members: tuple[int, ...], known: _Bucket, used: Collection[int] = ()) -> dict[str, torch.Tensor]:
        """The pieces of a bucket that belong to units of unused parameters, by the keys of the units."""
        unused = [pair for pair in zip(members, known.starts, strict=True) if pair[0] not in used]
        units = [(unit, start + (unit.start or 0)) for member, start in unused for unit in self._units[member]]
        return {unit.key: known.messages.buffer[start : start + unit.numel] for unit, start in units}

    def prepare(self, other: DdpBuckets) -> None:
        """Build the messages of all buckets that another runtime has got, for the next step."""
        for members, known in other._known.items():
            self._place(members, known.messages.buffer, known.starts, known.is_read).messages.now()

    def clear(self) -> None:
        """Free the messages and their buffers."""
        self._known.clear()

    def _placed(self, bucket: GradBucket, is_read: bool) -> _Bucket:
        parameters = bucket.parameters()
        if unplanned := [each for each in parameters if id(each) not in self._units]:
            names = _names_in(self._model(), unplanned)
            raise UnplannedError(
                f"gckernels: DDP averages {listed(names)}, which the plan does not have, because it was frozen or "
                "replaced after it was wrapped; wrap the module in a new DistributedDataParallel, and attach"
            )
        return self._place(tuple(map(id, parameters)), bucket.buffer(), _starts(bucket), is_read)

    def _place(self, members: tuple[int, ...], buffer: torch.Tensor, starts: tuple[int, ...], is_read: bool) -> _Bucket:
        units = [
            PlacedUnit(unit, start + (unit.start or 0))
            for member, start in zip(members, starts, strict=True)
            for unit in self._units[member]
        ]
        for others in [each for each in self._known if not set(members).isdisjoint(each)]:  # DDP has rebuilt them
            del self._known[others]
        known = self._known[members] = _Bucket(BucketMessages(self.runtime, buffer, units), starts, is_read)
        return known


def _starts(bucket: GradBucket) -> tuple[int, ...]:
    # bucket.gradients() would give wrong offsets: it counts a complex element once, the buffer holds two reals
    numels = [in_reals(parameter).numel() for parameter in bucket.parameters()]
    assert sum(numels) == bucket.buffer().numel()
    return (0, *itertools.accumulate(numels[:-1]))


def listed(names: Sequence[str]) -> str:
    """The names, or the first of many, for an error."""
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _names_in(ddp_model: DistributedDataParallel | None, parameters: Iterable[torch.Tensor]) -> list[str]:
    """The names of parameters in a wrapped module; the shapes of those that are not there any more."""
    module = None if ddp_model is None else ddp_model.module
    names = {} if module is None else {id(each): name for name, each in module.named_parameters()}
    return [names.get(id(each), f"one of shape {tuple(each.shape)}") for each in parameters]
