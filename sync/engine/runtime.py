"""Execution of a plan on one rank: messages, their engine, residuals, the number of the training step.

A :class:`Runtime` gets pieces of gradient from a front end, groups them into messages, and runs
these on its engine. Everything that must survive the process is in its ``state_dict``.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.amp import GradScaler
from torch.futures import Future

from gckernels.devices import future_on

from ..communication.communicators import Communicators
from ..messages.build import build_message
from ..messages.message import DenseMessage, Message
from ..plans.grouping import MessageSpec, PlacedUnit, group_units, whole_bucket
from ..plans.plan import Plan
from ..programs.residuals import ENCODINGS
from ..programs.rules import sites
from ..programs.stages import Resource
from ..programs.steps import Place
from ..resources.lanes import DeviceLanes
from ..resources.memory_spaces import Allocate, BufferArena
from ..resources.residual import Residual, multiply
from ..resources.workers import Token, Work
from .compilation import compile_host
from .engine import Engine
from .failures import FailedBucket, Failures, Outcome
from .recorded_step import StepTracer
from .state import RuntimeState

_COMPUTES = {Place.DEVICE: Resource.COMPUTE, Place.HOST: Resource.HOST_COMPUTE}
_DRAINS = -1


class Runtime(RuntimeState):
    """Executes the plan of one model on one rank. Construction is collective.

    Args:
        plan: a valid plan, the same on all ranks.
        group: all ranks.
        device: the device of the gradients.
        seed: seed of the stochastic compressors.
        start_step: the first step that is compressed, if that of the plan is not larger, unless it is the first of all
            and ``first_is_dense``.
        grad_scaler: the gradient scaler of the training, if there is one.
        parameters: the parameters of the plan, by name; needed only with a scaler.
        synchronises: whether this runtime gets the gradients. Otherwise it has no lanes or process groups.
        residual_bits: 8 to keep residuals in 8 bits where an encoding can, otherwise 32.
        can_discard: whether steps may be discarded; then, as with a scaler, each step keeps a copy of the residuals.

    Attributes:
        plan: as given.
        start_step: the first step that is compressed, by the argument and by the plan.
        common_plan: the plan of which ``plan`` is the part of this rank, the same on all ranks of the model; ``plan``
            itself, unless ranks have shards.
        synchronises: as given.
        part: the part of each parameter that this rank has; ``None`` for all of it.
        step: number of the training step, from 0.
        first_is_dense: whether step 0 is not compressed, whatever ``start_step`` is.
        is_draining: whether steps are exact, and send everything that residuals hold.
        is_waiting: whether steps are exact, because messages of others are still to be built.
        averages_only: whether steps are exact and leave residuals alone, because the training says so.
        changed_residuals: whether the last step may have.
        group: as given.
        rank: rank of the calling process in ``group``.
        world_size: number of ranks in ``group``.
        topology: topology of the ranks.
        last_sent_nbytes: number of bytes that this rank has sent in the last step; ``None`` before it, and if this
            runtime does not get the gradients.
        tracer: records a step when it is asked to.
        watch: takes norms of gradients and residuals in the steps that are asked for.
        unused: the units that this rank has not used in the current step.
    """

    def __init__(
        self,
        plan: Plan,
        group: dist.ProcessGroup,
        device: torch.device,
        seed: int,
        start_step: int,
        grad_scaler: GradScaler | None = None,
        parameters: Mapping[str, torch.nn.Parameter] | None = None,
        synchronises: bool = True,
        can_discard: bool = False,
        residual_bits: int = 32,
    ) -> None:
        super().__init__(plan, group, device, seed, residual_bits)
        self.synchronises, self.is_draining, self.is_waiting, self.averages_only = synchronises, False, False, False
        self.common_plan = plan
        self.start_step = max(start_step, plan.start_step)
        self.watch, self.unused = self._feedback.watch, self._feedback.unused
        self._decays = any(unit.feedback not in (0, 1) for unit in plan.units)
        self._milestones = sorted({first for unit in plan.units for first, _ in unit.compressor.schedule})
        self._communicators: Communicators | None = None
        self._arenas: dict[int, BufferArena] = {}
        if self.world_size > 1 and synchronises:
            programs = {unit.program for unit in plan.units if not unit.in_place}
            wanted = {site for program in programs for site in sites(program)}
            communicators = Communicators(group, self._places, self.topology, wanted, plan.channels)
            self._communicators = communicators
            try:
                self._engine = Engine(DeviceLanes(device, communicators.offloads), communicators.phases, communicators)
                compile_host(plan, self._places, self.rank)
            except BaseException:
                self.close()
                raise
        if (can_discard or grad_scaler is not None) and self._engine is not None:
            from . import step_copies

            self._copies = step_copies.StepCopies(grad_scaler, self._feedback, plan, parameters or {}, device)
        self._beginning: list[Token] = []  # in the step, seeds are its own and residuals follow the scaler
        self._sent_nbytes = 0.0
        self._sent_steps = 0
        self._step_nbytes = 0.0
        self.last_sent_nbytes: float | None = None
        self.tracer = StepTracer(self.rank)

    @property
    def own_group(self) -> dist.ProcessGroup | None:
        """A group of all ranks that nobody else uses between two steps; ``None`` if there is none."""
        communicators = self._communicators
        return None if communicators is None or communicators.offloads else communicators.averaging.group

    # ---------------------------------------------------------------- messages

    def arena(self, number: int) -> BufferArena:
        """The arena with a number, for messages of which only one bucket is on its way at a time."""
        return self._arenas.setdefault(number, BufferArena(self._places))

    @property
    def milestone(self) -> int | None:
        """Number of milestones in the compressors' schedules that the step has reached; ``None`` without compression,
        and -1 in a step that sends what residuals hold.

        Messages are built anew when it changes.
        """
        if self.averages_only:
            return None
        if self.is_draining:
            return _DRAINS
        if self.is_waiting or self.step < self.start_step or (self.step == 0 and self.first_is_dense):
            return None
        return bisect.bisect(self._milestones, self._schedule_step)

    @property
    def is_exact(self) -> bool:
        """Whether nothing is compressed in the current step."""
        return self.milestone in (None, _DRAINS)

    @property
    def _schedule_step(self) -> int:
        """The step in the compressors' schedules. It is the same in a resumed job, whether its step 0 was dense or
        not."""
        return max(self.step - max(self.start_step, 1), 0)

    @property
    def share(self) -> float:
        """The weight of a rank's gradient in the mean."""
        return 1.0 / self.world_size

    def messages(
        self,
        buffer: torch.Tensor,
        units: Sequence[PlacedUnit],
        shares: bool = False,
        arena: BufferArena | None = None,
    ) -> list[Message]:
        """The messages of a bucket for the current step.

        Args:
            buffer: ``[numel]``, the bucket; ``[ranks, numel]`` if the means end in shards.
            units: all units in it.
            shares: whether stretches that are averaged in place have already been multiplied by :attr:`share` when they
                are submitted. In an exact step, that is the whole bucket.
            arena: memory for the buffers of these messages, which they share with those of other buckets; by default
                each has memory of its own.
        """
        communicators, engine = self._communicators, self._engine
        if communicators is None or engine is None:
            return []
        bind = functools.partial(self._built, communicators, buffer, units, shares)
        built = bind() if arena is None else arena.build(functools.partial(bind, arena.take))
        for message in built:
            engine.prepare(message)
        return built

    def _built(
        self,
        communicators: Communicators,
        buffer: torch.Tensor,
        units: Sequence[PlacedUnit],
        shares: bool,
        allocate: Allocate | None = None,
    ) -> list[Message]:
        if self.milestone == _DRAINS:
            from ..messages import drain

            return [drain.DrainMessage(buffer, units, communicators, self._feedback, shares)]
        if self.milestone is None:
            specs: Sequence[MessageSpec] = (whole_bucket(units, buffer.numel()),)
        else:
            self._begun.update(unit.plan.key for unit in units)
            step = self._schedule_step
            specs = group_units([replace(unit, plan=unit.plan.at_step(step)) for unit in units], self.plan.channels)
        bound = (communicators, self._feedback, self._seeds)
        return [build_message(spec, buffer, *bound, shares, allocate) for spec in specs]

    def begin_step(self) -> None:
        """Begin a training step. Called before its first messages are submitted."""
        self._step_nbytes = 0.0
        if self._engine is None:
            return
        milestone = self.milestone
        compresses = milestone not in (None, _DRAINS)
        if milestone == _DRAINS:
            self._settle()  # residuals of shards are added at once
        self.watch.begin_step(compresses)
        self._beginning = self._renew(self._engine, milestone is not None)
        if compresses:
            self._seeds.begin(self.step)
            self._beginning += self._let_decay(self._engine)
            self._beginning.append(self._engine.lanes.here())  # other buckets may come from other streams
        self.tracer.begin()

    def add_unsent(self, rows: torch.Tensor, units: Sequence[PlacedUnit], copies: int = 1) -> None:
        """In a step that sends what residuals hold, add that to the rows of shards of this rank, ``[ranks, numel]``.

        Args:
            units: all units in them.
            copies: the number of such means of all ranks over which another mean is taken.
        """
        if self.milestone == _DRAINS:
            from ..messages import shards

            shards.add_unsent(units, rows, self.rank, self._feedback, copies)

    def submit(
        self, messages: Sequence[Message], buffer: torch.Tensor, others: Collection[torch.Stream] = ()
    ) -> Future[Outcome]:
        """Queue the messages of a bucket and return a future, whose value is ``buffer`` when all of them are done, or a
        :class:`~.failures.FailedBucket`; never blocks.

        Args:
            messages: what :meth:`messages` has returned.
            buffer: ``[numel]``, the bucket.
            others: streams of a device that have filled the bucket, besides the current one.
        """
        step = self.step
        self._step_nbytes += sum(message.sent_nbytes for message in messages)
        if self._engine is None:
            alone = self._new_future()
            alone.set_result(buffer)
            return alone
        self._engine.step_recorder = self.tracer.recorder
        ended = functools.partial(_outcome, self._engine.failures, buffer)
        if len(messages) == 1 and isinstance(average := messages[0], DenseMessage) and not others:
            started = self._engine.start_average(average, step, ended)
            if started is not None:
                return started
        lanes, tokens = self._engine.lanes, []
        filled = [lanes.here(), *map(lanes.here, others)]
        for message in messages:
            after = filled if isinstance(message, DenseMessage) else (*filled, *self._beginning)
            tokens.append(self._engine.submit(message, step, after))
        future = self._new_future()
        self._engine.finish(tokens, lambda: future.set_result(buffer), lambda error: future.set_result(ended(error)))
        return future

    def release(self) -> None:
        """Let everything be sent that is held back to be sent beside a following bucket. Called before anything waits
        for the futures of a step."""
        if self._engine is not None:
            self._engine.lanes.end_step()

    def end_step(self) -> None:
        """Count the training step. Called when all of its messages have been submitted."""
        self.release()
        self.tracer.end(self.step, self.common_plan)
        self.last_sent_nbytes = self._step_nbytes
        if not self.is_exact:
            self._sent_nbytes += self._step_nbytes
            self._sent_steps += 1
        self.step += 1

    def _new_future(self) -> Future[Outcome]:
        # on a device, streams wait for the tensors in its result
        return future_on(self.device)

    def _renew(self, engine: Engine, has_residuals: bool) -> list[Token]:
        """Queue the work by which residuals are copied, follow the gradient scaler, or become what they were before a
        step that does not count; encoding must wait for the returned tokens."""
        self.changed_residuals = has_residuals
        lanes, works = engine.lanes, list[tuple[Place, Work]]()
        if self._copies is not None:
            works = self._copies.begin(has_residuals)
        elif self._thrown and has_residuals:
            works = [(self._place_of(each), each.zero) for each in self._thrown_away()]
        if not works:
            return []
        start = lanes.here()
        return [lanes.lane(_COMPUTES[place], 0).submit(work, (start,)) for place, work in works]

    def _let_decay(self, engine: Engine) -> list[Token]:
        """Queue the multiplication of residuals that decay; encoding must wait for the returned tokens. States of
        compressors that are no error, such as a momentum, are left alone."""
        errors: dict[tuple[Place, float], list[Residual]] = {}
        units = self.plan.by_key
        for kind, key, residual in self._feedback.items() if self._decays else ():
            unit = units[key]
            if kind in ENCODINGS and unit.feedback != 1 and unit.encoder(kind).traits.conserves:
                errors.setdefault((self._place_of(residual), unit.feedback), []).append(residual)
        start, lanes = engine.lanes.here(), engine.lanes
        works = {key: functools.partial(multiply, each, key[1]) for key, each in errors.items()}
        return [lanes.lane(_COMPUTES[place], 0).submit(work, (start,)) for (place, _), work in works.items()]

    def _place_of(self, residual: Residual) -> Place:
        return Place.DEVICE if residual.tensor.device.type == self.device.type else Place.HOST

    @property
    def problem(self) -> RuntimeError | None:
        """The error to raise if nothing can be submitted any more; ``None`` if all is well."""
        if self._engine is None or (error := self._engine.lanes.error) is None:
            return None
        return self._engine.failures.raised(error, "synchronisation failed before")

    def fail(self, error: BaseException) -> None:
        """Let nothing be submitted any more because of an error: it is the :attr:`problem` from now on, whatever lanes
        have failed with because of it."""
        if self._engine is not None:
            self._engine.lanes.failure.explain(error)

    # ---------------------------------------------------------------- figures

    def sent_nbytes_per_step(self) -> float:
        """Mean number of bytes that this rank has sent per compressed step; 0 before the first."""
        return self._sent_nbytes / self._sent_steps if self._sent_steps else 0.0

    def residual_nbytes(self) -> int:
        """Bytes on this rank of residuals, factors of low-rank methods, and their copies from before a step."""
        return self._feedback.nbytes() + (0 if self._copies is None else self._copies.nbytes())

    def residuals(self) -> Iterator[torch.Tensor]:
        """The values of each residual of this rank; with a gradient scaler, those of scaled gradients. Waits until
        nothing changes them."""
        self.settle()
        return (residual.values() for kind, _, residual in self._feedback.items() if kind in ENCODINGS)

    def close(self) -> None:
        """End the lanes and the process groups; further calls do nothing. After a failure, ranks that wait for this one
        fail as well."""
        if self._communicators is not None and self._engine is not None and self._engine.lanes.error is not None:
            self._communicators.hang_up()
        if self._copies is not None:
            self._copies.close()
        if self._engine is not None:
            self._engine.lanes.close()
        if self._communicators is not None:
            self._communicators.close()


def _outcome(failures: Failures, buffer: torch.Tensor, error: BaseException | None) -> Outcome:
    return buffer if error is None else FailedBucket(functools.partial(failures.raised, error))
