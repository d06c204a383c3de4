"""Methods shared by attachments and synchronizers, for figures and checkpoints; their runtime answers."""

from __future__ import annotations

import contextlib
import os
import warnings
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch.utils.hooks import RemovableHandle

from ..communication.agreement import agreed
from ..engine.runtime import Runtime
from ..plans.names import summary_of
from ..plans.plan import Attached
from ..resources.error_probe import ProbeSchedule
from ..states.dcp_guard import refuse_to_be_deeper
from ..states.jobs import Job
from ..stats.history import Journal
from ..stats.stats import Figures
from .checks.caller_modes import outside_inference_mode
from .checks.gradient_use import GradientUse
from .checks.optimizer_checks import residual_parameters, watch_optimizers
from .parking import Parking

if TYPE_CHECKING:
    from torch.distributed.checkpoint.storage import StorageReader

    from .checkpoint import Checkpoint


Before = Callable[[Sequence[Sequence[torch.Tensor]]], None]
"""A function that is called before gradients are averaged, with the parameters of every bucket of them."""


class Handle(Parking, Figures):
    """Methods shared by ``Attachment`` and ``Synchronizer``: figures, residuals, checkpoints, changes of the plan, ends
    of steps.

    Attributes:
        attached: which of the two it is.
        plan: the plan that runs now.
    """

    attached: ClassVar[Attached]
    _parameters: dict[str, weakref.ref[torch.nn.Parameter]]
    _listeners: tuple[Callable[[], None], ...] = ()
    _watches: Sequence[RemovableHandle] = ()  # these look at optimizers
    _use: GradientUse | None = None
    _has_dropped = False  # a discarded step has dropped residuals
    _adopts_plans = False
    """Whether the plan of a saved job runs when that is loaded; then loading is collective."""

    __create_write_items__ = refuse_to_be_deeper

    @abstractmethod
    def close(self) -> None:
        """End the synchronisation, and release what belongs to it. Every rank calls it, between the same two steps."""

    @abstractmethod
    def launch_late(self, before: Before | None) -> None:
        """Send gradients when backward has ended, so that nothing is sent beside it, from the next step on; without
        ``before`` do so no longer. The plan that runs compresses nothing.

        Args:
            before: called before gradients are averaged.
        """

    @property
    def _is_spent(self) -> bool:
        """Whether another one may take its place, because ``destroy_process_group`` has ended its process group, or,
        for a synchronizer, the model has other parameters now. Then a new one closes this one, which nobody may have
        kept."""
        try:
            dist.get_rank(self.group)
        except (RuntimeError, ValueError):
            return True
        return False

    # ---------------------------------------------------------------- what is synchronised, and when

    @property
    def group(self) -> dist.ProcessGroup:
        """All ranks that average their gradients."""
        return self._runtime.group

    @property
    def device(self) -> torch.device:
        """The device of the gradients."""
        return self._runtime.device

    @property
    def residual_watch(self) -> ProbeSchedule:
        """Takes norms of gradients and residuals of this rank, in the steps for which it is asked."""
        return self._runtime.watch

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """The parameters whose gradients are averaged, by their plain names in the module."""
        existing = {name: reference() for name, reference in self._parameters.items()}
        return {name: parameter for name, parameter in existing.items() if parameter is not None}

    def on_step_end(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` on every rank at the end of each synchronising backward, when gradients have been averaged.

        It is not called for backwards that only accumulate gradients, nor for evaluations. As all ranks call it at the
        same point, it may use collectives, but not in DDP's ``join()``. Backward raises an exception that it raises.
        Listeners are called in the order in which they were given.
        """
        self._listeners = (*self._listeners, listener)
        self._follow_steps()

    def ignore_step_end(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` no more; without effect if it is not called."""
        self._listeners = tuple(each for each in self._listeners if each != listener)
        self._follow_steps()

    def _follow_steps(self) -> None:
        """Begin or end to watch the steps of the training, as there are listeners or not."""

    def _end_step(self) -> None:
        """Note the end of a step, continue a change of the plan, and tell the listeners. All ranks are here
        together."""
        self._on_step_end()
        if self._use is not None and self._runtime.changed_residuals:
            self._use.synchronised()
        self._continue_change()
        for listener in self._listeners:
            listener()

    # ---------------------------------------------------------------- optimizers

    def _watch_optimizers(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Watch optimizers for the mistakes that the plan makes possible, in place of those of an earlier plan.

        Args:
            parameters: the parameters of the plan, by name.
        """
        self._ignore_optimizers()
        scaler = self._request.enabled_scaler
        with_residuals = residual_parameters(self.plan, parameters)
        self._watches = watch_optimizers(self.plan, parameters, scaler)
        if scaler is None and with_residuals:
            self._use = GradientUse(with_residuals)

    def _ignore_optimizers(self) -> None:
        for watch in self._watches:
            watch.remove()
        if self._use is not None:
            self._use.remove()
        self._watches, self._use = (), None

    # ---------------------------------------------------------------- gradients that are not used

    @outside_inference_mode
    def discard_step(self) -> None:
        """Let the last synchronised backward not count, because no optimizer will use its gradients. Every rank calls
        it, between that backward and the next one.

        Residuals become what they were before that backward, bit for bit, if there is a copy: with ``can_discard=True``
        or a gradient scaler. Otherwise they are dropped, with what earlier steps have not sent yet, and the first call
        warns of it. A step without compression leaves nothing behind, and may be discarded, too.

        Raises:
            RuntimeError: it is closed, or something failed before, or a rank has done other steps. Every rank raises.
        """

        def check() -> tuple[Runtime, list[str]]:
            if not self._is_open:
                raise RuntimeError("discard_step: it is closed")
            if (problem := self._runtime.problem) is not None:
                raise problem
            return self._runtime, [f"step {self._runtime.step}"]

        runtime = agreed("discard_step", self.group, self.device, check)
        if self._use is not None:
            self._use.forget()
        is_lost = [runtime.discard_step(), self._parked is not None and self._parked.discard_step()]
        if any(is_lost) and not self._has_dropped:
            self._has_dropped = True
            warnings.warn(
                "gckernels: discard_step has dropped the residuals, because there is no copy of them from before the "
                "step; with can_discard=True in gckernels.sync.attach or Synchronizer they become what they were",
                stacklevel=2,
            )

    @contextlib.contextmanager
    def exact(self) -> Iterator[None]:
        """A context whose backwards average gradients without compression and leave residuals alone. It is for
        gradients that are averaged, and then not used by an optimizer. Every rank has it around the same backwards."""
        before, self._runtime.averages_only = self._runtime.averages_only, True
        try:
            yield
        finally:
            self._runtime.averages_only = before

    # ---------------------------------------------------------------- figures and states

    def _running(self) -> str:
        if self._following is None:
            return super()._running()
        before, after = (summary_of(plan, self._runtime.world_size) for plan in (self.plan, self._following.plan))
        return f"exact steps, from {before} to {after}"

    def sent_nbytes_per_step(self) -> float:
        """The mean number of bytes that this rank has sent per compressed step of the plan; 0 before the first.

        For an attachment whose plan compresses nothing, these are the bytes of a step of DDP.
        """
        return self._runtime.sent_nbytes_per_step()

    def residual_nbytes(self) -> int:
        """The bytes that residuals, the factors of low-rank methods, and their copies for a gradient scaler take on
        this rank."""
        return self._runtime.residual_nbytes() + (0 if self._parked is None else self._parked.nbytes())

    def state_dict(self) -> dict[str, Any]:
        """The state of this rank, with which a resumed job continues bit for bit: tensors, ints, texts, and the plan as
        JSON. Every rank saves its own. ``torch.distributed.checkpoint`` refuses it, and takes the result of
        :meth:`checkpoint`.

        Decisions and samples are in it, and so is the progress of a tuning. A resumed job goes on with the plan that
        was found, and its reports show the whole run.

        ``step`` counts the synchronised steps; an attachment whose plan compresses nothing leaves them to DDP, and
        counts none unless it has listeners (:meth:`on_step_end`). While a plan is changing, this is the state of the
        one that runs; a job that resumes with that plan can change it again.
        """
        parked = {} if self._parked is None else self._parked.state_dict()
        return self._runtime.state_dict() | ({"parked": parked} if parked else {}) | self._notes()

    def checkpoint(
        self, reads: str | os.PathLike[str] | StorageReader | None = None, key: str | None = None
    ) -> Checkpoint:
        """An object that ``torch.distributed.checkpoint`` (DCP) saves and loads for all ranks together::

            dcp.save({"model": ..., "gckernels": attachment.checkpoint()}, checkpoint_id=path)
            dcp.load({"model": ..., "gckernels": attachment.checkpoint(reads=path)}, checkpoint_id=path)

        The job that loads may have another number of ranks, and other programs, as with a list of all states.

        Args:
            reads: the path of the checkpoint that will be loaded, or a ``StorageReader`` for it. DCP loads into
                existing tensors, whose shapes depend on the checkpoint. Once loaded, the object can be saved.
            key: the key under which it was saved in that checkpoint; needed if there are several.

        Raises:
            TypeError: an argument has another type.
        """
        from .checkpoint import Checkpoint  # late, because importing DTensor takes half a second

        return Checkpoint(self, reads, key)

    @outside_inference_mode
    def load_state_dict(self, state: dict[str, Any] | list[dict[str, Any]] | tuple[dict[str, Any], ...]) -> None:
        """Continue from the state of the same rank of an equally large job, or from the list of the states of all ranks
        of a job of any size. With a list, all ranks pass the same one and take their part of it.

        Steps, samples and decisions go on, too, and replace those of this object. In a list they are those of its
        first rank. Without a plan of its own, the plan of the saved job runs; then every rank calls it together.

        Raises:
            ValueError: the state is from another rank or world size, from a plan with other units or compressors, or
                damaged; or the list does not have all states of one job. Nothing has been changed.
        """
        if not self._adopts_plans:
            job = self._runtime.read(state)
            take_notes = self._read_notes(job)
        else:

            def check() -> tuple[tuple[Job, Callable[[], None]], list[str]]:
                job = self._runtime.read(state)
                return (job, self._read_notes(job)), [f"step {job.step}", *job.plan.lines()]

            job, take_notes = agreed("load_state_dict", self.group, self.device, check)
            self._adopt(job.plan)
        self._runtime.take_over(job)
        take_notes()

    def _notes(self) -> dict[str, str]:
        """The texts of a checkpoint, beside what the runtime keeps."""
        return {"journal": self._journal.to_text()}

    def _read_notes(self, job: Job) -> Callable[[], None]:
        """A function that continues from the texts of a saved job, and from what it has parked, after its plan and its
        residuals.

        Raises:
            ValueError: a text is damaged, or something is parked of no parameter.
        """
        take_parked = self._read_parked(job)
        text = job.notes.get("journal")
        journal = self._journal if text is None else Journal.from_text(text)

        def take() -> None:
            self._journal = journal
            take_parked()

        return take
