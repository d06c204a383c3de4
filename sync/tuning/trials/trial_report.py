"""Outcomes of trials, as decisions that people read."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

from ...accuracy.accuracy import relative_error
from ...plans.names import summary_of
from ...plans.numbers import change, duration, plural, two_digits, volume
from ...plans.plan import Frontend
from ...stats.decisions import Decision
from ...traces.model_trace import ModelTrace
from ...traces.traced_tensors import TraceError
from .race import Race
from .rules import Phase
from .sentences import PLAIN as PLAIN_AVERAGING
from .sentences import Sentences, capitalised
from .trials import LEAST_GAIN, PLAIN

_BARE = 0.05
"""The part of a step below which waiting for communication is not worth a word."""


@dataclass(frozen=True)
class PlainSteps:
    """Plain steps that were measured."""

    buckets: int  # number of buckets, or of launches
    nbytes: float  # bytes of all gradients of a rank
    plain_s: float  # the time of a plain step on the slowest rank
    bare_s: float | None = None  # the time of a step that does not wait for communication; None if it is not known

    def __str__(self) -> str:
        return f"{plural(self.buckets, 'bucket')}, {volume(self.nbytes)}; plain {duration(self.plain_s)}"


@dataclass(frozen=True)
class Tried:
    """A plan that was tried."""

    plan: str  # the plan in words
    policy: str  # the name of the policy that has found it
    predicted_s: float | None  # the predicted time of a step; None without a prediction
    measured_s: float  # the measured time of a step on the slowest rank
    error: float | None  # the relative error of the gradients that it causes; None if it is not known
    sent_nbytes: float | None = None  # the bytes that a rank sends in a step; None if they are not known

    @property
    def named(self) -> str:
        """The plan and the policy, which is ``all`` without its compressor, because the plan has that."""
        return f"{self.plan} ({self.policy.partition(':')[0]})"

    def times(self, plain_s: float) -> str:
        """The predicted and the measured time of a step, the latter beside a plain step's."""
        predicted = "" if self.predicted_s is None else f"predicted {duration(self.predicted_s)}, "
        return f"{predicted}measured {duration(self.measured_s)} ({change(self.measured_s, plain_s)})"


def outcome(
    step: int, trace: ModelTrace, race: Race, stages: Sequence[Phase], world_size: int, frontend: Frontend
) -> Decision:
    """The decision for the plan that has won a race.

    Args:
        step: the number of synchronised steps before it.
        trace: the model, with times if steps were recorded.
        race: the plans that were tried, and their times.
        stages: the rule of accuracy, and those that follow it later.
        world_size: the number of ranks.
        frontend: the kind of the model.
    """
    trials = race.trials
    plain_s = trials.median_s(PLAIN)
    recorded = PlainSteps(max(len(trace.buckets), 1), trace.nbytes, plain_s, race.computing_s or None)
    tried = {arm: _tried(race, arm, trace, world_size) for arm in sorted(race.sent_nbytes) if arm != PLAIN}
    winner = tried.pop(trials.incumbent, None)
    if winner is None:
        sentences = stays_plain(recorded, list(tried.values()), stages[0], frontend.traits.plain_by)
    else:
        sentences = compresses(recorded, winner, list(tried.values()), *stages[:2])
    for note in stages[0].notes:
        sentences = Sentences(f"{sentences.log}; {note}", f"{sentences.page} {capitalised(note)}.")
    return Decision(
        step,
        sentences.log,
        policy="none" if winner is None else winner.policy,
        plan_fingerprint=race.winner.fingerprint(),
        predicted_s=None if winner is None else winner.predicted_s,
        measured_s=_finite(trials.median_s(trials.incumbent)),
        none_s=_finite(plain_s),
        error=None if winner is None else winner.error,
        short=sentences.page,
    )


def overtaken(step: int, trace: ModelTrace, race: Race, before: int, why: str, world_size: int) -> Decision:
    """The decision for the plan that has beaten the one from before it.

    Args:
        step, trace, race, world_size: as for :func:`outcome`.
        before: the number of the plan from before.
        why: the reason for the comparison, as a clause.
    """
    winner, measured_s, trials = race.trials.incumbent, race.trials.median_s(race.trials.incumbent), race.trials
    old, new = (_tried(race, arm, trace, world_size) for arm in (before, winner))
    compared = f"{new.named} {duration(new.measured_s)}, {old.named} {duration(old.measured_s)}"
    return Decision(
        step,
        f"{why}; compared in turns: {compared} ({change(old.measured_s, new.measured_s)}); chosen: {new.named}",
        policy=race.policies[winner],
        plan_fingerprint=race.winner.fingerprint(),
        predicted_s=new.predicted_s,
        measured_s=_finite(measured_s),
        none_s=_finite(trials.median_s(PLAIN)) if PLAIN in (before, winner) else None,
        error=None if winner == PLAIN else new.error,
        short=f"{capitalised(why)}. In turns, {new.plan} takes {duration(new.measured_s)} a step, and {old.plan} "
        f"{duration(old.measured_s)}.",
    )


