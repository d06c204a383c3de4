"""The attachment of a model, as users have it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..engine.recorded_step import RecordedStep
from ..frontends.changes import PlanChanges
from ..frontends.checks.caller_modes import outside_inference_mode
from ..frontends.frontend import FrontendCalls, ModelFrontend
from ..frontends.listeners import Listeners
from ..frontends.parking import Parking
from ..frontends.request import Request
from ..plans.json_files import write_whole
from ..plans.plan import Plan
from ..states.dcp_guard import refuse_to_be_deeper
from ..stats.decisions import Decision
from ..stats.history import Sample
from ..stats.stats import Figures
from ..tuning.auto import Auto

if TYPE_CHECKING:
    from torch.distributed.checkpoint.storage import StorageReader

    from ..tuning.tuning import Tuning
    from .checkpoint import Checkpoint
    from .saving import SavedTraining


class Attachment:
    """The synchronisation of one model, which :func:`~gckernels.sync.attach` has begun.

    The model keeps it, and it ends when the model is gone.
    """

    def __init__(self, frontend: ModelFrontend, request: Request) -> None:
        self._frontend, self._figures = frontend, Figures(frontend)
        self._listeners = Listeners(frontend.follow_steps)
        self._parking = Parking(frontend, request, self._listeners)
        self._changes = PlanChanges(frontend, self._parking)
        self._tuning: Tuning | None = None
        self._listeners.parts = (self._figures.end_step, self._changes.end_step)
        try:
            calls = FrontendCalls(self._listeners.end_step, self._meet_uneven_steps, self._parking.deliver, self.close)
            frontend.open(calls)
        except BaseException:  # DDP has reasons that no check knows
            self.close()
            raise

    def _tune(self, model: torch.nn.Module, auto: Auto, start_step: int) -> None:
        """Find plans while the model is trained. If that cannot begin, close the attachment and raise."""
        parts = (self._frontend, self._changes, self._figures, self._listeners)
        try:
            from ..tuning import tuning

            self._tuning = tuning.Tuning(*parts, model, auto, start_step)
        except BaseException:
            self.close()
            raise

    __create_write_items__ = refuse_to_be_deeper

    def close(self) -> None:
        """End the synchronisation, and release what belongs to it. Every rank calls it, between the same two steps.

        A DDP model averages its gradients as before, with the buckets that it has; gradients of a bare module are local
        from then on. A later :func:`~gckernels.sync.attach` takes the model again. In DDP's ``join()`` the model keeps
        a hook, which averages as DDP does; so it does if a release of torch lacks a private function of DDP that torch
        2.11 to 2.15 have.
        """
        if self._tuning is not None:
            self._tuning.close()
        self._changes.close()
        self._frontend.close()
        self._parking.close()
        self._listeners.clear()

    def _meet_uneven_steps(self, may_abandon: bool) -> None:
        if self._tuning is not None:
            self._tuning.meet_uneven_steps(may_abandon)

    # ---------------------------------------------------------------- the plan

    @property
    def plan(self) -> Plan:
        """The plan that runs now."""
        return self._changes.plan

    @property
    def is_changing(self) -> bool:
        """Whether another plan follows as soon as everything has been sent that the residuals of this one hold."""
        return self._changes.following is not None

    @outside_inference_mode
    def change_plan(self, plan: Plan) -> None:
        """Let another plan follow, with nothing lost. Every rank calls it with the same plan, between the same two
        steps.

        The next step is exact, and also sends what residuals hold; then the new plan runs. With a gradient scaler there
        are two such steps, and more while the scaler skips them. There are up to 10 while parameters with residuals are
        not used; what these hold then, and what frozen ones hold, is added to their next gradient, whatever the plan.
        If nothing is unsent, the new plan runs at once. Meanwhile :attr:`is_changing` is true, ``plan`` is the old
        plan, and so is that of checkpoints. The plan takes the settings with which the attachment was made, such as
        ``strict`` and ``start_step``.

        Units with the same compressor and program in both plans keep their momenta and low-rank factors; all others
        begin anew. A second call before the change is complete
        replaces the plan that follows; with the plan that runs it ends the change. If plans are found while the model
        is trained, that ends too, and the plan that was given stays.

        Raises:
            TypeError, ValueError, PlanError: the plan is not valid on this rank. Nothing has been changed.
            RuntimeError: the plan is not valid on another rank, or not the same on all of them, or a rank cannot build
                what it needs, or something failed before. Every rank raises.
        """
        agreed_plan = self._changes.agreed(plan)
        if self._tuning is not None:
            self._tuning.give(agreed_plan)
        self._changes.follow(agreed_plan)

    @outside_inference_mode
    def regroup(self, ranks: Sequence[int] | None) -> None:
        """Average updates over other ranks from the next round on. All of them call it, between two rounds. It is for
        attachments with :class:`~gckernels.sync.Updates`.

        A rank that leaves the others calls it with ``None``, and goes on alone, while they go on without it. When it
        comes back, it takes the parameters that the others share, and its next update has what it did alone.
        Residuals are sent with the next update as well, so nothing is lost::

            attachment.regroup(None if rank == 2 else [0, 1])  # rank 2 leaves
            ...
            attachment.regroup([0, 1, 2])  # and comes back

        If a rank is lost in a round, the step that ends the round raises on the others. They call this with the ranks
        that are left, and the next round sends that update again. Residuals of earlier rounds are dropped then. A rank
        that is new begins with an attachment over a group of itself alone, and calls this before its first step.

        Programs of the plan become those for the new number of ranks. If a plan was being found, the one that runs
        stays.

        Args:
            ranks: the ranks of the default group that average their updates from now on, with this one; ``None`` if
                this rank averages with none of them.

        Raises:
            ValueError: this rank is not among them, or one of them is no rank of the job. Nothing has been changed.
            RuntimeError: a rank is in the middle of a round, or some have averaged with others in the meantime. It is
                raised on all ranks.
        """
        if (elastic := self._frontend.elastic) is None:
            raise RuntimeError("regroup: needs an attachment with sync.Updates; this one averages gradients")
        if self._tuning is not None:
            self._tuning.close()
        self._changes.abandon()
        elastic.regroup(ranks, self._parking.park)

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """The parameters whose gradients are averaged, by their plain names in the module."""
        return self._frontend.parameters()

    def shared(self) -> contextlib.AbstractContextManager[None]:
        """A context in which all ranks have the same model, to evaluate it or to save it::

            with attachment.shared():
                loss = evaluate(model)

        Inside a round of :class:`~gckernels.sync.Updates`, parameters and averaged buffers have the values of the last
        synchronisation, and get those of this rank back at the end. The context takes a copy of the model then, and
        communicates nothing. States that are saved inside have the parameters of this rank. Everywhere else it changes
        nothing.

        Raises:
            RuntimeError: an optimizer makes a step inside.
        """
        return contextlib.nullcontext() if (elastic := self._frontend.elastic) is None else elastic.shared()

    def end_round(self) -> None:
        """Average now what a round of :class:`~gckernels.sync.Updates` has changed so far, for the end of a training
        that is in the middle of one. Every rank calls it, between the same two steps. All ranks have the same
        parameters then. It does nothing where they have already.

        Raises:
            RuntimeError: only some of several optimizers have made a step, or the model has loaded a ``state_dict``, or
                a rank is gone.
        """
        if (elastic := self._frontend.elastic) is not None:
            elastic.end_round()

    @property
    def is_inside_round(self) -> bool:
        """Whether the parameters of ranks may differ now, because their updates have not been averaged."""
        return (elastic := self._frontend.elastic) is not None and self._frontend.is_open and elastic.is_inside

    # ---------------------------------------------------------------- steps

    def on_step_end(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` on every rank at the end of each synchronising backward, when gradients have been averaged.

        It is not called for backwards that only accumulate gradients, nor for evaluations. As all ranks call it at the
        same point, it may use collectives, but not in DDP's ``join()``. Backward raises an exception that it raises.
        Listeners are called in the order in which they were given.
        """
        self._listeners.add(listener)

    def ignore_step_end(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` no more; without effect if it is not called."""
        self._listeners.remove(listener)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """A context in which gradients are accumulated without being synchronised; the first backward outside
        synchronises the sum. For a DDP model it is that of the model."""
        return self._frontend.no_sync()

    @contextlib.contextmanager
    def exact(self) -> Iterator[None]:
        """A context whose backwards average gradients without compression and leave residuals alone. It is for
        gradients that are averaged, and then not used by an optimizer. Every rank has it around the same backwards."""
        before, self._frontend.runtime.averages_only = self._frontend.runtime.averages_only, True
        try:
            yield
        finally:
            self._frontend.runtime.averages_only = before

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
        self._changes.discard_step()

    # ---------------------------------------------------------------- figures

    @property
    def steps(self) -> int:
        """The number of synchronised steps, with those of the job that was continued from a checkpoint; while a plan
        compresses nothing under DDP, only steps with listeners count."""
        return self._figures.journal.step

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """The decisions about the plan so far, oldest first."""
        return tuple(self._figures.journal.decisions)

    @property
    def samples(self) -> tuple[Sample, ...]:
        """Figures of this rank's steps, oldest first: one sample every 100 steps, and every 10 during the first 100."""
        return self._figures.journal.samples

    def record_next_step(self) -> None:
        """Record the stages of the next step on this rank, for :attr:`recorded_step`."""
        self._frontend.runtime.tracer.ask()

    @property
    def recorded_step(self) -> RecordedStep | None:
        """The last recorded step of this rank that has ended. Every hundredth step is recorded, the first one of a plan
        that follows another, and those that :meth:`record_next_step` asks for; ``None`` before the first. Steps that
        DDP averages without a hook have no stages, and are not recorded. Its ``plan_fingerprint`` says whether the plan
        that runs now has made it."""
        return self._frontend.runtime.tracer.last

    def sent_nbytes_per_step(self) -> float:
        """The mean number of bytes that this rank has sent per compressed step of the plan; 0 before the first.

        For a DDP model whose plan compresses nothing, these are the bytes of a step of DDP.
        """
        return self._frontend.sent_nbytes_per_step()

    def residual_nbytes(self) -> int:
        """The bytes that residuals, the factors of low-rank methods, and their copies for a gradient scaler take on
        this rank."""
        return self._frontend.runtime.residual_nbytes() + self._parking.nbytes()

    def stats(self) -> dict[str, float | int | str]:
        """The figures of this rank as a flat dict, which TensorBoard and Weights & Biases take. A figure that is not
        known yet is left out. Communicates nothing; on a device it waits for the last sample.

        - ``step``: synchronised steps, with those before a checkpoint; ``world_size``: ranks
        - ``plan``: the fingerprint of the plan that runs; ``policy``: the policy that has found it; ``units`` and
          ``compressed_units``: units of the plan, and those that are compressed
        - ``step_s``: the median time of the last steps; ``predicted_s``: that of the plan's prediction;
          ``plain_s`` and ``speedup``: the measured or predicted step without compression, and how many times as fast
          the step is now
        - ``sent_nbytes``, ``plain_nbytes``, ``saved_nbytes``: bytes that this rank sends in a compressed step, would
          send without compression, and does not send
        - ``gathered_nbytes``, ``copied_nbytes``: of a model of FSDP2 whose parameters the attachment gathers, the bytes
          of them that this rank has sent to others in the last step, and the memory of the copy of all parameters
        - ``hidden_s``, ``exposed_s``: seconds of communication during backward, and of waiting after it, in the last
          traced step of this plan; without a hook, in the last step that DDP has timed
        - ``residual_norm``, ``residual_nbytes``: norm of all residuals at the last sample, and their memory
        - ``error``: relative error of the gradients, observed, or else predicted
        - ``decisions``: how many there were; ``trial_steps``: of a tuned training, the steps in which plans were tried
          or left for others
        """
        return self._figures.stats() | ({} if self._tuning is None else self._tuning.stats())

    def __repr__(self) -> str:
        """The way of the next step and the last figures in one line, such as ``Attachment(14 BlockQuant(bits=4) by
        allgather, 3 exact; policy auto; 2 ranks; 5.3 of 40.2 MB per step; step 1,200, 96.1 ms)``."""
        return f"Attachment({self._figures.described(self._changes.following)})"

    def report(self, path: str | os.PathLike[str], title: str | None = None) -> None:
        """Write a page about the training so far: its plan, its steps and decisions, and the lanes of a recorded step.

        One HTML file, which needs no network and no other file, for small and large screens::

            if dist.get_rank() == 0:
                attachment.report("report.html")

        It shows what this rank knows. Communicates nothing, so any rank can call it, at any time; ranks that write at
        the same time need different paths. A page that exists is replaced as a whole.

        Args:
            path: path of the file.
            title: name of the training, for the title; by default the name of the model, if the plan has one.

        Raises:
            OSError: the file cannot be written. If there was one, it is as it was.
        """
        from ..reporting import data as collecting
        from ..reporting import page

        found = collecting.collected(self._frontend, self._figures, self.residual_nbytes(), title)
        write_whole(path, page.render(found))

    # ---------------------------------------------------------------- checkpoints

    @property
    def _saved(self) -> SavedTraining:
        """The parts that checkpoints save and load."""
        from . import saving

        parts = (self._frontend, self._parking, self._changes, self._figures)
        saved: SavedTraining = saving.SavedTraining(*parts, self._tuning)
        return saved

    def state_dict(self) -> dict[str, Any]:
        """The state of this rank, with which a resumed job continues bit for bit: tensors, ints, texts, and the plan as
        JSON. Every rank saves its own. ``torch.distributed.checkpoint`` refuses it, and takes the result of
        :meth:`checkpoint`.

        Decisions and samples are in it, and so is the progress of a tuning. A resumed job goes on with the plan that
        was found, and its reports show the whole run.

        ``step`` counts the synchronised steps; a DDP model whose plan compresses nothing counts none unless there are
        listeners (:meth:`on_step_end`). While a plan is changing, this is the state of the one that runs; a job that
        resumes with that plan can change it again.
        """
        return self._saved.state_dict()

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
        self._saved.load_state_dict(state)

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
        from .checkpoint import Checkpoint

        made = Checkpoint(self._saved, reads, key)
        return made
