"""Sentences of decisions for pages, where figures, policy and step stand beside them.

The log has longer ones (:mod:`.sentences`), with all figures in one line.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...plans.numbers import change, duration, plural, three_digits, whole_percent
from .sentences import PLAIN, listed
from .tried import AccuracyRule, PlainSteps, Tried, waiting_s, why_not_more


def compresses(
    recorded: PlainSteps, winner: Tried, others: Sequence[Tried], rule: AccuracyRule, next_rule: AccuracyRule | None
) -> str:
    """The sentences when a plan that compresses has won. The arguments are those of
    :func:`~gckernels.sync.tuning.decisions.sentences.compresses`."""
    among = f"The fastest of {len(others) + 1} plans" if others else "The plan that was found"
    return f"{among}: {winner.plan}. {_capitalised(why_not_more(recorded, winner, rule, next_rule))}."


def stays_plain(recorded: PlainSteps, tried: Sequence[Tried], rule: AccuracyRule) -> str:
    """The sentences when no plan has won. The arguments are those of
    :func:`~gckernels.sync.tuning.decisions.sentences.stays_plain`."""
    if not tried:
        return f"Nothing is compressed: the rule {rule.name} allows no compressor here."
    best = min(tried, key=lambda each: each.measured_s)
    waits_s = waiting_s(recorded)
    hidden = "" if waits_s is None else f" Only {duration(waits_s)} of a step wait for communication."
    took = f"{duration(best.measured_s)} ({change(best.measured_s, recorded.plain_s)})"
    return f"Nothing is compressed: the best of {plural(len(tried), 'plan')} tried took {took}.{hidden}"


def resumed() -> str:
    """The sentence when a saved plan runs again, without trials."""
    return "The saved plan goes on, without trials."


def restarted(why: str) -> str:
    """The sentence when a saved plan runs until the tuning, which begins anew, has found one.

    Args:
        why: why the plan does not stay.
    """
    return f"The saved plan is tuned anew: {why}."


def left(plan: str, why: str) -> str:
    """The sentences when a saved plan does not go on. The arguments are those of
    :func:`~gckernels.sync.tuning.decisions.sentences.left`."""
    return f"The saved plan is left: {why}. Its residuals are sent exactly."


def given(refusal: str = "") -> str:
    """The sentence when the training changes its plan itself.

    Args:
        refusal: why no tuning would choose the plan; empty if one could.
    """
    although = f", although {refusal}" if refusal else ""
    return f"The plan was given by the training, and stays{although}."


def drifted(measured_s: float, expected_s: float) -> str:
    """The sentence when steps take another time than expected, and the plan is made anew."""
    return f"{_longer('Steps are', measured_s, expected_s)} than expected. New plans are made and tried."


def link_changed(factor: float) -> str:
    """The sentence when the link has changed.

    Args:
        factor: how many times as long as before a step waits for communication.
    """
    waits = f"{three_digits(factor)} times as long as" if factor >= 1 else f"{whole_percent(factor)} of the time of"
    return f"Steps wait for communication {waits} before. New plans are made and tried."


def tries_plain(measured_s: float, none_s: float) -> str:
    """The sentence when compressed steps are slower than plain ones were."""
    return f"{_longer('Compressed steps are', measured_s, none_s)} than plain ones were. Plain ones are tried again."


def faster(measured_s: float, expected_s: float) -> str:
    """The sentence when compressed steps are faster than in their trials, so that plain ones may be faster still."""
    return f"{_longer('Compressed steps are', measured_s, expected_s)} than expected. Plain ones are tried again."


def refined(units: Sequence[str], before: str, after: str, why: str) -> str:
    """The sentence when units get a finer compressor. The arguments are those of
    :func:`~gckernels.sync.tuning.decisions.sentences.refined`."""
    return f"{after} follows {before} for {listed(units)}: {why}."


def failed(doing: str, error: str, goes_on: str = PLAIN, again_steps: int | None = None) -> str:
    """The sentences when something has failed. The arguments are those of
    :func:`~gckernels.sync.tuning.decisions.sentences.failed`."""
    again = "" if again_steps is None else f" The next attempt is in {again_steps:,} steps."
    cause = " ".join(error.split()).rstrip(".")
    return f"{_capitalised(doing)} failed: {cause}. Training goes on with {goes_on}.{again}"


def _longer(subject: str, now_s: float, before_s: float) -> str:
    part = change(now_s, before_s)
    return f"{subject} {part.lstrip('+-')} {'shorter' if part.startswith('-') else 'longer'}"


def _capitalised(text: str) -> str:
    return text[:1].upper() + text[1:]
