"""The measurement of ways to average in a training script: each runs for some real steps, one after the other.

Nothing of the training is kept, so a way may forget what the one before has not sent. Everything happens before a
forward, between two steps, on all ranks alike: what only one rank can know, such as its time, all ranks exchange first.
"""

from __future__ import annotations

import statistics
import time
import weakref
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gckernels import sync
from gckernels.sync.communication.agreement import device_of
from gckernels.sync.communication.clocks import clock_of
from gckernels.sync.communication.ranks import Ranks
from gckernels.sync.frontends.checks.hooks import ModelHook, weakly
from gckernels.sync.frontends.checks.optimizer_checks import groups_with, normalises
from gckernels.sync.frontends.kinds import frontend_of, kind_of
from gckernels.sync.frontends.sharded.shard_groups import shard_groups
from gckernels.sync.programs.sizes import allreduce_sent_nbytes

from .averagings import GATHERS, GRADIENTS, PLAIN, UPDATES, Averaging
from .rounds import round_cost

STEPS, UNCOUNTED = 20, 2
"""The steps of a way that are timed, and those before them, in which buckets and connections are new."""
SLOW_S = 2.0
"""A plain step from which on fewer steps of a way are uncounted, and updates are timed on a part of the parameters."""
Steps: TypeAlias = Generator[None, None, Any]


@dataclass(frozen=True)
class Measured:
    """A way of averaging with what was measured of it. Times are those of the slowest rank."""

    averaging: Averaging
    step_s: float  # a whole training step
    sent_nbytes: float  # by a rank in a step, as a mean over a round
    memory_nbytes: float  # beside plain averaging
    problem: str = ""  # the reason why it cannot be used, without figures


@dataclass(frozen=True)
class ScriptAdvice:
    """The ways of averaging of a training on its ranks."""

    model: str  # the name of its class
    ranks: int
    numel: int  # the elements of all gradients
    nbytes: int
    local_s: float | None  # a step that sends nothing; `None` if it is not known
    averagings: tuple[Measured, ...]  # plain averaging first

    @property
    def plain(self) -> Measured:
        """Plain averaging."""
        return self.averagings[0]