def _finite(seconds: float) -> float | None:
    """A time; ``None`` if the plan has had no turn."""
    return seconds if math.isfinite(seconds) else None


def _tried(race: Race, arm: int, trace: ModelTrace, world_size: int) -> Tried:
    plan, error = race.arms[arm], None
    with contextlib.suppress(TraceError):  # no error is known
        error = relative_error(plan, trace)
    predicted_s = None if plan.prediction is None else plan.prediction.step_s
    measured_s, sent_nbytes = race.trials.median_s(arm), race.sent_nbytes[arm]
    return Tried(summary_of(plan, world_size), race.policies[arm], predicted_s, measured_s, error, sent_nbytes)


# -------------------------------------------------------------------- in words


def compresses(
    recorded: PlainSteps, winner: Tried, others: Sequence[Tried], rule: Phase, next_rule: Phase | None = None
) -> Sentences:
    """The sentences when a plan that compresses has won.

    Args:
        winner: the plan.
        others: the other plans that were tried.
        rule: the rule of accuracy.
        next_rule: a rule that allows more, which follows later in the training; ``None`` if none does.
    """
    largest, error = rule.accuracy.largest, "error not known"
    if winner.error is not None:
        allowed = "allowed by the list" if largest is None else f"of {two_digits(largest)} allowed"
        error = f"error {two_digits(winner.error)} {allowed}"
    sent = "" if winner.sent_nbytes is None else f", {volume(winner.sent_nbytes)} sent"
    parts = [str(recorded), f"chosen: {winner.named}: {winner.times(recorded.plain_s)}{sent}", error]
    if others:
        ordered = sorted(others, key=lambda each: each.measured_s)
        parts.append("also tried: " + ", ".join(f"{each.named} {duration(each.measured_s)}" for each in ordered))
    why = _why_not_more(recorded, winner, rule, next_rule)
    among = f"The fastest of {len(others) + 1} plans" if others else "The plan that was found"
    return Sentences("; ".join([*parts, f"why not more: {why}"]), f"{among}: {winner.plan}. {capitalised(why)}.")


def _why_not_more(recorded: PlainSteps, winner: Tried, rule: Phase, next_rule: Phase | None) -> str:
    """The reason why a plan does not gain more, as a clause."""
    bare_s = recorded.bare_s
    if bare_s is not None and winner.measured_s - bare_s < _BARE * winner.measured_s:
        return "hardly anything of a step waits for communication"
    waits = "" if bare_s is None else f"{duration(winner.measured_s - bare_s)} of a step still wait for communication; "
    if next_rule is not None:
        return f"{waits}the rule {next_rule.name} follows later"
    if rule.name == "safe":
        return f'{waits}plans with a larger error need accuracy="aggressive"'
    return f"{waits}no faster plan that the rule {rule.name} allows was found"


def stays_plain(recorded: PlainSteps, tried: Sequence[Tried], rule: Phase, how: str = "without a hook") -> Sentences:
    """The sentences when no plan has won.

    Args:
        tried: the plans that were tried.
        rule: the rule of accuracy.
        how: the way in which plain steps run from now on.
    """
    waits = ""
    if recorded.bare_s is not None and recorded.plain_s - recorded.bare_s < _BARE * recorded.plain_s:
        waits = f"only {duration(max(recorded.plain_s - recorded.bare_s, 0.0))} of a step wait for communication"
    if not tried:
        why = page = f"the rule {rule.name} allows no compressor here"
    else:
        best = min(tried, key=lambda each: each.measured_s)
        among, plain_s = f"the best of {plural(len(tried), 'plan')} tried", recorded.plain_s
        why = f"{among} is {best.named}: {best.times(plain_s)}"
        page = f"{among} took {duration(best.measured_s)} ({change(best.measured_s, plain_s)})"
        if best.measured_s < plain_s:
            too_little = f"a plan must save more than {100 * LEAST_GAIN:.0f} %, and more than noise"
            why, page = f"{why}; {too_little}", f"{page}. {capitalised(too_little)}"
        page += f". {capitalised(waits)}" if waits else ""
    why += f"; {waits}" if waits else ""
    text = f"{recorded}; nothing is compressed: {why}; {PLAIN_AVERAGING} goes on, {how}"
    return Sentences(text, f"Nothing is compressed: {page}.")
