"""What executes a plan: the engine, the residuals, the count of steps.

A :class:`Runtime` is shown pieces of gradient by whoever has them (the DDP hook, the synchronizer), makes messages of
them, and runs these. All that must survive the process is in its ``state_dict``.
"""

from __future__ import annotations

import bisect
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.amp import GradScaler

from gckernels.compressor import Compressor

from ..messages.encoded import EncodedMessage
from ..messages.lowrank import LowRankMessage
from ..messages.message import DenseMessage, Message, Unit
from ..plans.plan import Plan
from ..programs.named import ALLREDUCE, POWERSGD
from ..programs.rules import sites
from ..programs.steps import AllReduce, Place
from ..resources.communicators import Communicators
from ..resources.feedback import KINDS, Feedback
from ..resources.lanes import Resource
from ..resources.places import Places
from ..resources.workers import Token
from ..states.jobs import Job, read_job, read_own
from ..states.layout import residual_sizes
from ..states.refusal import Refusal
from ..states.resharding import reshard
from .compilation import compile_host
from .engine import Engine
from .loss_scale import LossScale

_COMPUTES = {Place.DEVICE: Resource.COMPUTE, Place.HOST: Resource.HOST_COMPUTE}
_NOTE = Refusal(b"this state is of one rank; torch.distributed.checkpoint takes what checkpoint() returns instead")


