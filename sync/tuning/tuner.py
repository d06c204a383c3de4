"""The tuner of a training: it records steps, lets rank 0 plan, tries the plans in turns of real steps, and keeps the
best.

Everything takes place at the ends of synchronising backwards, because these are the same on all ranks. The tuner is a
sequence in which every ``yield`` is a training step. Its steps are counted alike on all ranks, and before anything that
one rank could find otherwise than another, they ask each other. So the plan changes on all of them or on none.

Whatever fails locally postpones the tuning on all ranks, with one warning for each cause. Until it is tried again, the
plan that was found before goes on, or plain averaging. Only a rank that is gone raises, on all others.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import replace

import torch

from ..accuracy.accuracy import relative_error
from ..communication.agreement import Failure
from ..plans.names import summary_of
from ..plans.plan import Plan, PlanError
from ..predictive.machine_cache import KnownMachine
from ..predictive.searching import PlanSearch
from ..traces.model_trace import Trace, TraceError
from .decisions import short_sentences
from .decisions.sentences import PLAIN as PLAIN_GOES_ON
from .decisions.sentences import failed, restarted, resumed
from .progress import Progress, Retries
from .trials.rules import STEPS, Phase, refusal
from .trials.training import Refused, Steps, TunedTraining
from .trials.trial_report import outcome
from .trials.trial_runner import played
from .trials.trials import PLAIN
from .watching.drift import Action
from .watching.watching import Running, Tuned


class Tuner:
    """Tunes the plan of a model while it is trained. Constructed on every rank, before its first step.

    Args:
        training: the training, whose plan compresses nothing.
        model: the model that it was given, which is not kept.
        stages: the rules of accuracy, and when they begin.
        known: the machine of the ranks.
        replan: whether the plan is watched that has been found, and others are made when it is no longer right.
    """

    def __init__(
        self,
        training: TunedTraining,
        model: torch.nn.Module,
        stages: Sequence[Phase],
        known: KnownMachine,
        replan: bool,
    ) -> None:
        self._training, self._stages = training, tuple(stages)
        self._replan, self._retries = replan, Retries()
        self._progress = Progress()
        self._ranks, self._plain = training.ranks, training.plan
        self._search = PlanSearch(training, model, known)
        self._running = self._new_running()
        self._sequence = self._tuned()
        training.listeners.add(self._go_on)
        self._go_on()

    def close(self) -> None:
        """End the tuning, with the plan that runs now. Further calls do nothing."""
        self._training.listeners.remove(self._go_on)
        self._sequence = (None for _ in ())
        self._search.close()

    # ---------------------------------------------------------------- checkpoints

    def to_text(self) -> str:
        """The progress so far, for checkpoints."""
        progress = replace(self._progress, found=self._running.found, waits=self._running.waits)
        return progress.to_text(self._stages, self._ranks.world_size)

    def restart(self, progress: Progress | None = None) -> None:
        """Continue from the next step's end on as ``progress`` says, or from the beginning. Every rank calls it between
        two steps."""
        self._search.close()
        self._sequence.close()
        self._progress, self._retries = progress or Progress(), Retries()
        self._running = self._new_running()
        self._sequence = self._tuned()
        self._training.listeners.remove(self._go_on)
        self._training.listeners.add(self._go_on)

    def resume(self, progress: Progress) -> None:
        """Continue from the next step's end on with the plan that runs now, if trials have found it, or else with
        another one, and say so. Every rank calls it between two steps."""
        training = self._training
        named = summary_of(training.plan, self._ranks.world_size)
        if progress.tuned is None:
            texts = (restarted(named, progress.why_anew), short_sentences.restarted(progress.why_anew))
        else:
            texts = (resumed(training.steps, named), short_sentences.resumed())
        training.say(texts, policy=progress.policy)
        self.restart(progress)

    # ---------------------------------------------------------------- the sequence

    def _go_on(self) -> None:
        """Continue the sequence up to its next training step."""
        try:
            next(self._sequence)
        except StopIteration:
            self._training.listeners.remove(self._go_on)

    def _new_running(self) -> Running:
        running = Running(self._training, self._progress.waits)
        running.found |= self._progress.found
        return running

    def _tuned(self) -> Steps[None]:
        running, first, tuned = self._running, self._progress.stage or 0, self._progress.tuned
        for number, stage in enumerate(self._stages[first:], start=first):
            later = self._stages[number + 1 :]
            if tuned is None or self._progress.stage != number:
                while self._training.steps < stage.first_step:
                    yield
                self._progress = Progress()
                tuned = yield from self._attempt(self._tune(stage, later, running, tuned), tuned)
            while True:
                if tuned is not None and self._retries.due is None:  # otherwise a resumed job tries again
                    self._progress = Progress(number, self._training.policy, tuned)
                action = Action.STAY
                if self._replan:
                    action = yield from self._watched(running, tuned, later[0].first_step if later else None)
                if action is Action.STAY:
                    break
                self._progress = Progress()
                tuned = yield from self._attempt(self._act(action, tuned, stage, later, running), tuned)

    def _attempt(self, steps: Steps[Tuned | None], tuned: Tuned | None) -> Steps[Tuned | None]:
        """The result of some steps. If a plan is refused in them, the plan from before them goes on if it still runs,
        otherwise plain averaging: no trials have found the plan that runs then."""
        before = self._training.plan
        try:
            return (yield from steps)
        except Refused as refused:
            if self._training.plan != before:
                tuned = None
                with contextlib.suppress(Refused):
                    yield from self._training.changed(self._plain)
            is_plain = not self._compresses(self._training.plan)
            self._postpone(Failure(str(refused)), PLAIN_GOES_ON if is_plain else "the plan that runs now")
            return tuned

    def _compresses(self, plan: Plan) -> bool:
        return plan.fingerprint() != self._plain.fingerprint()

    def _watched(self, running: Running, tuned: Tuned | None, until: int | None) -> Steps[Action]:
        """Let the plan run until something is to be done, or until the next stage begins."""
        due = self._retries.due
        end = min((step for step in (until, due) if step is not None), default=None)
        if tuned is not None:
            action = yield from running.watched(tuned, end)
            if action is not Action.STAY:
                return action
        else:
            while end is not None and self._training.steps < end:
                yield
        is_due = due is not None and self._training.steps >= due and due != until
        return Action.REPLAN if is_due else Action.STAY

    def _tune(self, stage: Phase, later: Sequence[Phase], running: Running, tuned: Tuned | None) -> Steps[Tuned | None]:
        """Find the best plan for a stage, and let it run. A plan that compresses already competes with new ones, unless
        the rule does not allow it.

        If that fails it is postponed, and the plan from before competes with plain averaging alone.
        """
        last_step, before = self._training.steps + STEPS, self._training.plan
        predicted_s: tuple[float | None, ...]
        yield from self._training.changed(self._plain)
        found = yield from self._search.found(stage, running.remembering, self._retries.due is not None)
        if isinstance(found, Failure):
            again = [] if tuned is None else self._again(before, running.remembering(tuned.trace), stage)
            if tuned is None or not again:
                self._postpone(found)
                return tuned
            self._postpone(found, "the plan from before, if it is still faster than plain ones")
            trace, plans, predicted_s = tuned.trace, again, ()
        else:
            self._retries = self._retries.settled()
            trace, proposed = found
            is_new = before.fingerprint() not in {plan.fingerprint() for plan in proposed.finalists}
            again = self._again(before, trace, stage) if is_new else []
            plans = [*proposed.finalists, *again]
            predicted_s = (*proposed.predicted_s, *(None for _ in again))
        return (yield from self._try((self._plain, *plans), last_step, trace, stage, later, before, predicted_s))

    def _again(self, plan: Plan, trace: Trace, stage: Phase) -> list[Plan]:
        """The plan that ran before, with its error in this trace, if it compresses and the rule allows it; otherwise
        nothing."""
        if not self._compresses(plan) or refusal(plan, trace, stage):
            return []
        if plan.prediction is not None:
            with contextlib.suppress(TraceError, PlanError):  # no error is known, or none that is finite
                plan = replace(plan, prediction=replace(plan.prediction, error=relative_error(plan, trace)))
        return [plan]

    def _act(
        self, action: Action, tuned: Tuned | None, stage: Phase, later: Sequence[Phase], running: Running
    ) -> Steps[Tuned | None]:
        """Do what the steps of a running plan ask for. If plain steps have become faster than it, a milder plan may
        still be faster than they are."""
        if action is Action.TRY_NONE and tuned is not None:
            plan, last_step = self._training.plan, self._training.steps + STEPS
            arms = (self._plain, *self._again(plan, running.remembering(tuned.trace), stage))
            tuned = yield from self._try(arms, last_step, tuned.trace, stage, later, plan)
            if self._compresses(self._training.plan) or not running.may_replan():
                return tuned
        return (yield from self._tune(stage, later, running, tuned))

    def _postpone(self, failure: Failure, goes_on: str = PLAIN_GOES_ON) -> None:
        """Say that tuning has failed, and try it again later. People are warned once of each cause."""
        training, is_known = self._training, self._retries.is_known(failure.text)
        self._retries = self._retries.after(training.steps, failure.text)
        again = self._retries.allowance.wait if self._replan else None
        given = ("tuning", failure.text, goes_on, again)
        level = logging.INFO if is_known else logging.WARNING
        training.say((failed(*given), short_sentences.failed(*given)), level=level)

    # ---------------------------------------------------------------- its parts

    def _try(
        self,
        arms: Sequence[Plan],
        last_step: int,
        trace: Trace,
        stage: Phase,
        later: Sequence[Phase],
        incumbent: Plan,
        predicted_s: Sequence[float | None] = (),
    ) -> Steps[Tuned]:
        """Let plans run in turns, up to a step, and then the best one."""
        training = self._training
        found = yield from played(training, arms, last_step, predicted_s, incumbent)
        ways = (self._ranks.world_size, training.frontend.kind)
        training.decide(outcome(training.steps, trace, arms, found, (stage, *later), *ways))
        trials = found.trials
        return Tuned(trace, stage.accuracy, trials.median_s(trials.winner), trials.median_s(PLAIN))
