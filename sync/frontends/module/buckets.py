"""The gradient buckets of a bare module: vectors in which units lie one after the other.

The gradients of the parameters are views of these vectors, so backward accumulates into the buckets and the optimizer
reads the synchronised values there. Each is a tensor of its own: ``Module.to`` and others give a gradient other memory,
and the bucket must keep its own. Units lie in the order in which they are launched, from the last of the plan to the
first. All units that share a parameter are in one bucket.

A frozen parameter is in no bucket, so it takes no memory and is never sent. Its residual stays, in case it is thawed. A
training that freezes parameters in turn, such as those of two networks, finds its buckets and their messages again.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from gckernels.devices import current_stream, is_accelerator

from ...engine.bucket_messages import BucketMessages
from ...engine.runtime import Runtime
from ...plans.buckets import BucketSpec, cut_buckets
from ...plans.checks import fitted_units
from ...plans.grouping import PlacedUnit
from ...plans.strides import in_memory, in_reals
from ..checks.models import refuse_sparse_gradient
from ..members import Members, listed

BROADCAST_NBYTES = 250 * 2**20
"""The largest number of bytes of parameters that are broadcast together when a model is attached."""
_KEPT = 2


@dataclass
class Slot:
    """The gradient of one parameter in a bucket.

    Attributes:
        name: name of the parameter.
        parameter: a weak reference to it, so that an attachment does not keep the model alive.
        view: its gradient, with its shape and dtype, in the bucket's vector.
        reduced: the gradients of those units that are averaged without compression.
        is_reduced: whether these are all units of the parameter.
    """

    name: str
    parameter: weakref.ref[torch.nn.Parameter]
    view: torch.Tensor
    reduced: list[torch.Tensor]
    is_reduced: bool

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient of the parameter; ``None`` if it has none, or no longer exists."""
        parameter = self.parameter()
        return None if parameter is None else parameter.grad

    @grad.setter
    def grad(self, grad: torch.Tensor | None) -> None:
        parameter = self.parameter()
        if parameter is not None:
            parameter.grad = grad

    def hand_out(self) -> None:
        """Let the parameter's gradient lie in the bucket."""
        grad = self.grad
        if grad is None or not self._has(grad):
            self.grad = self.view.detach()

    def copy(self) -> torch.Tensor | None:
        """A copy of the gradient if it lies in the bucket."""
        grad = self.grad
        return grad.clone() if grad is not None and self._has(grad) else None

    def restore(self, copy: torch.Tensor | None) -> None:
        """Let a gradient that lies in the bucket be again what it was."""
        if copy is not None:
            self.view.copy_(copy)

    def _has(self, grad: torch.Tensor) -> bool:
        """Whether a gradient lies in the bucket, whose memory is nobody else's."""
        return grad.data_ptr() == self.view.data_ptr() and grad.stride() == self.view.stride()

    def collect(self, share: float, all_reduced: bool) -> None:
        """Copy the parameter's gradient into the bucket, unless it lies there; without a gradient, write zeros.

        Args:
            share: factor for the units that are averaged without compression, applied while copying where possible.
            all_reduced: whether the factor is for all units, because nothing is compressed in this step.

        Raises:
            RuntimeError: the gradient is sparse, or has another dtype, device or shape than the parameter once had.
        """
        grad, scale_all = self.grad, all_reduced or self.is_reduced
        if grad is None:
            self.view.zero_()
            return
        refuse_sparse_gradient(self.name, grad)
        if self._has(grad):
            self.scale(share, all_reduced)
            return
        self._refuse_converted(grad)
        if scale_all:
            torch.mul(grad, share, out=self.view)
        else:
            self.view.copy_(grad)
            self.scale(share, all_reduced)

    def scale(self, share: float, all_reduced: bool) -> None:
        """Multiply what is averaged without compression by a factor, in the bucket, as :meth:`collect` does."""
        for part in [self.view] if all_reduced or self.is_reduced else self.reduced:
            part.mul_(share)

    def _refuse_converted(self, grad: torch.Tensor) -> None:
        now, before = ((each.dtype, each.device, each.shape) for each in (grad, self.view))
        if now != before:
            given, expected = (f"{dtype} {[*shape]} on {device}" for dtype, device, shape in (now, before))
            raise RuntimeError(
                f"gckernels: the gradient of {self.name} is {given}, and was to be {expected}, as the parameter was "
                "when it was attached; convert the model before"
            )


