"""Sentences of a tuning that begins, goes on or fails.

Each function writes two lengths: one line for the log, with all figures, and a sentence or two for pages, where
figures, policy and step stand beside them. Everything is given, nothing is looked up here. A plan is given as the words
of :func:`~gckernels.sync.plans.names.summary_of`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

PLAIN = "plain averaging"


class Sentences(NamedTuple):
    """A decision in words."""

    log: str  # one line with all figures
    page: str  # a sentence or two without figures that stand beside them


def resumed(step: int, plan: str) -> Sentences:
    """The sentences when a saved plan runs again, without trials."""
    text = f"resumed at step {step:,} with the saved plan: {plan}; no trials"
    return Sentences(text, "The saved plan goes on, without trials.")


def restarted(plan: str, why: str) -> Sentences:
    """The sentences when a saved plan runs until the tuning has found one, which begins anew, and why it does."""
    text = f"resumed with the saved plan: {plan}; it is tuned anew: {why}"
    return Sentences(text, f"The saved plan is tuned anew: {why}.")


def left(plan: str, why: str) -> Sentences:
    """The sentences when a saved plan does not go on, because it may not run."""
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


def failed(doing: str, error: str, goes_on: str = PLAIN, again_steps: int | None = None) -> Sentences:
    """The sentences when something has failed, and the training goes on.

    Args:
        doing: what was done, such as ``"planning"``.
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


def guessed(names: Sequence[str]) -> str:
    """The clause that says which parameters count as an embedding or the last layer without being known as one."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (
        f"no class of torch.nn says what {', '.join(names[:3])}{more} are for: they count as embeddings and the last "
        "layer, which coarse compressors spare"
    )


def capitalised(text: str) -> str:
    """The text with a capital at its beginning."""
    return text[:1].upper() + text[1:]
