"""Sentences of decisions: what was measured, predicted and chosen, and why not more.

Each function writes two lengths: one line for the log, with all figures, and a sentence or two for pages, where
figures, policy and step stand beside them. Everything is given, nothing is looked up here. A plan is given as the words
of :func:`~gckernels.sync.plans.names.summary_of`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ...plans.numbers import change, duration, plural, three_digits, whole_percent

PLAIN = "plain averaging"


class Sentences(NamedTuple):
    """A decision in words.

    Attributes:
        log: one line with all figures.
        page: a sentence or two without figures that stand beside them.
    """

    log: str
    page: str


def resumed(step: int, plan: str) -> Sentences:
    """The sentences when a saved plan runs again, without trials."""
    text = f"resumed at step {step:,} with the saved plan: {plan}; no trials"
    return Sentences(text, "The saved plan goes on, without trials.")


def restarted(plan: str, why: str) -> Sentences:
    """The sentences when a saved plan runs until the tuning, which begins anew, has found one.

    Args:
        plan: the plan.
        why: why the plan does not stay.
    """
    text = f"resumed with the saved plan: {plan}; it is tuned anew: {why}"
    return Sentences(text, f"The saved plan is tuned anew: {why}.")


def left(plan: str, why: str) -> Sentences:
    """The sentences when a saved plan does not go on.

    Args:
        plan: the plan.
        why: why it may not run.
    """
    text = f"the saved plan is left: {plan}; {why}; what it has not sent is sent exactly, then {PLAIN} goes on"
    return Sentences(text, f"The saved plan is left: {why}. Its residuals are sent exactly.")


def given(plan: str, refusal: str = "") -> Sentences:
    """The sentences when the training changes its plan itself.

    Args:
        plan: the plan that it has given.
        refusal: why no tuning would choose it; empty if one could.
    """
    although = f", although {refusal}" if refusal else ""
    text = f"keeping the plan that you set{although}: {plan}; automatic planning is off"
    return Sentences(text, f"The plan was given by the training, and stays{although}.")


def tries(plans: Sequence[tuple[str, float | None]], found_s: float) -> str:
    """The line of the log before plans are tried.

    Args:
        plans: the plans, at least one, with the predicted seconds of a step.
        found_s: how long the search has taken, in seconds of a core.
    """
    named = [plan + ("" if step_s is None else f", predicted {duration(step_s)}") for plan, step_s in plans]
    found = f"{plural(len(plans), 'plan')} predicted to be faster, found in {three_digits(found_s)} s"
    return f"{found}, to be tried: {'; '.join(named)}"


# -------------------------------------------------------------------- while a plan runs


def drifted(measured_s: float, expected_s: float, windows: int, steps: int) -> Sentences:
    """The sentences when steps take another time than expected, and the plan is made anew.

    Args:
        measured_s: the median time of a step in the last window.
        expected_s: the expected time.
        windows: for how many windows.
        steps: the steps of a window.
    """
    return Sentences(
        f"a step {_takes(measured_s, expected_s)}, for {plural(windows, 'window')} of {steps} steps: planning anew",
        f"{_longer('Steps are', measured_s, expected_s)} than expected. New plans are made and tried.",
    )


def link_changed(measured_s: float, expected_s: float, factor: float) -> Sentences:
    """The sentences when the link has changed, and is measured anew.

    Args:
        measured_s: the median time of a step in the last window.
        expected_s: the expected time.
        factor: how many times as long as before a step waits for communication; below 1 it waits shorter.
    """
    waits = f"{three_digits(factor)} times as long as" if factor >= 1 else f"{whole_percent(factor)} of the time of"
    return Sentences(
        f"a step {_takes(measured_s, expected_s)}, because it waits for communication {waits} before: planning anew",
        f"Steps wait for communication {waits} before. New plans are made and tried.",
    )


def tries_plain(measured_s: float, none_s: float) -> Sentences:
    """The sentences when compressed steps are slower than plain ones were."""
    return Sentences(
        f"a compressed step takes {duration(measured_s)}, a plain one took {duration(none_s)} "
        f"({change(measured_s, none_s)}): trying {PLAIN} again",
        f"{_longer('Compressed steps are', measured_s, none_s)} than plain ones were. Plain ones are tried again.",
    )


def faster(measured_s: float, expected_s: float) -> Sentences:
    """The sentences when compressed steps are faster than in their trials, so that plain ones may be faster still.

    Args:
        measured_s: the median time of a step in the last window.
        expected_s: the expected time.
    """
    return Sentences(
        f"a compressed step {_takes(measured_s, expected_s)}, so compression may pay no longer: trying {PLAIN} again",
        f"{_longer('Compressed steps are', measured_s, expected_s)} than expected. Plain ones are tried again.",
    )


def refined(units: Sequence[str], before: str, after: str, why: str) -> Sentences:
    """The sentences when units get a finer compressor.

    Args:
        units: the keys of the units, of which the first three are named.
        before: their compressor so far.
        after: their compressor from now on.
        why: the observation behind it, such as ``"its residual grows without bound"``.
    """
    listed = ", ".join(units[:3]) + (f" and {len(units) - 3:,} others" if len(units) > 3 else "")
    text = f"{listed}: {why}; {after} instead of {before} from now on"
    return Sentences(text, f"{after} follows {before} for {listed}: {why}.")


def failed(doing: str, error: str, goes_on: str = PLAIN, again_steps: int | None = None) -> Sentences:
    """The sentences when something has failed, and the training goes on.

    Args:
        doing: what was done, such as ``"planning"``.
        error: the error.
        goes_on: how the training goes on.
        again_steps: after how many steps it is tried again; ``None`` if it is not.
    """
    cause, again, next_one = " ".join(error.split()), "", ""
    if again_steps is not None:
        again = f"; next attempt in {again_steps:,} steps"
        next_one = f" The next attempt is in {again_steps:,} steps."
    return Sentences(
        f"{doing} failed: {cause}; training goes on with {goes_on}{again}",
        f"{capitalised(doing)} failed: {cause.rstrip('.')}. Training goes on with {goes_on}.{next_one}",
    )


def capitalised(text: str) -> str:
    """The text with a capital at its beginning."""
    return text[:1].upper() + text[1:]


def _takes(measured_s: float, expected_s: float) -> str:
    times = f"{duration(measured_s)} where {duration(expected_s)} are expected"
    return f"takes {times} ({change(measured_s, expected_s)})"


def _longer(subject: str, now_s: float, before_s: float) -> str:
    part = change(now_s, before_s)
    return f"{subject} {part.lstrip('+-')} {'shorter' if part.startswith('-') else 'longer'}"
