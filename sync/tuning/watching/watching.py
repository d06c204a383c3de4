"""The running phase: a plan runs, and its steps and residuals are watched until something is to be done.

Every ``yield`` is a training step. All ranks see the same windows, so they come to the same actions at the same steps.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence
from dataclasses import replace

from ...communication.agreement import Failure, together
from ...plans.plan import Plan
from ..trials.race import Tuned
from ..trials.sentences import Sentences, failed
from ..trials.spans import StepSpans
from ..trials.training import Refused, TunedTraining
from .drift import Action, Allowance, Drift, Expected
from .fallback import errors_of, finer
from .guard import Fault, Guard
from .monitor import Monitor
from .watch_report import reason, refinements


class Running:
    """Watches the plan of a training between two tunings. All ranks make one.

    Args:
        training: the training.
        spans: marks the spans of its steps.
        found: errors of compressors in training because of which they were left, by parameter and compressor. Errors of
            further ones are added.
        waits: the steps from one action to the next, as :attr:`waits` of another one has given them.
    """

    def __init__(
        self,
        training: TunedTraining,
        spans: StepSpans,
        found: dict[tuple[str, str], float],
        waits: Sequence[Allowance] = (),
    ) -> None:
        self._training, self._spans = training, spans
        self._drift: Drift | None = None
        self._waits = tuple(waits)
        self._policy = "none"  # finer plans keep that of the first
        self.found = found

    def watched(self, tuned: Tuned, until: int | None = None) -> Generator[None, None, Action]:
        """Watch the steps of the plan that runs now, and return what is to be done.

        Args:
            tuned: how the plan was found.
            until: the number of steps of the training at which to return in any case, with
                :attr:`~.drift.Action.STAY`.
        """
        training = self._training
        self._policy = training.policy
        expected = Expected(tuned.step_s, tuned.none_s, tuned.computing_s, training.plan.compresses)
        drift = Drift(expected).with_waits(self._waits) if self._drift is None else self._drift.renewed(expected)
        guard, monitor = self._watch(tuned)
        is_new = False  # no trial has measured the plan
        while until is None or training.steps < until:
            yield
            window = monitor.step_ended()
            if window is None:
                continue
            if window.readings:
                training.note_error(window.error)
            if is_new:
                is_new, drift = False, drift.renewed(replace(expected, step_s=window.step_s))
            before = drift
            drift, action = drift.after(window.step_s, window.steps)
            self._drift = drift
            if action is not Action.STAY:
                self._say(reason(action, window.step_s, before.expected), training.plan)
                return action
            guard, faults = guard.after(window.readings)
            if faults and (yield from self._refine(faults, tuned)):
                expected = replace(expected, compresses=training.plan.compresses)
                guard, monitor = self._watch(tuned)
                is_new = True
            elif faults:
                guard = Guard()  # the plan stays as it is
        return Action.STAY

    @property
    def waits(self) -> tuple[Allowance, ...]:
        """The steps from one action to the next, for checkpoints."""
        return self._waits if self._drift is None else self._drift.waits

    def may_replan(self) -> bool:
        """Whether new plans are allowed now. If so, they count as made."""
        if self._drift is None or not self._drift.replans.is_open:
            return False
        self._drift = replace(self._drift, replans=self._drift.replans.spent())
        return True

    # ---------------------------------------------------------------- its parts

    def _watch(self, tuned: Tuned) -> tuple[Guard, Monitor]:
        training, frontend = self._training, self._training.frontend
        guard = Guard.of(training.plan, tuned.accuracy, tuned.trace)
        monitor = Monitor(training.ranks, self._spans, frontend.runtime.watch, guard.keys, guard.low_rank)
        return guard, monitor

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
        return True

    def _say_failed(self, error: str, plan: Plan) -> None:
        self._say(failed("the choice of finer compressors", error, "the plan as it is"), plan, logging.WARNING)

    def _say(self, sentences: Sentences, plan: Plan, level: int = logging.INFO) -> None:
        self._training.say(sentences, plan, self._policy, level)
