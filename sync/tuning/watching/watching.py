"""The watch over a plan that runs: its steps and residuals are read, and it is compared with others now and then.

Every ``yield`` is a training step. All ranks see the same windows, so they come to the same actions at the same steps.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Generator, Sequence
from dataclasses import replace

from ...accuracy.accuracy import unfitted
from ...communication.agreement import Failure, together
from ...plans.plan import Plan
from ..trials.race import Race
from ..trials.sentences import Sentences, failed
from ..trials.spans import StepSpans
from ..trials.training import Refused, Steps, TunedTraining
from ..trials.trial_report import overtaken
from ..trials.tuned import Tuned
from .fallback import errors_of, finer
from .guard import Fault, Guard
from .monitor import Monitor, Window
from .pace import DOUBTFUL_GAP, Pace
from .watch_report import reason, refinements


class Running:
    """Watches the plan of a training until something else is to be tuned. All ranks make one.

    Args:
        spans: marks the spans of its steps.
        race: the plans of the training, whose winner runs.
        found: errors of compressors in training because of which they were left, by parameter and compressor. Errors of
            further ones are added.
        pace: the pace of another one, which goes on; by default that after a race.

    Attributes:
        is_comparing: whether the plan that runs now may be one that is only tried.
    """

    def __init__(
        self,
        training: TunedTraining,
        spans: StepSpans,
        race: Race,
        found: dict[tuple[str, str], float],
        pace: Pace | None = None,
    ) -> None:
        self._training, self._spans, self._race = training, spans, race
        self._policy = "none"  # finer plans keep that of the first
        self.found = found
        self.pace = pace or (Pace(DOUBTFUL_GAP) if race.trials.was_disturbed else Pace())
        self.is_comparing = False

    def watched(self, tuned: Tuned, until: int | None = None) -> Steps[None]:
        """Watch the steps of the plan that runs now.

        Args:
            tuned: how the plan was found.
            until: the number of steps of the training at which to return; ``None`` to return never.

        Raises:
            Refused: no plan may follow that would have to.
        """
        training, race = self._training, self._race
        self._policy = training.policy
        guard = rules = self._guard(tuned)
        monitor = self._monitor(rules)
        while until is None or training.steps < until:
            yield
            window = monitor.step_ended()
            if window is None:
                continue
            if window.readings:
                training.note_error(window.error)
                guard, faults = guard.after(window.readings)
                if faults and (yield from self._refine(faults, tuned)):
                    guard = rules = self._guard(tuned)
                    monitor = self._monitor(rules)
                    continue
                if faults:
                    guard = Guard()  # the plan stays as it is
            race.trials.ran(window.steps_s)
            before = race.trials.incumbent
            if (yield from self._compared(window, tuned)):
                if race.trials.incumbent != before:
                    guard = rules = self._guard(tuned)
                    self._policy = training.policy
                monitor = self._monitor(rules)

    # ---------------------------------------------------------------- its parts

    def _guard(self, tuned: Tuned) -> Guard:
        return Guard.of(self._training.plan, tuned.accuracy, tuned.trace)

    def _monitor(self, guard: Guard) -> Monitor:
        training = self._training
        watch = training.frontend.runtime.watch
        return Monitor(training.ranks, self._spans, watch, guard.keys, guard.low_rank)

    def _compared(self, window: Window, tuned: Tuned) -> Steps[bool]:
        """Compare the plan with others if a window is an occasion to, and return whether it was compared."""
        training, race, trials = self._training, self._race, self._race.trials
        usual_s = statistics.median(self.pace.seen_s or (window.step_s,))
        self.pace, occasion = self.pace.after(window.step_s, window.steps, trials.error(window.steps))
        if occasion is None or not trials.may_compare:
            return False
        challengers = trials.next_challengers(*occasion.asks)
        before, self.is_comparing = trials.incumbent, True
        try:
            yield from race.compare(challengers, window.steps_s)
        except Refused as refused:
            for arm in challengers:
                trials.leave_out(arm)
            self._say(failed("a comparison of plans", str(refused), "the plan from before"), training.plan)
            yield from training.changed(race.winner)
        finally:
            self.is_comparing = False
        self.pace = self.pace.compared(occasion, trials.incumbent != before)
        if trials.incumbent != before:
            why = reason(occasion, window.step_s, usual_s)
            training.decide(overtaken(training.steps, tuned.trace, race, before, why, training.ranks.world_size))
        return bool(challengers)

    def _refine(self, faults: Sequence[Fault], tuned: Tuned) -> Generator[None, None, bool]:
        """Let finer compressors follow for some units, and return whether they do."""
        training, plan, trace = self._training, self._training.plan, tuned.trace.remembering(self.found)

        def made() -> Plan:
            changed = finer(plan, faults, trace, tuned.accuracy, training.ranks.world_size)
            training.checked(changed)
            return changed

        after = together(training.frontend.group, training.frontend.device, made)
        if isinstance(after, Failure):
            self._say_failed(after.text, plan)
            return False
        policy = self._policy
        self.found |= errors_of(plan, faults)
        self._policy = policy if after.compresses else "none"
        for sentences in refinements(plan, after, faults):
            self._say(sentences, after, logging.WARNING)
        try:
            yield from training.changed(after)
        except Refused as refused:
            self._policy = policy
            self._say_failed(str(refused), plan)
            return False
        self._race.replace(after, self._has_faults)
        self.pace = replace(self.pace, seen_s=())
        return True

    def _has_faults(self, plan: Plan) -> bool:
        """Whether a plan has a compressor that was left because of its errors."""
        used = {(name, str(unfitted(unit.compressor))) for unit in plan.units for name in unit.parameters}
        return not used.isdisjoint(self.found)

    def _say_failed(self, error: str, plan: Plan) -> None:
        self._say(failed("the choice of finer compressors", error, "the plan as it is"), plan, logging.WARNING)

    def _say(self, sentences: Sentences, plan: Plan, level: int = logging.INFO) -> None:
        self._training.say(sentences, plan, self._policy, level)