class Advising:
    """The measurement of the ways to average a model in its training, a DDP model or one of FSDP2. Every rank
    makes one.

    Args:
        model: the model, which keeps a hook.
        seconds: about how long all ways together may take.
        progress: called with the share that is done and a few words.
    """

    def __init__(
        self, model: torch.nn.Module, seconds: float, progress: Callable[[float, str], None] = lambda *_: None
    ) -> None:
        self._model, self._seconds, self._progress = weakref.ref(model), seconds, progress
        group, everyone = frontend_of(model).groups(model, None)
        self._ranks, self._clock = Ranks(everyone, device_of(model)), clock_of(device_of(model))
        self._averaging = dist.get_world_size(group)
        self._is_ddp = isinstance(model, DistributedDataParallel)
        self._groups = [] if self._is_ddp else shard_groups(model)
        self._begun_s = time.monotonic()
        self._marks: list[Any] = []
        self._was_averaged = True  # by the last backward
        self._is_local, self._forwards = False, 0  # since the last step has ended
        self._per_step = 1
        self._found: list[Measured] = []
        self._local_s: float | None = None
        self._advice: ScriptAdvice | None = None
        self._sequence: Steps = self._measured()
        self._normalises: bool | None = None  # whether the optimizer does, once it is known
        self._handles = (
            register_optimizer_step_pre_hook(weakly(self._note_optimizer)),
            model.register_forward_pre_hook(ModelHook(weakly(self._before_forward))),
            model.register_forward_hook(ModelHook(weakly(self._after_forward)), always_call=True),
        )

    @property
    def done(self) -> bool:
        """Whether all ways are measured."""
        return self._advice is not None

    @property
    def advice(self) -> ScriptAdvice:
        """The ways, the same on all ranks.

        Raises:
            RuntimeError: some are not measured yet.
        """
        if self._advice is None:
            raise RuntimeError(f"{len(self._found)} ways are measured")
        return self._advice

    def close(self) -> None:
        """End the measurement, and leave plain averaging; without effect if it has ended."""
        self._sequence.close()
        for handle in self._handles:
            handle.remove()

    # ---------------------------------------------------------------- steps

    def _before_forward(self, model: Any, _: object) -> None:
        if not torch.is_grad_enabled() or self.done:
            return
        averages = self._averages(model)
        ends = self._forwards >= self._per_step if self._is_local else self._was_averaged and self._forwards > 0
        if ends:
            self._marks.append(self._clock.mark())
            self._per_step, self._forwards = self._forwards, 0
            next(self._sequence, None)
            self._marks.append(self._clock.mark())
        elif not self._marks:
            self._marks.append(self._clock.mark())
        self._forwards += 1
        self._was_averaged = averages
        if self._is_local:
            model.require_backward_grad_sync = False  # DDP asks in forward alone

    def _averages(self, model: Any) -> bool:
        """Whether the backward of this forward averages gradients, and does not only accumulate them."""
        if self._is_ddp:
            return bool(model.require_backward_grad_sync)
        return any(group.averages_now for group in self._groups)

    def _after_forward(self, model: Any, *_: object) -> None:
        """Give a DDP model the flag of the script back, which the script may keep and restore."""
        if self._is_local and torch.is_grad_enabled():
            model.require_backward_grad_sync = self._was_averaged

    def _timed(self, until_s: float, uncounted: int) -> Steps:
        """Steps until enough are timed; returns the median seconds of one on the slowest rank.

        Args:
            until_s: seconds since the begin of the measurement after which one timed step is enough.
            uncounted: the first steps, which are not timed.
        """
        found: list[float] = []
        for number in range(uncounted + STEPS):
            yield
            begun, ended = self._marks[-2:]
            self._marks = []
            if number >= uncounted:
                found.append(self._clock.seconds(begun, ended))
            passed_s, *_ = self._ranks.slowest([time.monotonic() - self._begun_s])
            if found and passed_s > until_s:
                break
        (median_s,) = self._ranks.slowest([statistics.median(found)])
        return median_s

    # ---------------------------------------------------------------- the ways

    def _measured(self) -> Steps:
        model: Any = self._model()
        gathers = kind_of(model).gathers
        averagings = [*GRADIENTS, *(GATHERS if gathers else ())]
        parameters = [each for each in model.parameters() if each.requires_grad]
        nbytes = sum(each.nbytes for each in parameters)
        shares = 2 + len(averagings) + len(UPDATES)
        yield from self._timed_plain(self._seconds / 3, nbytes)
        plain_s = self._found[0].step_s
        uncounted = 1 if plain_s > SLOW_S else UNCOUNTED
        if self._is_ddp:
            self._progress(1 / shares, "a step that sends nothing")
            yield from self._timed_local(uncounted)
        for at, averaging in enumerate(averagings):
            self._progress((2 + at) / shares, averaging.name)
            until_s = self._seconds * (0.4 + 0.4 * (at + 1) / len(averagings))
            yield from self._timed_averaging(averaging, until_s, uncounted)
        if self._local_s is not None:
            self._progress((2 + len(averagings)) / shares, "updates")
            self._add_updates(parameters, self._local_s, min(1.0, SLOW_S / plain_s))
        names = (type(model.module if self._is_ddp else model).__name__, self._ranks.world_size)
        numel = sum(each.numel() for each in parameters)
        self._advice = ScriptAdvice(*names, numel, nbytes, self._local_s, tuple(self._found))
        self._progress(1.0, "")

    def _timed_plain(self, until_s: float, nbytes: int) -> Steps:
        self._progress(0.0, PLAIN.name)
        step_s = yield from self._timed(until_s, 0)  # the first step of the script has passed
        self._found.append(Measured(PLAIN, step_s, allreduce_sent_nbytes(nbytes, self._averaging), 0.0))

    def _timed_local(self, uncounted: int) -> Steps:
        """Time steps that send nothing. Parameters of the ranks differ afterwards."""
        self._is_local = True
        try:
            self._local_s = yield from self._timed(self._seconds / 2, uncounted)
        finally:
            self._is_local = False

    def _timed_averaging(self, averaging: Averaging, until_s: float, uncounted: int) -> Steps:
        model = self._model()
        assert model is not None
        try:
            attachment = sync.attach(model, averaging.compressor, weights=averaging.weights)
        except (RuntimeError, TypeError, ValueError) as error:  # on all ranks alike
            self._found.append(Measured(averaging, 0.0, 0.0, 0.0, str(error).partition("\n")[0]))
            return
        try:
            step_s = yield from self._timed(until_s, uncounted)
            sent_nbytes, memory_nbytes = attachment.sent_nbytes_per_step(), attachment.residual_nbytes()
        finally:
            attachment.close()
        self._found.append(Measured(averaging, step_s, sent_nbytes, memory_nbytes))

    def _add_updates(self, parameters: Sequence[torch.nn.Parameter], local_s: float, share: float) -> None:
        """Add the ways that average updates: a step that sends nothing, and the part of a round that it has."""
        for averaging in UPDATES:
            cost = round_cost(parameters, averaging, self._normalises is not False, share, self._ranks)
            self._found.append(Measured(averaging, local_s + cost.step_s, cost.sent_nbytes, cost.memory_nbytes))

    def _note_optimizer(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Note whether the optimizer of the model is one like Adam, whose steps are made longer in short rounds."""
        model = self._model() if self._normalises is None else None
        if model is not None and any(groups_with(optimizer, {*map(id, model.parameters())})):
            self._normalises = normalises(optimizer)
