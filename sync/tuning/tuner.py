"""The tuner of a training: it records steps, lets rank 0 plan, tries the plans in turns of real steps, and keeps the
best.

Everything takes place at the ends of synchronising backwards, because these are the same on all ranks. The tuner is a
sequence in which every ``yield`` is a training step. Its steps are counted alike on all ranks, and before anything that
one rank could find otherwise than another, they ask each other. So the plan changes on all of them or on none.

Whatever fails locally ends the tuning on all ranks, with one warning, and plain averaging goes on. Only a rank that is
gone raises, on all others.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import torch

from ..attach.decisions import Decision
from ..attach.handle import Handle
from ..attach.synchronizer import PlanSynchronizer
from ..planner.trace import Trace
from ..plans.plan import Plan
from ..plans.summary import summary_of
from ..profiling.ranks import Ranks
from ..recording.clocks import clock_of
from ..recording.recorder import Recorder
from .agreeing import Failure, together
from .drift import Action
from .link import measured_bit_per_s
from .outcome import outcome
from .planning import Proposal, proposal, proposed
from .progress import Progress
from .rules import RECORDED, STEPS, WARMUP, Stage
from .running import Running, Tuned
from .sentences import failed, restarted, resumed
from .trials import PLAIN, UNCOUNTED, Trials, Turn

if TYPE_CHECKING:  # it needs NumPy
    from ..planner.machine import Machine

T = TypeVar("T")
Steps: TypeAlias = Generator[None, None, T]
"""A part of the tuning that takes some training steps, one for every ``yield``, and returns something."""

LONGEST_RECORDING = 30
"""Steps after which a recording is given up, such as that of a model whose hooks a compiler has left out."""


class Tuner:
    """Tunes the plan of a model while it is trained. Constructed on every rank, before its first step.

    Args:
        handle: the attachment or synchronizer, whose plan compresses nothing.
        model: the model that it was given; the tuner does not keep it.
        stages: the rules of accuracy, and when they begin.
        machine: the profile of the ranks, or why there is none.
        replan: whether the plan is watched that has been found, and others are made when it is no longer right.
    """

    def __init__(
        self,
        handle: Handle,
        model: torch.nn.Module,
        stages: Sequence[Stage],
        machine: Machine | Failure,
        replan: bool,
    ) -> None:
        self._handle, self._model, self._stages, self._machine = handle, weakref.ref(model), tuple(stages), machine
        self._replan = replan
        self._progress = Progress()
        self._ranks = Ranks(handle.group, handle.device)
        self._plain = handle.plan
        self._recorder: Recorder | None = None
        self._bit_per_s: float | None = None  # the rate of the network, if it has been measured since the profile
        self._running = self._new_running()
        self._sequence = self._tuned()
        handle.on_step_end(self._go_on)
        self._go_on()

    def close(self) -> None:
        """End the tuning, with the plan that runs now. Further calls do nothing."""
        self._handle.ignore_step_end(self._go_on)
        self._end_recording()

    # ---------------------------------------------------------------- checkpoints

    def to_text(self) -> str:
        """The progress so far, for checkpoints."""
        return replace(self._progress, found=self._running.found).to_text(self._stages, self._ranks.world_size)

    def read(self, text: str) -> Progress:
        """The progress of a saved tuning.

        Raises:
            ValueError: it is damaged.
        """
        return Progress.from_text(text, self._stages, self._ranks.world_size)

    def restart(self, progress: Progress | None = None) -> None:
        """Continue from the next step's end on as ``progress`` says, or from the beginning. Every rank calls it between
        two steps."""
        self._end_recording()
        self._sequence.close()
        self._progress = progress or Progress()
        self._running = self._new_running()
        self._sequence = self._tuned()
        self._handle.ignore_step_end(self._go_on)
        self._handle.on_step_end(self._go_on)

    def resume(self, progress: Progress) -> None:
        """Continue from the next step's end on with the plan that runs now, if trials have found it, or else with
        another one, and say so. Every rank calls it between two steps."""
        handle, plan = self._handle, self._handle.plan
        named = summary_of(plan, self._ranks.world_size)
        sentence = restarted(named, progress.why_anew) if progress.tuned is None else resumed(handle.steps, named)
        handle.decide(Decision(handle.steps, sentence, progress.policy, plan.fingerprint()))
        self.restart(progress)

    # ---------------------------------------------------------------- the sequence

    def _go_on(self) -> None:
        """Continue the sequence up to its next training step."""
        try:
            next(self._sequence)
        except StopIteration:
            self._handle.ignore_step_end(self._go_on)

    def _new_running(self) -> Running:
        running = Running(self._handle, self._ranks.world_size, self._change)
        running.found |= self._progress.found
        return running

    def _tuned(self) -> Steps[None]:
        running, first = self._running, self._progress.stage or 0
        for number, stage in enumerate(self._stages[first:], start=first):
            later = self._stages[number + 1 :]
            if self._progress.tuned is not None and self._progress.stage == number:
                tuned: Tuned | Failure = self._progress.tuned
            else:
                while self._handle.steps < stage.first_step:
                    yield
                self._progress = Progress()
                tuned = yield from self._tune(stage, later, running)
            while not isinstance(tuned, Failure):
                self._progress = Progress(number, self._policy(), tuned)
                if not self._replan:
                    break
                action = yield from running.watched(tuned, later[0].first_step if later else None)
                if action is Action.STAY:
                    break
                self._progress = Progress()
                tuned = yield from self._act(action, tuned, stage, later, running)
            if isinstance(tuned, Failure):
                self._warn(tuned)
                yield from self._change(self._plain)
                return

    def _tune(self, stage: Stage, later: Sequence[Stage], running: Running) -> Steps[Tuned | Failure]:
        """Find the best plan for a stage, and let it run. A plan that compresses already competes with new ones."""
        last_step, before = self._handle.steps + STEPS, self._handle.plan
        yield from self._change(self._plain)
        machine = self._machine
        if isinstance(machine, Failure):
            return machine
        recorded = yield from self._record(stage)
        if isinstance(recorded, Failure):
            return recorded
        trace = running.remembering(recorded)
        found = self._propose(trace, machine, stage)
        if isinstance(found, Failure):
            return found
        arms = (self._plain, *found.finalists)
        if before not in arms:
            arms = (*arms, before)
        return (yield from self._try(arms, last_step, trace, stage, later))

    def _act(
        self, action: Action, tuned: Tuned, stage: Stage, later: Sequence[Stage], running: Running
    ) -> Steps[Tuned | Failure]:
        """Do what the steps of a running plan ask for."""
        if action is Action.TRY_NONE:
            arms = (self._plain, self._handle.plan)
            return (yield from self._try(arms, self._handle.steps + STEPS, tuned.trace, stage, later))
        self._bit_per_s = measured_bit_per_s(self._ranks)
        return (yield from self._tune(stage, later, running))

    def _policy(self) -> str:
        return self._handle.decisions[-1].policy if self._handle.decisions else "none"

    def _warn(self, failure: Failure) -> None:
        text = failed("tuning", failure.text)
        self._handle.decide(
            Decision(self._handle.steps, text, "none", self._plain.fingerprint(), level=logging.WARNING)
        )

    # ---------------------------------------------------------------- its parts

    def _record(self, stage: Stage) -> Steps[Trace | Failure]:
        """Record steps, and make a trace with the errors of the stage's compressors."""
        recorder = self._together(self._new_recorder)
        if isinstance(recorder, Failure):
            return recorder
        for _ in range(LONGEST_RECORDING):
            yield
            (waits,) = self._ranks.slowest([float(not recorder.done)])
            recorder.mark_averaged()
            if not waits:
                break
        self._end_recording()
        if waits:
            return Failure(f"the model's steps could not be recorded in {LONGEST_RECORDING} of them")
        errors = self._together(lambda: recorder.errors(stage.methods))
        if isinstance(errors, Failure):
            return errors
        trace = recorder.trace(errors, stage.methods)
        return Failure("the model is gone") if trace is None else trace

    def _new_recorder(self) -> Recorder:
        model, handle = self._model(), self._handle
        if model is None:
            raise RuntimeError("the model is gone")
        self._recorder = Recorder(model, handle.parameters(), handle.group, handle.device, RECORDED, WARMUP)
        if isinstance(handle, PlanSynchronizer):
            handle.launch_late(True)
        return self._recorder

    def _end_recording(self) -> None:
        if self._recorder is not None:
            self._recorder.close()
            self._recorder = None
            if isinstance(self._handle, PlanSynchronizer):
                self._handle.launch_late(False)

    def _propose(self, trace: Trace, machine: Machine, stage: Stage) -> Proposal | Failure:
        handle = self._handle
        return proposed(
            handle.group,
            handle.device,
            handle.parameters(),
            lambda: proposal(trace, machine, handle.attached, stage, self._bit_per_s),
        )

    def _try(
        self, arms: Sequence[Plan], last_step: int, trace: Trace, stage: Stage, later: Sequence[Stage]
    ) -> Steps[Tuned]:
        """Let plans run in turns, up to a step, and then the best one."""
        handle, trials = self._handle, Trials.of(len(arms))
        while (turn := trials.next_turn(last_step - handle.steps)) is not None:
            trials = trials.after(turn.arm, (yield from self._play(arms[turn.arm], turn)))
        yield from self._change(arms[trials.winner])
        ways = (self._ranks.world_size, handle.attached)
        decision = outcome(handle.steps, trace, arms, trials, (stage, *later), *ways)
        handle.decide(decision)
        return Tuned(trace, stage.accuracy, trials.median_s(trials.winner), trials.median_s(PLAIN))

    def _play(self, plan: Plan, turn: Turn) -> Steps[list[float]]:
        """The seconds of the counted steps of a turn, on the slowest rank each."""
        yield from self._change(plan)
        clock, marks = clock_of(self._handle.device), []
        for number in range(turn.steps):
            yield
            if number >= UNCOUNTED - 1:
                marks.append(clock.mark())
        return self._ranks.slowest([clock.seconds(*pair) for pair in itertools.pairwise(marks)])

    def _change(self, plan: Plan) -> Steps[None]:
        """Let a plan run from the next step on, after the steps that the change takes."""
        if plan != self._handle.plan or self._handle.is_changing:
            self._handle.change_plan(plan)
            while self._handle.is_changing:
                yield

    def _together(self, work: Callable[[], T]) -> T | Failure:
        return together(self._handle.group, self._handle.device, work)
