"""The tuner of a training: it lets plans run in turns of real steps, and keeps the best. Proposers find the plans.

Everything takes place at the ends of synchronising backwards, because these are the same on all ranks. The tuner is a
sequence in which every ``yield`` is a training step. Its steps are counted alike on all ranks, and before anything that
one rank could find otherwise than another, they ask each other. So the plan changes on all of them or on none.

Whatever fails locally postpones the tuning on all ranks, with one warning for each cause. Until it is tried again, the
plan that was found before goes on, or plain averaging. Only a rank that is gone raises, on all others.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isfinite
from typing import TYPE_CHECKING

import torch

from ..accuracy.accuracy import relative_error
from ..communication.agreement import Failure
from ..frontends.frontend import GRADIENTS
from ..plans.names import summary_of
from ..plans.plan import Plan, PlanError
from ..traces.model_trace import ModelTrace
from ..traces.traced_tensors import TraceError
from .progress import Progress
from .proposers import Proposer
from .trials.rules import Phase, Rules, refusal
from .trials.sentences import PLAIN as PLAIN_GOES_ON
from .trials.sentences import failed, restarted, resumed
from .trials.spans import StepSpans
from .trials.training import Refused, Steps, TunedTraining
from .trials.tuned import Tuned

if TYPE_CHECKING:
    from .optimizers import Optimizers
    from .recording import StepRecording
    from .retries import Retries
    from .trials.race import Race
    from .watching.watching import Running

UNIFORM = "uniform"
"""The name of the policy of plans with one compressor for the whole model."""
BEFORE_GOES_ON = "the plan from before, if it is still faster than plain ones"


class Tuner:
    """Tunes the plan of a model while it is trained. Constructed on every rank, before its first step.

    Args:
        training: the training, whose plan compresses nothing.
        model: the model that it was given, which is not kept.
        rules: the rules of accuracy, and when they begin.
        proposers: find the plans to try, one after the other. The plans of a later one join the race of the others.
        replan: whether the plan is watched that has been found, and compared with others when steps change.
    """

    def __init__(
        self,
        training: TunedTraining,
        model: torch.nn.Module,
        rules: Rules,
        proposers: Sequence[Proposer],
        replan: bool,
    ) -> None:
        self._training, self._stages, self._model = training, rules.stages, rules.model
        self._proposers, self._replan = tuple(proposers), replan
        self._retries: Retries | None = None  # once something has failed
        self._progress = Progress()
        self._ranks, self._plain = training.ranks, training.plan
        self._given = weakref.ref(model)
        self._recording: StepRecording | None = None
        self._spans = StepSpans(model, training.frontend.group, training.frontend.device)
        self._found: dict[tuple[str, str], float] = {}  # errors because of which compressors were left
        self._race: Race | None = None  # since plans are tried in this job
        self._earlier_steps = 0  # trials of races that have ended
        self._running: Running | None = None  # while it is watched
        self._optimizers: Optimizers | None = None
        if training.frontend.averaged == GRADIENTS and any(stage.accuracy.is_aggressive for stage in rules.stages):
            from . import optimizers

            self._optimizers = optimizers.Optimizers(training.frontend.parameters().values(), training.ranks)
        self._sequence = self._tuned()
        training.listeners.add(self._go_on)

    def close(self) -> None:
        """End the tuning, with the plan that runs now. Further calls do nothing."""
        self._training.listeners.remove(self._go_on)
        self._sequence = (None for _ in ())
        self._end_proposals()
        self._spans.close()
        if self._optimizers is not None:
            self._optimizers.close()

    @property
    def trial_steps(self) -> int:
        """The steps so far in which plans were tried, or left for others."""
        return self._earlier_steps + (0 if self._race is None else self._race.trials.steps)

    def _end_proposals(self) -> None:
        if self._recording is not None:
            self._recording.close()
        for proposer in self._proposers:
            proposer.close()

    # ---------------------------------------------------------------- checkpoints

    def to_text(self) -> str:
        """The progress so far, for checkpoints. Plans that are compared just now have no outcome yet."""
        progress, race, running = self._progress, self._race, self._running
        if running is not None and race is not None and (tuned := progress.tuned) is not None:
            step_s, none_s = race.trials.median_s(race.trials.incumbent), race.trials.plain_s
            if isfinite(step_s) and isfinite(none_s):  # otherwise the plan has just become finer
                tuned = replace(tuned, step_s=step_s, none_s=none_s)
            progress = replace(progress, policy=self._training.policy, tuned=tuned, pace=running.pace)
            progress = Progress() if running.is_comparing else progress
        return replace(progress, found=self._found).to_text(self._stages, self._ranks.world_size)

    def restart(self, progress: Progress | None = None) -> None:
        """Continue from the next step's end on as ``progress`` says, or from the beginning. Every rank calls it between
        two steps."""
        self._end_proposals()
        self._sequence.close()
        self._progress, self._retries = progress or Progress(), None
        self._spans.open()
        self._found, self._race, self._running = dict(self._progress.found), None, None
        self._sequence = self._tuned()
        self._training.listeners.remove(self._go_on)
        self._training.listeners.add(self._go_on)

    def resume(self, progress: Progress) -> None:
        """Continue from the next step's end on with the plan that runs now, if trials have found it, or else with
        another one, and say so. Every rank calls it between two steps."""
        training = self._training
        named = summary_of(training.plan, self._ranks.world_size)
        if progress.tuned is None:
            sentences = restarted(named, progress.why_anew)
        else:
            sentences = resumed(training.steps, named)
        training.say(sentences, policy=progress.policy)
        self.restart(progress)

    # ---------------------------------------------------------------- the sequence

    def _go_on(self) -> None:
        """Continue the sequence up to its next training step."""
        try:
            next(self._sequence)
        except StopIteration:
            self._training.listeners.remove(self._go_on)
            self._spans.close()

    def _tuned(self) -> Steps[None]:
        first, tuned = self._progress.stage or 0, self._progress.tuned
        for number, stage in enumerate(self._stages[first:], start=first):
            later = self._stages[number + 1 :]
            if tuned is None or self._progress.stage != number:
                while self._training.steps < stage.first_step:
                    yield
                self._progress = Progress()
                tuned = yield from self._attempt(self._tune(stage, later), tuned)
            while True:
                if tuned is not None and self._due is None:  # otherwise a resumed job tries again
                    self._progress = replace(Progress(number, self._training.policy, tuned), pace=self._progress.pace)
                until = later[0].first_step if later else None
                if not self._replan or not (yield from self._watched(stage, tuned, until)):
                    break
                self._progress = Progress()
                tuned = yield from self._attempt(self._tune(stage, later), tuned)

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
            self._postpone(Failure(str(refused)), self._goes_on)
            return tuned

    def _compresses(self, plan: Plan) -> bool:
        return plan.fingerprint() != self._plain.fingerprint()

    def _watched(self, stage: Phase, tuned: Tuned | None, until: int | None) -> Steps[bool]:
        """Let the plan run until the next stage begins, or until plans are to be found again after a failure, and
        return whether they are."""
        if tuned is not None:
            try:
                running = yield from self._watcher(stage, tuned)
                yield from running.watched(tuned, self._end(until))
            except Refused as refused:  # nobody knows any more which plan is the best one
                self._progress = Progress()
                self._postpone(Failure(str(refused)), self._goes_on)
            finally:
                self._running = None
        end, due = self._end(until), self._due
        while end is not None and self._training.steps < end:
            yield
        return due is not None and self._training.steps >= due and due != until

    def _watcher(self, stage: Phase, tuned: Tuned) -> Steps[Running]:
        """The watch over the plan that runs, which compares it with others now and then."""
        race = self._race
        if race is None:  # the job was resumed
            race = self._race = self._new_race()
            stage, trace = self._in_use(stage), tuned.trace.remembering(self._found)
            plans = yield from self._proposers[0].plans(stage, trace, race)
            known = {} if isinstance(plans, Failure) else {plan: _policy_of(plan) for plan in self._decaying(plans)}
            self._join(race, {self._training.plan: self._training.policy} | known, stage, trace)
            race.resume(self._training.plan, tuned.step_s, tuned.none_s)
        from .watching import watching

        pace, self._progress = self._progress.pace, replace(self._progress, pace=None)
        self._running = watching.Running(self._training, self._spans, race, self._found, pace)
        return self._running

    def _end(self, until: int | None) -> int | None:
        """The step at which watching ends: the begin of the next stage, or the next attempt after a failure."""
        return min((step for step in (until, self._due) if step is not None), default=None)

    @property
    def _due(self) -> int | None:
        """The step at which plans are to be found again after a failure; ``None`` if they are not."""
        return None if self._retries is None else self._retries.due

    @property
    def _goes_on(self) -> str:
        return "the plan that runs now" if self._compresses(self._training.plan) else PLAIN_GOES_ON

    def _decaying(self, plans: Sequence[Plan]) -> Sequence[Plan]:
        """Plans whose residuals decay where they must."""
        return plans if self._optimizers is None else self._optimizers.decaying(plans)

    def _tune(self, stage: Phase, later: Sequence[Phase]) -> Steps[Tuned | None]:
        """Find the best plan for a stage, and let it run. A plan that compresses already competes with new ones, unless
        the rule does not allow it."""
        training, tuned = self._training, None
        before, policy = training.plan, training.policy
        self._earlier_steps = self.trial_steps
        race = self._race = self._new_race()
        yield from race.run()
        stage = self._in_use(stage)
        trace = (yield from self._traced(stage)).remembering(self._found)
        joins = dict.fromkeys(self._again(before, trace, stage), policy)
        for number, proposer in enumerate(self._proposers):
            plans = yield from proposer.plans(stage, trace, race)
            if isinstance(plans, Failure):
                if not number:
                    self._postpone(plans, BEFORE_GOES_ON if joins else PLAIN_GOES_ON)
                    if not joins:
                        return None
                else:
                    self._say_failed(plans.text, "the fastest plan so far")
                plans = ()
            elif not number:
                self._retries = None if self._retries is None else self._retries.settled()
            new = self._join(
                race, {**joins, **{plan: _policy_of(plan) for plan in self._decaying(plans)}}, stage, trace
            )
            if not number:
                yield from race.run()
            elif not new or not (yield from self._runs_on(race, new)):
                continue
            tuned = self._decided(race, trace, (stage, *later))
        return tuned

    def _new_race(self) -> Race:
        from .trials import race

        return race.Race(self._training, self._spans, self._plain)

    def _in_use(self, stage: Phase) -> Phase:
        """A rule as it holds in front of the optimizers that are in use. Collective."""
        return stage if self._optimizers is None else self._optimizers.rule(stage)

    def _join(self, race: Race, plans: Mapping[Plan, str], stage: Phase, trace: ModelTrace) -> list[int]:
        """Let plans take part in a race, judged by the rule, and return the numbers of new ones. Collective."""
        slowdowns = [stage.slowdown(plan, trace) for plan in plans]
        return race.join(plans, self._ranks.slowest(slowdowns) if stage.slows and plans else None)

    def _runs_on(self, race: Race, new: Sequence[int]) -> Steps[bool]:
        """Let plans run that have joined a race, and return whether they could. Otherwise the winner from before goes
        on."""
        winner = race.winner
        try:
            yield from race.compare(new)
        except Refused as refused:
            self._say_failed(str(refused), "the fastest plan so far")
            yield from self._training.changed(winner)
            return False
        return True

    def _traced(self, stage: Phase) -> Steps[ModelTrace]:
        """A trace of the next steps, or the model without times and errors if they cannot be recorded."""
        if (traceable := self._training.frontend.traceable) is None:
            return self._model
        if self._recording is None:
            from . import recording

            self._recording = recording.StepRecording(self._training, traceable, self._given)
        trace = yield from self._recording.trace(stage.methods)
        if isinstance(trace, Failure):
            self._say_failed(trace.text, "plans that need no recording")
            return self._model
        return trace

    def _again(self, plan: Plan, trace: ModelTrace, stage: Phase) -> list[Plan]:
        """The plan that ran before, with its error in this trace, if it compresses and the rule allows it; otherwise
        nothing."""
        if not self._compresses(plan) or refusal(plan, trace, stage):
            return []
        if plan.prediction is not None:
            with contextlib.suppress(TraceError, PlanError):  # no error is known, or none that is finite
                plan = replace(plan, prediction=replace(plan.prediction, error=relative_error(plan, trace)))
        return [plan]

    def _postpone(self, failure: Failure, goes_on: str = PLAIN_GOES_ON) -> None:
        """Say that tuning has failed, and try it again later. People are warned once of each cause."""
        training = self._training
        retries = self._retries
        if retries is None:
            from .retries import Retries

            retries = Retries()
        is_known = retries.is_known(failure.text)
        self._retries = retries = retries.after(training.steps, failure.text)
        again = retries.allowance.wait if self._replan else None
        level = logging.INFO if is_known else logging.WARNING
        training.say(failed("tuning", failure.text, goes_on, again), level=level)

    def _say_failed(self, error: str, goes_on: str) -> None:
        self._training.say(failed("predicting plans", error, goes_on))

    def _decided(self, race: Race, trace: ModelTrace, stages: Sequence[Phase]) -> Tuned:
        """The outcome of a race, whose winner runs now."""
        training, trials = self._training, race.trials
        from .trials.trial_report import outcome

        training.decide(outcome(training.steps, trace, race, stages, self._ranks.world_size, training.frontend.kind))
        return Tuned(trace, stages[0].accuracy, trials.median_s(trials.incumbent), trials.plain_s)


def _policy_of(plan: Plan) -> str:
    return UNIFORM if plan.prediction is None else plan.prediction.policy
