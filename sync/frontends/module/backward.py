"""Backward passes of a bare module: gradients arrive, complete buckets are launched, the end waits for the means."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection

import torch
import torch.distributed as dist
from torch.autograd import Variable

from ...communication.agreement import named
from ...engine.failures import Outcome, wait_for
from ...engine.runtime import Runtime
from ..frontend import Before
from ..members import Members, listed
from ..ownership import refuse_wrapped
from .buckets import Bucket, Layouts, Slot

_HAS_GRAPH = (
    "gckernels: backward(create_graph=True) averages gradients, as under DDP, but not their derivatives: averaged "
    "gradients have no graph. Use torch.autograd.grad(..., create_graph=True), and backward for the loss made of it"
)


class Backward:
    """Collects the gradients of each backward pass into buckets, and launches these in an order that is the same on all
    ranks and in all steps.

    Args:
        runtime: executes the plan.
        members: the parameters of the model.
        layouts: the buckets of the plan.
        find_unused: gradients may be missing when backward ends.
        ended: called at the end of each backward that synchronises, when gradients have been averaged.

    Attributes:
        runtime: as given.
        buckets: the buckets for the parameters that were trained last, in the order in which they are launched.
        accumulates_only: gradients are only accumulated for now, and synchronised in a later backward.
        before_late: called when backward has ended, before buckets are launched, which then are not launched earlier;
            ``None`` to launch them as soon as they are complete.
    """

    def __init__(
        self, runtime: Runtime, members: Members, layouts: Layouts, find_unused: bool, ended: Callable[[], None]
    ) -> None:
        self.accumulates_only = False
        self.before_late: Before | None = None
        self.runtime, self._members, self._layouts, self._find_unused = runtime, members, layouts, find_unused
        self._ended = ended
        self._trained: frozenset[str] | None = None
        self.buckets: list[Bucket] = []
        self._slots: dict[str, tuple[Bucket, Slot]] = {}
        self._parameters_of: dict[str, tuple[str, ...]] = {}  # by the key of the unit
        self._active: list[Bucket] = []  # the buckets of this step
        self._futures: list[torch.futures.Future[Outcome]] = []  # one for each active bucket that has been launched
        self._unused: set[str] = set()  # parameters of the active buckets without a gradient in this step
        self._accumulated: set[str] = set()  # parameters with gradients from passes that only accumulated
        self._has_begun = False
        self._lay_out()

    @property
    def nbytes(self) -> int:
        """The bytes of the gradients that are averaged."""
        return sum(bucket.vector.nbytes for bucket in self.buckets)

    def on_gradient(self, name: str) -> None:
        """Take the gradient of a parameter, which has just been accumulated.

        Raises:
            RuntimeError: the gradient cannot be synchronised, or something failed before.
        """
        if self.accumulates_only:
            self._accumulated.add(name)
        elif torch.is_grad_enabled():
            warnings.warn(_HAS_GRAPH, stacklevel=2)
            with torch.no_grad():
                self._take(name)
        else:
            self._take(name)

    def _take(self, name: str) -> None:
        if (problem := self.runtime.problem) is not None:
            raise problem
        if not self._active:
            self._begin()
        bucket, slot = self._slots.get(name, (None, None))
        if bucket is None or slot is None or name not in bucket.waiting:
            error = self._unexpected_error(name)
            self._abandon()
            raise error
        try:
            self._collect(slot)
        except RuntimeError:
            self._abandon()
            raise
        slot.hand_out()
        bucket.waiting.remove(name)
        if self.before_late is None:
            self._launch()
        if not self._find_unused and not any(each.waiting for each in self._active):
            Variable._execution_engine.queue_callback(self._finish_step)  # when backward ends

    def follow(self, other: Backward) -> None:
        """Continue between two steps where another one ends."""
        self.accumulates_only, self._has_begun = other.accumulates_only, other._has_begun
        self._accumulated = other._accumulated

    def prepare(self) -> None:
        """Build the messages of the next step."""
        self._lay_out()
        for bucket in self.buckets:
            bucket.messages.now()

    def close(self) -> None:
        """Free the buckets and their messages."""
        self._layouts.close()
        self._trained, self.buckets, self._slots = None, [], {}

    # ---------------------------------------------------------------- one step

    def _begin(self) -> None:
        """Begin a step, at its first gradient."""
        if not self._has_begun:
            refuse_wrapped("attach", self._members.registered())  # the model may have been since
            self._has_begun = True
        self._lay_out()
        for bucket in self.buckets:
            bucket.begin()
        self._active = self.buckets
        self._unused = {slot.name for bucket in self.buckets for slot in bucket.frozen}
        self.runtime.unused.begin()
        if self._find_unused:
            Variable._execution_engine.queue_callback(self._finish_with_unused)

    def _lay_out(self) -> None:
        """Take the buckets for the parameters that are trained now.

        Raises:
            RuntimeError: there are others than the attachment knows.
        """
        trained = self._members.trained()
        if trained is not self._trained:
            self.buckets, self._trained = self._layouts.of(trained), trained
            self._slots = {slot.name: (bucket, slot) for bucket in self.buckets for slot in bucket.slots}
            units = (unit.plan for bucket in self.buckets for unit in bucket.units)
            self._parameters_of = {unit.key: unit.parameters for unit in units}

    def _collect(self, slot: Slot) -> None:
        slot.collect(self.runtime.share, all_reduced=self.runtime.is_exact)

    def _launch_rest(self) -> None:
        """Launch what has not been launched, when backward has ended."""
        try:
            if self.before_late is not None:
                slots = [[slot.parameter() for slot in bucket.slots] for bucket in self._active]
                self.before_late([[each for each in bucket if each is not None] for bucket in slots])
        finally:  # the other ranks wait
            self._launch()

    def _launch(self) -> None:
        """Launch the buckets that are complete, up to the first that is not."""
        while len(self._futures) < len(self._active) and not self._active[len(self._futures)].waiting:
            bucket = self._active[len(self._futures)]
            plans = (unit.plan for unit in bucket.units)
            self.runtime.unused.add(plan.key for plan in plans if self._unused.issuperset(plan.parameters))
            messages = bucket.messages.now()
            if not self._futures:
                self.runtime.begin_step()
            self._futures.append(self.runtime.submit(messages, bucket.vector))
            if len(self._futures) == len(self._active):
                self.runtime.end_step()

    @torch.no_grad()
    def _finish_step(self) -> None:
        self._launch_rest()
        self._finish()
        self._restore({name for name in self._slots if name not in self._unused})
        self._ended()

    def _finish(self) -> None:
        """Wait for all launched buckets; on a device, let its current stream wait."""
        futures, self._futures, self._active = self._futures, [], []
        self._accumulated.clear()
        wait_for(futures)

    def _abandon(self) -> None:
        """Let the next gradient begin a new step."""
        self._futures, self._active = [], []

    def _unexpected_error(self, name: str) -> RuntimeError:
        missing = {name for bucket in self._active for name in bucket.waiting}
        if self._trained is None or name not in self._trained:
            return RuntimeError(
                f"gckernels: the gradient of {name} came, which is frozen or no longer in the model; freeze parameters "
                "before the forward of a step, or after its backward"
            )
        if not missing:
            return RuntimeError(f"gckernels: the gradient of {name} came again after it had been synchronised")
        return RuntimeError(
            f"gckernels: the gradient of {name} came twice in a step in which none came for {listed(missing)}; pass "
            "find_unused_parameters=True if parameters can be unused"
        )

    # ---------------------------------------------------------------- unused parameters

    @torch.no_grad()
    def _finish_with_unused(self) -> None:
        """End backward: missing gradients count as zero, and parameters that no rank has used are left alone."""
        slots = [slot for bucket in self._active for slot in bucket.slots if slot.name in bucket.expected]
        missing = {name for bucket in self._active for name in bucket.waiting}
        used = [slot.name not in missing or slot.name in self._accumulated for slot in slots]
        before = {slot.name: slot.take_out() for slot, is_used in zip(slots, used, strict=True) if not is_used}
        self._unused.update(before)
        for slot in slots:
            if slot.name in missing:
                self._collect(slot)
        for bucket in self._active:
            bucket.waiting.clear()
        self._launch_rest()
        self._finish()
        used_by_any = self._used_by_any(used)
        for slot, is_used in zip(slots, used_by_any, strict=True):
            if is_used:
                slot.hand_out()
            else:
                slot.grad = before.get(slot.name, slot.grad)
        self._restore({slot.name for slot, is_used in zip(slots, used_by_any, strict=True) if is_used})
        self._ended()

    def _restore(self, used: Collection[str]) -> None:
        """Undo the step for the residuals of units of which no rank has used a parameter."""
        self.runtime.unused.restore(lambda key: any(name in used for name in self._parameters_of[key]))

    def _used_by_any(self, used: list[bool]) -> list[bool]:
        """Which slots any rank has used, given those that this rank has ``used``.

        The host waits for a device only if this rank has not used all of them. Everything else of the step has been
        enqueued before, so all ranks issue their collectives in the same order.
        """
        on_cuda = self.runtime.device.type == "cuda"
        mine = torch.tensor(used, dtype=torch.int32, device="cpu", pin_memory=on_cuda)
        everywhere = mine.to(self.runtime.device, non_blocking=True)
        with named(self.runtime.group, "the comparison of unused parameters", step=self.runtime.step - 1):
            dist.all_reduce(everywhere, op=dist.ReduceOp.MAX, group=self.runtime.group)
        return used if all(used) else [bool(flag) for flag in everywhere.tolist()]
