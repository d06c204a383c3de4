"""Races: plans run one after the other, in turns of real training steps, and the best one stays.

Every ``yield`` is a training step.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...accuracy.accuracy import AccuracyLike
from ...engine.recorded_step import RecordedStep
from ...plans.names import summary_of
from ...plans.plan import Plan
from ...traces.model_trace import ModelTrace
from .sentences import failed
from .spans import StepSpans, bounds_of, of_all_ranks
from .training import NotBuilt, Steps, TunedTraining
from .trials import PLAIN, UNCOUNTED, Trials, Turn

CHANGES = 2
"""Exact steps that a turn may take besides its own: one before it, and one before the winner follows it. With a
gradient scaler there are more, and trials end later by them."""


class Race:
    """The plans that are tried, and their trials. Every rank makes one.

    Args:
        training: the training.
        spans: marks the spans of its steps.
        plain: the plan that compresses nothing, the first on trial.

    Attributes:
        arms: the plans, plain averaging first.
        policies: for every plan the name of the policy that has found it.
        trials: the times of their steps, by which they are compared: multiplied by what a training takes longer for
            the error of a plan.
        sent_nbytes: for every plan that had a turn, by number, the bytes that a rank has sent in a step, on the rank
            that sends most.
        recorded: for every plan that compresses and had a turn, by number, one of its steps on this rank.
        exposed_s: for every such plan the seconds for which this step has waited for communication, on the rank that
            has waited longest.
    """

    def __init__(self, training: TunedTraining, spans: StepSpans, plain: Plan) -> None:
        self._training, self._spans = training, spans
        self.arms: tuple[Plan, ...] = (plain,)
        self.policies: tuple[str, ...] = ("none",)
        self.trials = Trials.of(1)
        self._slowdowns: tuple[float, ...] = (1.0,)
        self.sent_nbytes: dict[int, float] = {}
        self.recorded: dict[int, RecordedStep] = {}
        self.exposed_s: dict[int, float] = {}

    @property
    def winner(self) -> Plan:
        """The best plan so far."""
        return self.arms[self.trials.winner]

    @property
    def computing_s(self) -> float:
        """The seconds of a span that waits for no communication; 0 if they are not known."""
        known = [self.measured_s(arm) - exposed_s for arm, exposed_s in self.exposed_s.items() if exposed_s]
        return max(min(known, default=0.0), 0.0)

    def judged_s(self, arm: int, step_s: float) -> float:
        """The seconds by which a step of an arm is judged, longer if a training needs more steps with it."""
        return step_s * self._slowdowns[arm]

    def measured_s(self, arm: int) -> float:
        """The median step of an arm, in seconds; infinity before its first turn."""
        return self.trials.median_s(arm) / self._slowdowns[arm]

    def join(
        self, plans: Mapping[Plan, str], incumbent: Plan | None = None, slowdowns: Sequence[float] | None = None
    ) -> bool:
        """Let plans take part that do not yet, and return whether there are any.

        Args:
            plans: the plans, with the names of the policies that have found them.
            incumbent: the one of all plans that has won an earlier race, if one has.
            slowdowns: how many times as many steps a training needs with each of the plans, the same on all ranks; by
                default as many as with plain steps.
        """
        slower = dict(zip(plans, slowdowns or [1.0] * len(plans), strict=True))
        numbers = {plan.fingerprint(): number for number, plan in enumerate(self.arms)}
        for plan, policy in plans.items():
            if plan.fingerprint() not in numbers:
                numbers[plan.fingerprint()] = len(self.arms)
                self.arms, self.policies = (*self.arms, plan), (*self.policies, policy)
                self._slowdowns = (*self._slowdowns, slower[plan])
        new = len(self.arms) - len(self.trials.turns)
        self.trials = self.trials.joined(new, None if incumbent is None else numbers.get(incumbent.fingerprint()))
        return new > 0

    def run(self, last_step: int, more: int = 0) -> Steps[None]:
        """Let the plans take turns, and then the best one run.

        Plans that are in doubt differ little from plain steps, so that going on with their trials costs nothing. Plans
        that some rank cannot build are left out, with a warning.

        Args:
            last_step: the number of steps of the training at which turns have ended, unless some plan has had none.
            more: the steps by which they end later at most if several plans are close, or the outcome is in doubt.

        Raises:
            Refused: a plan may not follow, or none can be built besides plain averaging.
        """
        training = self._training
        while (turn := self.trials.next_turn(last_step - CHANGES - training.steps, more)) is not None:
            try:
                yield from training.changed(self.arms[turn.arm])
            except NotBuilt as failure:
                self.trials = self.trials.without(turn.arm)
                if self.trials.arms in ((), (PLAIN,)) or turn.arm == PLAIN:
                    raise
                building = f"building {summary_of(self.arms[turn.arm], training.ranks.world_size)}"
                training.say(failed(building, str(failure), "other plans"), level=logging.WARNING)
                continue
            yield from self._take(turn)
        yield from training.changed(self.winner)

    def _take(self, turn: Turn) -> Steps[None]:
        """Take the times of a turn whose plan runs now."""
        training, spans = self._training, self._spans
        tracer, compresses = training.frontend.runtime.tracer, turn.arm != PLAIN
        spans.meet()
        for number in range(turn.steps):
            if number == UNCOUNTED and compresses:
                tracer.ask()
            yield
            spans.end_step(counts=number >= UNCOUNTED)
        recorded = tracer.last if compresses else None
        exposed_s = 0.0 if recorded is None else recorded.exposed_s
        mine = [training.frontend.sent_nbytes_per_step(), exposed_s, *bounds_of(spans.taken())]
        nbytes, waited_s, *maxima = training.ranks.slowest(mine)
        self.trials = self.trials.after(turn.arm, [self.judged_s(turn.arm, each) for each in of_all_ranks(maxima)])
        self.sent_nbytes[turn.arm], self.exposed_s[turn.arm] = nbytes, waited_s
        if recorded is not None:
            self.recorded[turn.arm] = recorded


@dataclass(frozen=True)
class Tuned:
    """The outcome of trials, on which the running phase builds.

    Attributes:
        trace: the recorded steps.
        accuracy: the rule of accuracy.
        step_s: the measured step of the plan that has won, in seconds.
        none_s: the measured plain step.
        computing_s: the part of a step that waits for no communication; 0 if it is not known.
    """

    trace: ModelTrace
    accuracy: AccuracyLike
    step_s: float
    none_s: float
    computing_s: float = 0.0