@dataclass
class Bucket:
    """A vector of gradients.

    Attributes:
        vector: ``[numel]``, real numbers.
        units: the units in it, in order.
        slots: the slots of its parameters, in order.
        expected: the names of the parameters that are trained. Others share a unit with one of these.
        messages: the messages that send it.
        waiting: names of the parameters whose gradients are still missing in this step.
        streams: the streams of a device on which gradients have come in this step.
    """

    vector: torch.Tensor
    units: tuple[PlacedUnit, ...]
    slots: list[Slot]
    expected: frozenset[str]
    messages: BucketMessages
    waiting: set[str] = field(default_factory=set)
    streams: set[torch.Stream] = field(default_factory=set)

    @property
    def frozen(self) -> list[Slot]:
        """The slots of the parameters that are not trained."""
        return [slot for slot in self.slots if slot.name not in self.expected]

    def begin(self) -> None:
        """Wait for the gradients of a step."""
        storage = self.vector.untyped_storage()
        if storage.nbytes() < self.vector.nbytes:  # somebody has freed it by the storage of a gradient
            storage.resize_(self.vector.nbytes)
            self.vector.zero_()
        for slot in self.frozen:
            slot.view.zero_()
        self.waiting = set(self.expected)
        self.streams.clear()

    def take(self, slot: Slot) -> None:
        """Let the parameter's gradient, which has been collected, lie in the bucket."""
        slot.hand_out()
        self.waiting.remove(slot.name)
        if is_accelerator(self.vector.device):
            self.streams.add(current_stream(self.vector.device))

    def other_streams(self) -> set[torch.Stream]:
        """The streams on which gradients have come, but the current one."""
        return self.streams - {current_stream(self.vector.device)} if self.streams else set()


def make_bucket(
    runtime: Runtime,
    spec: BucketSpec,
    parameters: Mapping[str, weakref.ref[torch.nn.Parameter]],
    forms: Mapping[str, torch.Tensor],
    expected: frozenset[str],
) -> Bucket:
    """A new bucket.

    Args:
        runtime: sends it.
        spec: the units in it.
        parameters: the parameters of the plan, by name.
        forms: tensors with the shape and the dtype of each parameter, and strides of its gradient.
        expected: the names of the parameters that are trained.
    """
    dtype = in_reals(forms[spec.units[0].plan.parameter]).dtype
    vector = torch.zeros(spec.numel, dtype=dtype, device=runtime.device)
    slots = []
    for group in spec.groups:
        start = group[0].start
        reduced = [vector[unit.start : unit.stop] for unit in group if unit.plan.in_place]
        for name in group[0].plan.parameters:
            numel = in_reals(forms[name]).numel()
            view = in_memory(vector[start : start + numel], forms[name])
            slots.append(Slot(name, parameters[name], view, reduced, len(reduced) == len(group)))
            start += numel
    messages = BucketMessages(runtime, vector, spec.units, shares=True)
    return Bucket(vector, spec.units, slots, expected, messages)


class Layouts:
    """The buckets of a plan, for sets of trained parameters. The last two are kept, and more of them as long as all
    together take no more than the gradients of all parameters.

    Args:
        runtime: executes the plan.
        members: the parameters. If one is trained that the plan leaves out, it is averaged exactly.
        max_nbytes: the maximum size of a bucket. Only one whose units share a parameter may be larger.
    """

    def __init__(self, runtime: Runtime, members: Members, max_nbytes: float) -> None:
        self._runtime, self._members, self._max_nbytes = runtime, members, max_nbytes
        self._planned = {name for unit in runtime.plan.units for name in unit.parameters}
        self._all_nbytes = sum(in_reals(form).nbytes for form in members.forms.values())
        self._known: dict[frozenset[str], list[Bucket]] = {}  # the last one is the present one

    def of(self, trained: frozenset[str]) -> list[Bucket]:
        """The buckets for a set of trained parameters, in the order in which they are launched."""
        buckets = self._known.pop(trained, None)
        if buckets is None:
            buckets = self._made(trained)
        self._known[trained] = buckets
        while len(self._known) > _KEPT and self._nbytes() > self._all_nbytes:
            del self._known[next(iter(self._known))]
        return buckets

    def close(self) -> None:
        """Free the buckets and their messages."""
        self._known.clear()

    def _made(self, trained: frozenset[str]) -> list[Bucket]:
        members, plan = self._members, self._runtime.plan
        if left_out := trained - self._planned:
            warnings.warn(
                f"gckernels: parameters are trained that the plan leaves out, and are averaged exactly: "
                f"{listed(left_out)}; to compress them, give a plan that has them to change_plan",
                stacklevel=2,
            )
        units = [unit for unit in plan.units if not trained.isdisjoint(unit.parameters)]
        present = trained.union(*(unit.parameters for unit in units))
        forms = {name: form for name, form in members.forms.items() if name in present}
        fitted = plan.with_units(fitted_units(units, forms, plan.span)[0])
        dtypes = {name: form.dtype for name, form in forms.items()}
        before = {(bucket.units, bucket.expected): bucket for buckets in self._known.values() for bucket in buckets}
        buckets = []
        for spec in cut_buckets(fitted, dtypes, self._max_nbytes):
            expected = trained.intersection(name for unit in spec.units for name in unit.plan.parameters)
            bucket = before.get((spec.units, expected))
            buckets.append(bucket or make_bucket(self._runtime, spec, members.references, forms, expected))
        return buckets

    def _nbytes(self) -> int:
        found = {id(bucket): bucket.vector.nbytes for buckets in self._known.values() for bucket in buckets}
        return sum(found.values())
