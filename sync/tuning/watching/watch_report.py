"""Sentences of what happens while a plan runs: why it is left, and which units get another compressor.

They have the two lengths of :class:`~..trials.sentences.Sentences`. Times are in seconds: the median of a step in the
last window, and of the step that was expected, or of a plain one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from ...plans.numbers import change, duration, two_digits
from ...plans.plan import Plan
from ..trials.sentences import Sentences
from .guard import Fault
from .pace import Occasion


def reason(occasion: Occasion, step_s: float, usual_s: float) -> str:
    """The reason for a comparison, as a clause: steps take ``step_s``, and took ``usual_s`` before."""
    if occasion is Occasion.DUE:
        return "plans were compared again"
    return f"a step takes {duration(step_s)} where {duration(usual_s)} was usual ({change(step_s, usual_s)})"


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
