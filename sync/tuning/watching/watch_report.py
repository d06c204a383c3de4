"""Sentences of what happens while a plan runs: why it is left, and which units get another compressor.

They have the two lengths of :class:`~..trials.sentences.Sentences`. Times are in seconds: the median of a step in the
last window, and of the step that was expected, or of a plain one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from ...plans.numbers import change, duration, plural, three_digits, two_digits, whole_percent
from ...plans.plan import Plan
from ..trials.sentences import PLAIN, Sentences
from .drift import PATIENCE, WINDOW, Action, Expected
from .guard import Fault


def reason(action: Action, step_s: float, expected: Expected) -> Sentences:
    """The sentences of what a window asks for, whose median step has taken ``step_s``."""
    match action:
        case Action.REPLAN_LINK:
            return link_changed(step_s, expected.step_s, expected.waiting(step_s))
        case Action.TRY_NONE if step_s < expected.step_s:
            return faster(step_s, expected.step_s)
        case Action.TRY_NONE:
            return tries_plain(step_s, expected.none_s or 0.0)
        case _:
            return drifted(step_s, expected.step_s, PATIENCE, WINDOW)


def refinements(before: Plan, after: Plan, faults: Sequence[Fault]) -> list[Sentences]:
    """The sentences of units that go from one compressor to another for the same reason."""
    old, new = ({unit.key: str(unit.compressor) for unit in plan.units} for plan in (before, after))
    alike: dict[tuple[str, str, bool], list[Fault]] = defaultdict(list)
    for fault in faults:
        alike[old[fault.key], new[fault.key], fault.grows].append(fault)
    texts = []
    for (was, becomes, grows), group in alike.items():
        worst = max(group, key=lambda fault: fault.residual if grows else fault.error)
        why = (
            f"the residual is {two_digits(worst.residual)} times as large as the gradient, and grows"
            if grows
            else f"the error is {two_digits(worst.error)}, and {two_digits(worst.limit)} are allowed"
        )
        texts.append(refined([fault.key for fault in group], was, becomes, why))
    return texts


def drifted(measured_s: float, expected_s: float, windows: int, steps: int) -> Sentences:
    """The sentences when steps take another time than expected in some windows of ``steps`` steps, and the plan is made
    anew."""
    return Sentences(
        f"a step {_takes(measured_s, expected_s)}, for {plural(windows, 'window')} of {steps} steps: planning anew",
        f"{_longer('Steps are', measured_s, expected_s)} than expected. New plans are made and tried.",
    )


def link_changed(measured_s: float, expected_s: float, factor: float) -> Sentences:
    """The sentences when the link has changed, and is measured anew: a step waits for communication ``factor`` times as
    long as before."""
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
    """The sentences when compressed steps are faster than in their trials, so that plain ones may be faster still."""
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


def _takes(measured_s: float, expected_s: float) -> str:
    times = f"{duration(measured_s)} where {duration(expected_s)} are expected"
    return f"takes {times} ({change(measured_s, expected_s)})"


def _longer(subject: str, now_s: float, before_s: float) -> str:
    part = change(now_s, before_s)
    return f"{subject} {part.lstrip('+-')} {'shorter' if part.startswith('-') else 'longer'}"
