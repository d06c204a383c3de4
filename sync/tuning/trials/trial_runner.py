"""Turns of real training steps: several plans run one after the other, and the best one stays.

Every ``yield`` is a training step.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

from ...communication.agreement import Disagreement, Failure, together
from ...communication.clocks import clock_of
from ...communication.ranks import Ranks
from ...frontends.handle import Handle
from ...plans.names import summary_of
from ...plans.plan import Plan
from ...stats.decisions import Decision
from ..decisions import sentences, short_sentences
from .rules import MORE, STEPS
from .trials import PLAIN, TURN, UNCOUNTED, Trials, Turn

CHANGES = 2
"""Exact steps that a turn may take besides its own: one before it, and one before the winner follows it. With a
gradient scaler there are more, and trials end later by them."""

T = TypeVar("T")
Steps: TypeAlias = Generator[None, None, T]
"""A part of the tuning that takes some training steps, one for every ``yield``, and returns something."""


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


class Refused(Exception):
    """Raised on all ranks together if a plan may not follow. The one that runs goes on."""


class NotBuilt(Refused):
    """Raised on all ranks together if they cannot build what a plan needs. The plan that runs goes on."""


def changed(handle: Handle, plan: Plan) -> Steps[None]:
    """Let a plan run from the next step on, after the steps that the change takes.

    Raises:
        Refused: a rank refuses the plan.
        NotBuilt: a rank cannot build what it needs, or computes in another way than others.
        RuntimeError: a rank is gone.
    """
    if plan != handle.plan or handle.is_changing:
        checked = together(handle.group, handle.device, lambda: handle._check(plan))
        if isinstance(checked, Failure):
            raise Refused(checked.text)
        failures: list[str] = []
        try:
            agreed = handle._agreed(plan)
        except Disagreement as error:
            raise NotBuilt(str(error)) from error
        handle._let_follow(agreed, fail=failures.append)
        while handle.is_changing:
            yield
        if failures:
            raise NotBuilt(failures[0])


def played(
    handle: Handle,
    ranks: Ranks,
    arms: Sequence[Plan],
    last_step: int,
    predicted_s: Sequence[float | None] = (),
    incumbent: Plan | None = None,
) -> Steps[Played]:
    """Let plans run in turns, up to a step, and then the best one.

    Plans that are in doubt differ little from plain steps, so that going on with their trials costs nothing. Plans that
    some rank cannot build are left out, with a warning.

    Args:
        handle: the attachment or synchronizer.
        ranks: all ranks.
        arms: the plans, plain averaging first.
        last_step: the number of steps of the handle at which trials have ended, unless that leaves no turn to some
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
    last_step = max(last_step, handle.steps + CHANGES + TURN * len(arms))
    while (turn := trials.next_turn(last_step - CHANGES - handle.steps, more)) is not None:
        try:
            yield from changed(handle, arms[turn.arm])
        except NotBuilt as failure:
            trials = trials.without(turn.arm)
            if trials.arms in ((), (PLAIN,)) or turn.arm == PLAIN:
                raise
            _leave_out(handle, summary_of(arms[turn.arm], ranks.world_size), str(failure))
            continue
        *step_s, nbytes = ranks.slowest([*(yield from _timed(handle, turn)), handle.sent_nbytes_per_step()])
        trials, sent_nbytes[turn.arm] = trials.after(turn.arm, step_s), nbytes
    yield from changed(handle, arms[trials.winner])
    return Played(trials, sent_nbytes)


def _leave_out(handle: Handle, plan: str, error: str) -> None:
    """Say that a plan is not tried, because it cannot be built."""
    text, short = (each.failed(f"building {plan}", error, "other plans") for each in (sentences, short_sentences))
    fingerprint = handle.plan.fingerprint()
    handle.decide(Decision(handle.steps, text, handle._policy(), fingerprint, level=logging.WARNING, short=short))


def _timed(handle: Handle, turn: Turn) -> Steps[list[float]]:
    """The seconds of the counted steps of a turn, on this rank."""
    clock, marks = clock_of(handle.device), []
    for number in range(turn.steps):
        yield
        if number >= UNCOUNTED - 1:
            marks.append(clock.mark())
    return [clock.seconds(*pair) for pair in itertools.pairwise(marks)]
