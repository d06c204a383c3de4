"""Sentences of decisions: what was measured, predicted and chosen, and why not more. Each is one line of the log.

Everything is given, nothing is looked up here. A plan is given as the words of
:func:`~gckernels.sync.plans.names.summary_of`.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...plans.numbers import change, duration, plural, three_digits, two_digits, volume, whole_percent
from .tried import AccuracyRule, PlainSteps, Tried, waiting_s, why_not_more

PLAIN = "plain averaging"


def resumed(step: int, plan: str) -> str:
    """The sentence when a saved plan runs again, without trials."""
    return f"resumed at step {step:,} with the saved plan: {plan}; no trials"


def restarted(plan: str, why: str) -> str:
    """The sentence when a saved plan runs until the tuning, which begins anew, has found one.

    Args:
        plan: the plan.
        why: why the plan does not stay.
    """
    return f"resumed with the saved plan: {plan}; it is tuned anew: {why}"


def left(plan: str, why: str) -> str:
    """The sentence when a saved plan does not go on.

    Args:
        plan: the plan.
        why: why it may not run.
    """
    return f"the saved plan is left: {plan}; {why}; what it has not sent is sent exactly, then {PLAIN} goes on"


def given(plan: str, refusal: str = "") -> str:
    """The sentence when the training changes its plan itself.

    Args:
        plan: the plan that it has given.
        refusal: why no tuning would choose it; empty if one could.
    """
    although = f", although {refusal}" if refusal else ""
    return f"keeping the plan that you set{although}: {plan}; automatic planning is off"


# -------------------------------------------------------------------- the plan


def tries(plans: Sequence[tuple[str, float | None]], found_s: float) -> str:
    """The sentence before plans are tried.

    Args:
        plans: the plans, at least one, with the predicted seconds of a step.
        found_s: how long the search has taken, in seconds of a core.
    """
    named = [plan + ("" if step_s is None else f", predicted {duration(step_s)}") for plan, step_s in plans]
    found = f"{plural(len(plans), 'plan')} predicted to be faster, found in {three_digits(found_s)} s"
    return f"{found}, to be tried: {'; '.join(named)}"


def compresses(
    recorded: PlainSteps, winner: Tried, others: Sequence[Tried], rule: AccuracyRule, next_rule: AccuracyRule | None
) -> str:
    """The sentence when a plan that compresses has won.

    Args:
        recorded: the plain steps.
        winner: the plan.
        others: the other plans that were tried.
        rule: the rule of accuracy.
        next_rule: a rule that allows more, which follows later in the training; ``None`` if none does.
    """
    error = "error not known" if winner.error is None else f"error {two_digits(winner.error)} {rule.allowed}"
    sent = "" if winner.sent_nbytes is None else f", {volume(winner.sent_nbytes)} sent"
    chosen = (
        f"chosen: {winner.named}: {winner.predicted}measured "
        f"{duration(winner.measured_s)} ({change(winner.measured_s, recorded.plain_s)}){sent}; {error}"
    )
    why = f"why not more: {why_not_more(recorded, winner, rule, next_rule)}"
    return "; ".join([_measured(recorded), chosen, *_others(others), why])


def stays_plain(recorded: PlainSteps, tried: Sequence[Tried], rule: AccuracyRule, how: str = "without a hook") -> str:
    """The sentence when no plan has won.

    Args:
        recorded: the plain steps.
        tried: the plans that were tried.
        rule: the rule of accuracy.
        how: the way in which plain steps run from now on.
    """
    if not tried:
        why = f"the rule {rule.name} allows no compressor here"
    else:
        best = min(tried, key=lambda each: each.measured_s)
        why = (
            f"the best of {plural(len(tried), 'plan')} tried is {best.named}: {best.predicted}measured "
            f"{duration(best.measured_s)} ({change(best.measured_s, recorded.plain_s)})"
        )
    waits_s = waiting_s(recorded)
    hidden = "" if waits_s is None else f"; only {duration(waits_s)} of a step wait for communication"
    return f"{_measured(recorded)}; nothing is compressed: {why}{hidden}; {PLAIN} goes on, {how}"


def _measured(recorded: PlainSteps) -> str:
    return f"{plural(recorded.buckets, 'bucket')}, {volume(recorded.nbytes)}; plain {duration(recorded.plain_s)}"


def _others(others: Sequence[Tried]) -> list[str]:
    if not others:
        return []
    listed = ", ".join(
        f"{each.named} {duration(each.measured_s)}" for each in sorted(others, key=lambda each: each.measured_s)
    )
    return [f"also tried: {listed}"]


# -------------------------------------------------------------------- while it runs


def drifted(measured_s: float, expected_s: float, windows: int, steps: int) -> str:
    """The sentence when steps take another time than expected, and the plan is made anew.

    Args:
        measured_s: the median time of a step in the last window.
        expected_s: the expected time.
        windows: for how many windows.
        steps: the steps of a window.
    """
    return (
        f"a step takes {duration(measured_s)} where {duration(expected_s)} are expected "
        f"({change(measured_s, expected_s)}), for {plural(windows, 'window')} of {steps} steps: planning anew"
    )


def link_changed(measured_s: float, expected_s: float, factor: float) -> str:
    """The sentence when the link has changed, and is measured anew.

    Args:
        measured_s: the median time of a step in the last window.
        expected_s: the expected time.
        factor: how many times as long as before a step waits for communication; below 1 it waits shorter.
    """
    waits = f"{three_digits(factor)} times as long as" if factor >= 1 else f"{whole_percent(factor)} of the time of"
    return (
        f"a step takes {duration(measured_s)} where {duration(expected_s)} are expected "
        f"({change(measured_s, expected_s)}), because it waits for communication {waits} before: planning anew"
    )


def tries_plain(measured_s: float, none_s: float) -> str:
    """The sentence when compressed steps are slower than plain ones were."""
    return (
        f"a compressed step takes {duration(measured_s)}, a plain one took {duration(none_s)} "
        f"({change(measured_s, none_s)}): trying {PLAIN} again"
    )


def faster(measured_s: float, expected_s: float) -> str:
    """The sentence when compressed steps are faster than in their trials, so that plain ones may be faster still.

    Args:
        measured_s: the median time of a step in the last window.
        expected_s: the expected time.
    """
    return (
        f"a compressed step takes {duration(measured_s)} where {duration(expected_s)} are expected "
        f"({change(measured_s, expected_s)}), so compression may pay no longer: trying {PLAIN} again"
    )


def refined(units: Sequence[str], before: str, after: str, why: str) -> str:
    """The sentence when units get a finer compressor.

    Args:
        units: the keys of the units.
        before: their compressor so far.
        after: their compressor from now on.
        why: the observation behind it, such as ``"its residual grows without bound"``.
    """
    return f"{listed(units)}: {why}; {after} instead of {before} from now on"


def listed(units: Sequence[str]) -> str:
    """The keys of units, of which the first three are named."""
    return ", ".join(units[:3]) + (f" and {len(units) - 3:,} others" if len(units) > 3 else "")


def failed(doing: str, error: str, goes_on: str = PLAIN, again_steps: int | None = None) -> str:
    """The sentence when something has failed, and the training goes on.

    Args:
        doing: what was done, such as ``"planning"``.
        error: the error.
        goes_on: how the training goes on.
        again_steps: after how many steps it is tried again; ``None`` if it is not.
    """
    again = "" if again_steps is None else f"; next attempt in {again_steps:,} steps"
    return f"{doing} failed: {' '.join(error.split())}; training goes on with {goes_on}{again}"
