"""Races: plans run one after the other, in turns of real training steps, and the best one stays.

Every ``yield`` is a training step.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence

from ...engine.recorded_step import RecordedStep
from ...plans.names import summary_of
from ...plans.plan import Plan
from .comparison import Times
from .sentences import failed
from .spans import StepSpans, bounds_of, of_all_ranks
from .training import NotBuilt, Steps, TunedTraining
from .trials import PLAIN, Trials, Turn
from .trials import Rules as RulesOf


class Race:
    """The plans that are tried, and their trials. Every rank makes one.

    Args:
        spans: marks the spans of its steps.
        plain: the plan that compresses nothing, the first on trial.

    Attributes:
        arms: the plans, plain averaging first.
        policies: for every plan the name of the policy that has found it.
        trials: the rules, and the times of the plans.
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
        self.trials = Trials()
        self.sent_nbytes: dict[int, float] = {}
        self.recorded: dict[int, RecordedStep] = {}
        self.exposed_s: dict[int, float] = {}

    @property
    def winner(self) -> Plan:
        """The plan that stays."""
        return self.arms[self.trials.incumbent]

    @property
    def computing_s(self) -> float:
        """The seconds of a span that waits for no communication; 0 if they are not known."""
        known = [self.trials.median_s(arm) - exposed_s for arm, exposed_s in self.exposed_s.items() if exposed_s]
        return max(min(known, default=0.0), 0.0)

    def join(self, plans: Mapping[Plan, str], slowdowns: Sequence[float] | None = None) -> list[int]:
        """Let plans take part that do not yet, and return their numbers.

        Args:
            plans: the plans, with the names of the policies that have found them.
            slowdowns: how many times as many steps a training needs with each of the plans, the same on all ranks; by
                default as many as with plain steps.
        """
        known, first = {plan.fingerprint() for plan in self.arms}, len(self.arms)
        handicaps: list[float] = []
        for (plan, policy), slowdown in zip(plans.items(), slowdowns or [1.0] * len(plans), strict=True):
            if plan.fingerprint() not in known:
                known.add(plan.fingerprint())
                self.arms, self.policies = (*self.arms, plan), (*self.policies, policy)
                handicaps.append(slowdown)
        self.trials.join(handicaps)
        return list(range(first, len(self.arms)))

    def resume(self, plan: Plan, step_s: float, none_s: float) -> None:
        """Continue a race that a plan has won, which takes part and runs now."""
        numbers = {arm.fingerprint(): number for number, arm in enumerate(self.arms)}
        self.trials.resume(numbers[plan.fingerprint()], step_s, none_s)

    def replace(self, plan: Plan, is_refused: Callable[[Plan], bool]) -> None:
        """Let a plan take the place of the winner, which runs, and leave plans out that have its faults."""
        own = self.trials.incumbent
        self.arms = tuple(plan if arm == own else each for arm, each in enumerate(self.arms))
        self.trials.renew()
        for arm, each in enumerate(self.arms):
            if arm not in (own, PLAIN) and is_refused(each):
                self.trials.leave_out(arm)

    def run(self) -> Steps[None]:
        """Let the plans that had no turn take part in a race, and then the best one run.

        Plans that some rank cannot build are left out, with a warning.

        Raises:
            Refused: a plan may not follow, or none can be built besides plain averaging.
        """
        yield from self._play(self.trials.race())

    def compare(self, challengers: Sequence[int], before: Times | None = None) -> Steps[None]:
        """Let plans challenge the winner so far, and then the new winner run.

        Args:
            challengers: the numbers of the plans.
            before: the seconds of the last steps, of the slowest rank each; ``None`` if they are not known.

        Raises:
            Refused: as :meth:`run`.
        """
        yield from self._play(self.trials.compare(challengers, before))

    def _play(self, rules: RulesOf[None]) -> Steps[None]:
        training, times = self._training, None
        with contextlib.suppress(StopIteration):
            turn = next(rules)
            while True:
                try:
                    yield from training.changed(self.arms[turn.arm])
                except NotBuilt as failure:
                    left = set(self.trials.arms) - {PLAIN, turn.arm}
                    if not left or turn.arm in (PLAIN, self.trials.incumbent):
                        raise
                    building = f"building {summary_of(self.arms[turn.arm], training.ranks.world_size)}"
                    training.say(failed(building, str(failure), "other plans"), level=logging.WARNING)
                    times = None
                else:
                    times = yield from self._take(turn)
                turn = rules.send(times)
        yield from training.changed(self.winner)

    def _take(self, turn: Turn) -> Steps[Times]:
        """The seconds of the counted steps of a turn, whose plan runs now."""
        training, spans = self._training, self._spans
        tracer = training.frontend.runtime.tracer
        is_recorded = turn.arm != PLAIN and turn.arm not in self.recorded
        spans.meet()
        for number in range(turn.steps):
            if number == turn.uncounted and is_recorded:
                tracer.ask()
            yield
            spans.end_step(counts=number >= turn.uncounted)
        recorded = tracer.last if is_recorded else None
        exposed_s = 0.0 if recorded is None else recorded.exposed_s
        mine = [training.frontend.sent_nbytes_per_step(), exposed_s, *bounds_of(spans.taken())]
        nbytes, waited_s, *maxima = training.ranks.slowest(mine)
        self.sent_nbytes[turn.arm] = nbytes
        if is_recorded:
            self.exposed_s[turn.arm] = waited_s
        if recorded is not None:
            self.recorded[turn.arm] = recorded
        return of_all_ranks(maxima)
