"""Turns of real training steps: several plans run one after the other, and the best one stays.

Every ``yield`` is a training step.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from ...communication.clocks import clock_of
from ...plans.names import summary_of
from ...plans.plan import Plan
from ..decisions import sentences, short_sentences
from .rules import MORE, STEPS
from .training import NotBuilt, Steps, TunedTraining
from .trials import PLAIN, TURN, UNCOUNTED, Trials, Turn

CHANGES = 2
"""Exact steps that a turn may take besides its own: one before it, and one before the winner follows it. With a
gradient scaler there are more, and trials end later by them."""


@dataclass(frozen=True)
class Played:
    """The trials of some plans, and what was sent in them.

    Attributes:
        trials: the times of their steps.
        sent_nbytes: for every plan that had a turn, by number, the bytes that a rank has sent in a step, on the rank
            that sends most.
    """

    trials: Trials
    sent_nbytes: dict[int, float] = field(default_factory=dict)


def played(
    training: TunedTraining,
    arms: Sequence[Plan],
    last_step: int,
    predicted_s: Sequence[float | None] = (),
    incumbent: Plan | None = None,
) -> Steps[Played]:
    """Let plans run in turns, up to a step, and then the best one.

    Plans that are in doubt differ little from plain steps, so that going on with their trials costs nothing. Plans that
    some rank cannot build are left out, with a warning.

    Args:
        training: the training.
        arms: the plans, plain averaging first.
        last_step: the number of steps of the training at which trials have ended, unless that leaves no turn to some
            plan, because what came before has taken many steps, or several plans are close, or the outcome is in doubt.
            In doubt they end up to :data:`~.rules.MORE` steps later, or :data:`~.rules.STEPS` if a plan has won before,
            which stays in doubt.
        predicted_s: for every plan the predicted seconds of a step, as for :meth:`~.trials.Trials.of`.
        incumbent: the one of the plans that has won earlier trials, if one has.

    Raises:
        Refused: a plan may not follow, or none can be built besides plain averaging.
    """
    numbers = {plan.fingerprint(): number for number, plan in enumerate(arms)}
    earlier = None if incumbent is None else numbers.get(incumbent.fingerprint())
    trials, sent_nbytes = Trials.of(len(arms), predicted_s, earlier), {}
    more = MORE if earlier in (None, PLAIN) else STEPS
    last_step = max(last_step, training.steps + CHANGES + TURN * len(arms))
    while (turn := trials.next_turn(last_step - CHANGES - training.steps, more)) is not None:
        try:
            yield from training.changed(arms[turn.arm])
        except NotBuilt as failure:
            trials = trials.without(turn.arm)
            if trials.arms in ((), (PLAIN,)) or turn.arm == PLAIN:
                raise
            _leave_out(training, summary_of(arms[turn.arm], training.ranks.world_size), str(failure))
            continue
        sent = (*(yield from _timed(training, turn)), training.frontend.sent_nbytes_per_step())
        *step_s, nbytes = training.ranks.slowest(sent)
        trials, sent_nbytes[turn.arm] = trials.after(turn.arm, step_s), nbytes
    yield from training.changed(arms[trials.winner])
    return Played(trials, sent_nbytes)


def _leave_out(training: TunedTraining, plan: str, error: str) -> None:
    """Say that a plan is not tried, because it cannot be built."""
    given = (f"building {plan}", error, "other plans")
    training.say((sentences.failed(*given), short_sentences.failed(*given)), level=logging.WARNING)


def _timed(training: TunedTraining, turn: Turn) -> Steps[list[float]]:
    """The seconds of the counted steps of a turn, on this rank."""
    clock, marks = clock_of(training.frontend.device), []
    for number in range(turn.steps):
        yield
        if number >= UNCOUNTED - 1:
            marks.append(clock.mark())
    return [clock.seconds(*pair) for pair in itertools.pairwise(marks)]