class Runtime:
    """The plan of one model, executed by one rank. Building it is collective.

    Args:
        plan: checked, the same on all ranks.
        group: of all ranks.
        device: of the gradients.
        seed: of the stochastic compressors.
        start_step: the first step that is compressed.
        keep_unused: as for :class:`~.encoded.EncodedMessage`.
        grad_scaler: of the training, if it has one.
        parameters: of the plan, by name; needed with a scaler.

    Attributes:
        step: the number of the training step.
        group, rank, world_size: all ranks, which of them this is, and how many they are.
        topology: of them.
    """

    def __init__(
        self,
        plan: Plan,
        group: dist.ProcessGroup,
        device: torch.device,
        seed: int,
        start_step: int,
        keep_unused: bool,
        grad_scaler: GradScaler | None = None,
        parameters: Mapping[str, torch.nn.Parameter] | None = None,
    ) -> None:
        self.plan, self.device = plan, device
        self.step = 0
        self._seed, self._start_step, self._keep_unused = seed, start_step, keep_unused
        places = Places.of(device)
        self._feedback = Feedback(places)
        self.group, self.rank, self.world_size = group, dist.get_rank(group), dist.get_world_size(group)
        self.topology = plan.topology_of(self.world_size)
        self._changes = sorted({first for unit in plan.units for first, _ in unit.compressor.stages})
        self._engine: Engine | None = None
        if self.world_size > 1:
            programs = {unit.program for unit in plan.units} - {ALLREDUCE}
            wanted = {site for program in programs for site in sites(program)}
            self._engine = Engine(Communicators(group, places, self.topology, wanted, plan.channels))
            compile_host(plan, places, keep_unused, self.rank)
        self._loss_scale: LossScale | None = None
        if grad_scaler is not None and self._engine is not None:
            self._loss_scale = LossScale(grad_scaler, self._feedback, plan, parameters or {}, device)
        self._renewed: list[Token] = []  # of residuals, in the present step
        self._begun: set[str] = set()  # units of which there are messages, the same on all ranks
        self._sent_nbytes = 0.0
        self._sent_steps = 0
        self._closed = False

    # ---------------------------------------------------------------- messages

    @property
    def stage(self) -> int | None:
        """Which stage of its compressors the step is in, ``None`` while nothing is compressed; messages are built anew
        when it changes."""
        compressed = self.step - self._start_step
        return None if compressed < 0 else bisect.bisect(self._changes, compressed)

    @property
    def share(self) -> float:
        """What makes of a rank's gradient its share of the mean."""
        return 1.0 / self.world_size

    def messages(self, buffer: torch.Tensor, units: Sequence[Unit], shares: bool = False) -> list[Message]:
        """Group units that lie in ``buffer`` into messages for the present stage: neighbours that are reduced in place,
        and one per program, root and payload dtype. A part of a parameter is a message by itself, so that those of one
        parameter are on their way together.

        Args:
            buffer: where the units lie.
            units: all that lie there.
            shares: what is reduced in place, everything while nothing is compressed, is multiplied by :attr:`share`
                already when it is submitted.
        """
        if self._engine is None:
            return []
        communicators = self._engine.communicators
        if self.stage is None:
            return [DenseMessage(buffer, [unit.plan.key for unit in units], communicators, shares)]
        self._begun.update(unit.plan.key for unit in units)
        now = [Unit(unit.plan.at(self.step - self._start_step), unit.grad) for unit in units]
        messages: list[Message] = [
            DenseMessage(stretch, keys, communicators, shares) for stretch, keys in _stretches(buffer, now)
        ]
        grouped: dict[Any, list[Unit]] = {}
        for unit in now:
            if unit.plan.program != ALLREDUCE:
                reduced = any(isinstance(step, AllReduce) for step in unit.plan.program)
                dtype = unit.plan.compressor.payload_dtype if reduced else None
                part = None if unit.plan.start is None else unit.plan.key
                grouped.setdefault((unit.plan.program, unit.plan.root, dtype, part), []).append(unit)
        for number, ((program, *_), group) in enumerate(grouped.items()):
            arguments = (program, group, communicators, self._feedback, self._seed, self._keep_unused)
            if program != POWERSGD and all(isinstance(unit.plan.compressor, Compressor) for unit in group):
                messages.append(EncodedMessage(*arguments, channel=number % self.plan.channels))
            else:
                messages.append(LowRankMessage(*arguments))
        return messages

    def submit(
        self,
        messages: Sequence[Message],
        done: Callable[[], None],
        failed: Callable[[BaseException], object],
        first: bool,
        last: bool,
    ) -> None:
        """Queue messages; never blocks. ``done`` is called behind all of them, or ``failed`` with the first error.

        Args:
            messages: of one bucket.
            done: called by a lane.
            failed: called by a lane.
            first: these are the first ones of the training step.
            last: these are the last ones of it.
        """
        step, stage = self.step, self.stage
        self.step += last
        if self._engine is None:
            done()
            return
        if stage is not None:
            self._sent_nbytes += sum(message.sent_nbytes for message in messages)
            self._sent_steps += last
        if first:
            self._renewed = self._renew(self._engine) if stage is not None else []
        start, tokens = self._engine.lanes.here(), []
        for message in messages:
            after = (start,) if isinstance(message, DenseMessage) else (start, *self._renewed)
            tokens.append(self._engine.submit(message, step, after, last=False))
        if last:
            self._engine.end_step()
        self._engine.finish(tokens, done, failed)

    def _renew(self, engine: Engine) -> list[Token]:
        """Let residuals follow the gradient scaler, before a step encodes anything; for what it has to wait."""
        if self._loss_scale is None:
            return []
        works, lanes = self._loss_scale.begin(), engine.lanes
        start = lanes.here()
        return [lanes.lane(_COMPUTES[place], 0).submit(work, (start,)) for place, work in works]

    @property
    def problem(self) -> RuntimeError | None:
        """The error to raise because nothing can be submitted any more, if so."""
        if self._closed:
            return RuntimeError("gckernels: the attachment of this model is closed, wrap the module in DDP anew")
        error = None if self._engine is None else self._engine.error
        return None if error is None else failure(error, "synchronisation failed before")

    # ---------------------------------------------------------------- for the user

    def sent_nbytes_per_step(self) -> float:
        """Mean bytes that this rank has put on the wire per compressed step; 0 before the first."""
        return self._sent_nbytes / self._sent_steps if self._sent_steps else 0.0

    def residual_nbytes(self) -> int:
        """Bytes that residuals, the factors of low-rank methods, and their copies for a gradient scaler take on this
        rank."""
        return self._feedback.nbytes() + (0 if self._loss_scale is None else self._loss_scale.nbytes())

    def state_dict(self, device: torch.device | None = None) -> dict[str, Any]:
        """The state that every rank saves for itself, for a resumed job to go on exactly: tensors, ints, texts, and the
        plan as JSON. After a failure each residual is what it was before the step that failed, or after it.

        Args:
            device: where the tensors are to be, copies; by default where they are.
        """
        if self._engine is not None and self._engine.error is not None:
            self._engine.lanes.settle()
        feedback = self._feedback.state_dict(device)
        if self._loss_scale is not None:
            self._loss_scale.unscale(feedback)
        return {
            "note": _NOTE,
            "step": self.step,
            "rank": self.rank,
            "world_size": self.world_size,
            "plan": self.plan.to_json(),
            "units": [unit.key for unit in self.plan.units if unit.key in self._begun],
            "feedback": feedback,
        }

    def load_state_dict(self, state: dict[str, Any] | list[dict[str, Any]] | tuple[dict[str, Any], ...]) -> None:
        """Take over what :meth:`state_dict` has returned.

        Args:
            state: that of the same rank of an equally large job; or a list of those of all ranks of a job of any size,
                in any order, the same list on all ranks. A unit that goes through the same program as before gives
                each rank its own in an equally large job; any other gives it what
                :mod:`~gckernels.sync.states.resharding` says: what all ranks together had not given to the mean yet
                stays what it was. One rank alone has no residuals, and warns of what it drops.

        Raises:
            ValueError: of another rank or world size, of a plan with other units or compressors, not all of one job,
                or damaged. Nothing has been changed.
        """
        if isinstance(state, list | tuple):
            self.take_over(read_job(state))
        else:
            self.take_over(read_own(state, self.rank, self.world_size))

    def take_over(self, job: Job) -> None:
        """Go on where a job was saved.

        Raises:
            ValueError: it does not fit. Nothing has been changed.
        """
        feedback = reshard(job, self.plan, self.topology, self.rank)
        if self._engine is None:
            if job.has_unsent:
                warnings.warn(
                    "gckernels: one rank alone does not compress: it drops what the residuals of the "
                    f"{job.topology.world_size} ranks hold",
                    stacklevel=4,
                )
            feedback = {kind: {} for kind in KINDS}
        self._feedback.load_state_dict(feedback, residual_sizes(self.plan, self.topology, self.rank))
        if self._loss_scale is not None:
            self._loss_scale.reset()
        self._begun = set() if self._engine is None else set(job.units)
        self.step = job.step

    def close(self) -> None:
        """End the lanes and the process groups; further calls do nothing."""
        self._closed = True
        if self._loss_scale is not None:
            self._loss_scale.close()
        if self._engine is not None:
            self._engine.close()


def failure(error: BaseException, what: str = "synchronisation failed") -> RuntimeError:
    """The error that a training gets because of ``error``, which has ended a lane, and is its cause. The text is
    ``"gckernels: synchronisation failed: RuntimeError: Connection closed by peer"``."""
    said = RuntimeError(f"gckernels: {what}: {type(error).__name__}: {error}")
    said.__cause__ = error
    return said


def _stretches(buffer: torch.Tensor, units: Sequence[Unit]) -> list[tuple[torch.Tensor, list[str]]]:
    """What of ``buffer`` is reduced as it is, neighbours together, and the keys of the units in it."""
    stretches: list[tuple[int, int, str]] = []
    for unit in units:
        if unit.plan.program == ALLREDUCE and unit.grad.numel():
            first = int(unit.grad.storage_offset() - buffer.storage_offset())
            stretches.append((first, first + unit.grad.numel(), unit.plan.key))
    joined: list[tuple[int, int, list[str]]] = []
    for first, last, key in sorted(stretches):
        if joined and joined[-1][1] == first:
            start, _, keys = joined.pop()
            joined.append((start, last, [*keys, key]))
        else:
            joined.append((first, last, [key]))
    return [(buffer[first:last], keys) for first, last, keys in joined]
