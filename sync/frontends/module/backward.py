"""Backward passes of a bare module: gradients arrive, complete buckets are launched, the end waits for the means."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from typing import NoReturn

import torch
import torch.distributed as dist

from gckernels.devices import is_accelerator

from ...communication.agreement import named
from ...engine.failures import Outcome, wait_for
from ...engine.runtime import Runtime
from ..abilities import Before
from ..checks.hooks import weakly
from ..members import Members, listed
from ..ownership import refuse_wrapped
from .buckets import Bucket, Layouts, Slot
from .passes import NO_TASK, Passes

_AGAIN = "close() the attachment and attach again on all ranks"
_FAILED = (
    "gckernels: a backward has failed after gradients had come ({}), and other ranks may have sent others; "
    f"{_AGAIN}, or end the training"
)
_HAS_GRAPH = (
    "gckernels: backward(create_graph=True) averages gradients, as under DDP, but not their derivatives: averaged "
    "gradients have no graph. Use torch.autograd.grad(..., create_graph=True), and backward for the loss made of it"
)


class Backward:
    """Collects the gradients of each backward pass into buckets, and launches these in an order that is the same on all
    ranks and in all steps. A step ends with the outermost backward in which the last of its gradients has come.

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
        self._thawed: frozenset[str] = frozenset()  # parameters that were trained in these
        self._kept: frozenset[str] = frozenset()  # frozen ones of them, which are averaged in this step
        self._task = NO_TASK  # the last of these passes
        self._passes = Passes(weakly(self._end_pass))
        self._collected: list[Slot] = []  # slots of active buckets, which hold this rank's part of the mean
        self._failure = ""  # the reason why nothing can be averaged any more
        self._refused = ""  # the reason why the last backward was refused; the next one may go on
        self._has_begun = False
        self._lay_out()

    @property
    def nbytes(self) -> int:
        """The bytes of the gradients that are averaged."""
        return sum(bucket.vector.nbytes for bucket in self.buckets)

    def on_gradient(self, name: str) -> None:
        """Take the gradient of a parameter, to which a backward has come.

        Raises:
            RuntimeError: the gradient cannot be synchronised, or something failed before.
        """
        self._refuse_failed()
        self._refused = ""
        if self.accumulates_only:
            self._note(name)
        elif torch.is_grad_enabled():
            warnings.warn(_HAS_GRAPH, stacklevel=2)
            with torch.no_grad():
                self._take(name)
        else:
            self._take(name)

    def _note(self, name: str) -> None:
        """Note a gradient that a later backward averages."""
        if (parameter := self._members.references[name]()) is not None and parameter.grad is not None:
            self._accumulated.add(name)
        if (task := torch._C._current_graph_task_id()) != self._task:
            self._task = task
            self._thawed |= self._members.trained()

    def _take(self, name: str) -> None:
        if (problem := self.runtime.problem) is not None:
            raise problem
        if self._passes.see():
            self._fail(_FAILED.format(listed(self._arrived)))
        if not self._active:
            self._begin()
        bucket, slot = self._slots.get(name, (None, None))
        if bucket is None or slot is None or name not in bucket.waiting:
            self._refuse(self._unexpected(name), {name})
        elif slot.grad is not None or not self._find_unused:  # a function may give none
            self._collect(slot)
            bucket.take(slot)
            if self.before_late is None:
                self._launch()

    def refuse_local(self, optimizer: torch.optim.Optimizer) -> None:
        """Look for gradients that an optimizer would use although they have not been averaged, because a backward has
        failed, or has left out some.

        Raises:
            RuntimeError: there are such gradients.
        """
        if not (self._active or self._failure or self._refused) or torch._C._current_graph_task_id() != NO_TASK:
            return
        names = self._arrived if self._active else self._members.references
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        local = [self._members.references[name]() for name in names]
        if any(id(parameter) in stepped and parameter.grad is not None for parameter in local if parameter is not None):
            self._refuse_failed()
            if self._refused:
                raise RuntimeError(self._refused)
            if self._passes.have_failed:
                self._fail(_FAILED.format(listed(names)))
            missing = {name for bucket in self._active for name in bucket.waiting}
            self._refuse(_unfinished(names, missing))

    def follow(self, other: Backward) -> None:
        """Continue between two steps where another one ends."""
        self.accumulates_only, self._has_begun = other.accumulates_only, other._has_begun
        self._failure, self._refused = other._failure, other._refused
        self._accumulated, self._thawed = other._accumulated, other._thawed

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
        self._active, self._collected = self.buckets, []
        self._unused = {slot.name for bucket in self.buckets for slot in bucket.frozen}
        self.runtime.unused.begin()

    def _lay_out(self) -> None:
        """Take the buckets for the parameters that are trained now, and those that have been frozen since their
        gradients were accumulated.

        Raises:
            RuntimeError: there are others than the attachment knows.
        """
        trained = self._members.trained()
        self._kept = self._frozen_since(trained)
        if self._kept:
            trained |= self._kept
        if trained is not self._trained and trained != self._trained:
            self.buckets, self._trained = self._layouts.of(trained), trained
            self._slots = {slot.name: (bucket, slot) for bucket in self.buckets for slot in bucket.slots}
            units = (unit.plan for bucket in self.buckets for unit in bucket.units)
            self._parameters_of = {unit.key: unit.parameters for unit in units}

    def _frozen_since(self, trained: frozenset[str]) -> frozenset[str]:
        """The parameters that were trained in passes that only accumulated, and are frozen now. Parameters of which no
        rank has a gradient are among them only if ranks can ask each other."""
        if self._thawed <= trained:
            return frozenset()
        known = self._members.registered()
        frozen = {name for name in self._thawed - trained if name in known}
        return frozenset(name for name in frozen if self._find_unused or known[name].grad is not None)

    def _collect(self, slot: Slot) -> None:
        try:
            slot.collect(self.runtime.share, all_reduced=self.runtime.is_exact)
        except RuntimeError as error:
            self._refuse(str(error), {slot.name})
        self._collected.append(slot)

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
            self._futures.append(self.runtime.submit(messages, bucket.vector, bucket.other_streams()))
            if len(self._futures) == len(self._active):
                self.runtime.end_step()

    @torch.no_grad()
    def _end_pass(self) -> None:
        """End the step, unless gradients are still to come in another backward. Gradients that are there of
        parameters unused in this backward are averaged, too, but one that no rank has used stays as it was."""
        if self._passes.have_failed:
            self._fail(_FAILED.format(listed(self._arrived)))
        missing = {name for bucket in self._active for name in bucket.waiting}
        if not self._active or not (self._find_unused or missing <= self._kept):
            return
        slots = [slot for bucket in self._active for slot in bucket.slots if slot.name in bucket.expected]
        used = [self._is_used(slot, missing) for slot in slots]
        unused = {slot.name for slot, is_used in zip(slots, used, strict=True) if not is_used}
        self._unused |= unused
        before = {slot.name: slot.copy() for slot in slots if slot.name in unused}
        for slot in slots:
            if slot.name in missing:
                self._collect(slot)
        for bucket in self._active:
            bucket.waiting.clear()
        self._launch_rest()
        self._finish()
        if self._find_unused:
            everywhere = zip(slots, self._used_by_any(used), strict=True)
            unused = {slot.name for slot, is_used in everywhere if not is_used}
        for slot in slots:
            if slot.name in unused:
                slot.restore(before[slot.name])
            elif slot.name in missing:
                slot.hand_out()
        self._restore({slot.name for slot in slots} - unused)
        self._ended()

    def _is_used(self, slot: Slot, missing: Collection[str]) -> bool:
        """Whether this rank has used a parameter since the last step, and its gradient is there."""
        return slot.name not in missing or (slot.name in self._accumulated and slot.grad is not None)

    def _finish(self) -> None:
        """Wait for all launched buckets; on a device, let its current stream wait."""
        futures = self._futures
        self._futures, self._active, self._collected = [], [], []
        self._accumulated.clear()
        self._thawed = frozenset()
        wait_for(futures)

    @property
    def _arrived(self) -> set[str]:
        """The parameters whose gradients have come in this step."""
        return {name for bucket in self._active for name in bucket.expected - bucket.waiting}

    def _refuse_failed(self) -> None:
        if self._failure:
            raise RuntimeError(self._failure)

    def _refuse(self, refused: str, names: Collection[str] = ()) -> NoReturn:
        """Raise because of what the user has done, and can correct. If this rank has launched nothing, the pass counts
        as one that only accumulated, so that the next one averages what is still there. Else it is a failure.

        Args:
            refused: the error.
            names: parameters with a gradient that has not been collected.
        """
        if self._futures:
            self._fail(f"{refused}; then {_AGAIN}, as gradients of this step have been sent")
        for slot in self._collected:
            slot.scale(1 / self.runtime.share, self.runtime.is_exact)
        arrived = self._arrived.union(names)
        self._accumulated |= arrived
        self._thawed |= arrived
        self._refused = refused
        self._abandon()
        raise RuntimeError(refused)

    def _fail(self, failure: str) -> NoReturn:
        """Raise, now and from then on: other ranks may have launched other buckets."""
        self._failure = failure
        self._abandon()
        raise RuntimeError(failure)

    def _abandon(self) -> None:
        """End the step without its means."""
        self._futures, self._active, self._collected = [], [], []
        self._passes.forget()

    def _unexpected(self, name: str) -> str:
        missing = {name for bucket in self._active for name in bucket.waiting}
        if self._trained is None or name not in self._trained:
            return (
                f"gckernels: the gradient of {name} came, which is frozen or no longer in the model; freeze parameters "
                "before the forward of a step, or after its backward"
            )
        if self._find_unused or not missing:
            return (
                f"gckernels: the gradient of {name} came again after it had been synchronised; if reentrant "
                "checkpoints share it, let them have use_reentrant=False"
            )
        return (
            f"gckernels: the gradient of {name} came twice in a step in which none came for {listed(missing)}; pass "
            "find_unused_parameters=True if parameters can be unused"
        )

    def _restore(self, used: Collection[str]) -> None:
        """Undo the step for the residuals of units of which no rank has used a parameter."""
        self.runtime.unused.restore(lambda key: any(name in used for name in self._parameters_of[key]))

    def _used_by_any(self, used: list[bool]) -> list[bool]:
        """Which slots any rank has used, given those that this rank has ``used``.

        The host waits for a device only if this rank has not used all of them. Everything else of the step has been
        enqueued before, so all ranks issue their collectives in the same order.
        """
        pinned = is_accelerator(self.runtime.device)
        mine = torch.tensor(used, dtype=torch.int32, device="cpu", pin_memory=pinned)
        everywhere = mine.to(self.runtime.device, non_blocking=True)
        with named(self.runtime.group, "the comparison of unused parameters", step=self.runtime.step - 1):
            dist.all_reduce(everywhere, op=dist.ReduceOp.MAX, group=self.runtime.group)
        return used if all(used) else [bool(flag) for flag in everywhere.tolist()]


def _unfinished(arrived: Collection[str], missing: Collection[str]) -> str:
    return (
        f"gckernels: an optimizer would use gradients that are not averaged yet ({listed(arrived)}), because none came "
        f"for {listed(missing)}; pass find_unused_parameters=True if parameters can be unused"
    )
