"""Sentences of decisions: what was measured, predicted and chosen, and why not more. Each is one line of the log.

Everything is given, nothing is looked up here. A plan is given as the words of
:func:`~gckernels.sync.plans.summary.summary_of`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..plans.numbers import megabytes, milliseconds, plural, three_digits, whole_percent

_SAME = 0.005
"""The relative difference below which two times are the same."""
_BARE = 0.05
"""The part of a step below which waiting for communication is not worth a word."""
PLAIN = "plain averaging"
REFINED = "refined"
"""The name of the policy of plans in which units have got finer compressors."""


@dataclass(frozen=True)
class Recorded:
    """Plain steps that were measured.

    Attributes:
        buckets: number of buckets, or of launches.
        nbytes: bytes of all gradients of a rank.
        plain_s: the time of a plain step on the slowest rank.
        bare_s: the time of a step that does not wait for communication; ``None`` if it is not known.
    """

    buckets: int
    nbytes: float
    plain_s: float
    bare_s: float | None = None


@dataclass(frozen=True)
class Tried:
    """A plan that was tried.

    Attributes:
        plan: the plan in words.
        policy: the name of the policy that has found it.
        predicted_s: the predicted time of a step; ``None`` without a prediction, as for a plan that was refined.
        measured_s: the measured time of a step on the slowest rank.
        error: the relative error of the gradients that it causes; ``None`` if it is not known.
        sent_nbytes: the bytes that a rank sends in a step; ``None`` if they are not known.
    """

    plan: str
    policy: str
    predicted_s: float | None
    measured_s: float
    error: float | None
    sent_nbytes: float | None = None

    @property
    def named(self) -> str:
        """The plan and the policy, which is ``all`` without its compressor, because the plan has that."""
        return f"{self.plan} ({self.policy.partition(':')[0]})"

    @property
    def predicted(self) -> str:
        """The beginning of a clause about its prediction, which ends in a comma or is empty."""
        return "" if self.predicted_s is None else f"predicted {milliseconds(self.predicted_s)}, "


@dataclass(frozen=True)
class Rule:
    """The rule of accuracy.

    Attributes:
        name: its name, such as ``"safe"``.
        error: the largest relative error that it allows; ``None`` if it is a list of compressors.
    """

    name: str
    error: float | None

    @property
    def allowed(self) -> str:
        """The error that it allows, as the end of a sentence."""
        return "allowed by the list" if self.error is None else f"of {two_digits(self.error)} allowed"


# -------------------------------------------------------------------- before the plan


def profiles(ranks: int, budget_s: float) -> str:
    """The sentence before a profile is measured."""
    return (
        f"no profile of this machine is known: measuring its links and compressors on {plural(ranks, 'rank')}, for at "
        f"most {three_digits(budget_s)} s; the next training here finds the profile in the cache"
    )


def profiled(ranks: int, seconds: float) -> str:
    """The sentence when a profile has been measured."""
    return f"measured this machine on {plural(ranks, 'rank')} in {seconds:.1f} s"


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


def given(plan: str) -> str:
    """The sentence when the training changes its plan itself.

    Args:
        plan: the plan that it has given.
    """
    return f"the plan that was given stays: {plan}; no other one is looked for any more"


# -------------------------------------------------------------------- the plan


def compresses(recorded: Recorded, winner: Tried, others: Sequence[Tried], rule: Rule, next_rule: Rule | None) -> str:
    """The sentence when a plan that compresses has won.

    Args:
        recorded: the plain steps.
        winner: the plan.
        others: the other plans that were tried.
        rule: the rule of accuracy.
        next_rule: a rule that allows more, which follows later in the training; ``None`` if none does.
    """
    error = "error not known" if winner.error is None else f"error {two_digits(winner.error)} {rule.allowed}"
    sent = "" if winner.sent_nbytes is None else f", {megabytes(winner.sent_nbytes)} sent"
    chosen = (
        f"chosen: {winner.named}: {winner.predicted}measured "
        f"{milliseconds(winner.measured_s)} ({change(winner.measured_s, recorded.plain_s)}){sent}; {error}"
    )
    why = f"why not more: {why_not_more(recorded, winner, rule, next_rule)}"
    return "; ".join([_measured(recorded), chosen, *_others(others), why])


def stays_plain(recorded: Recorded, tried: Sequence[Tried], rule: Rule, how: str = "without a hook") -> str:
    """The sentence when no plan has won.

    Args:
        recorded: the plain steps.
        tried: the plans that were tried.
        rule: the rule of accuracy.
        how: the way in which plain steps run from now on.
    """
    if not tried:
        why = f"no plan that {rule.name} allows is predicted to be faster"
    else:
        best = min(tried, key=lambda each: each.measured_s)
        why = (
            f"the best of {plural(len(tried), 'plan')} tried is {best.named}: {best.predicted}measured "
            f"{milliseconds(best.measured_s)} ({change(best.measured_s, recorded.plain_s)})"
        )
    waits_s = waiting_s(recorded)
    hidden = "" if waits_s is None else f"; only {milliseconds(waits_s)} of a step wait for communication"
    return f"{_measured(recorded)}; nothing is compressed: {why}{hidden}; {PLAIN} goes on, {how}"


def later(step: int, rule: Rule) -> str:
    """The sentence when a coarser rule will follow."""
    error = "" if rule.error is None else f", error {two_digits(rule.error)} allowed,"
    return f"the rule {rule.name}{error} begins at step {step:,}, and is tuned there"


def uncertain(notes: Sequence[str]) -> str:
    """The sentence when predictions are uncertain, and trials decide.

    Args:
        notes: what is uncertain, at least one.
    """
    more = f" and {plural(len(notes) - 3, 'other note')}" if len(notes) > 3 else ""
    return f"predictions are uncertain, trials decide: {'; '.join(notes[:3])}{more}"


def _measured(recorded: Recorded) -> str:
    return f"{plural(recorded.buckets, 'bucket')}, {megabytes(recorded.nbytes)}; plain {milliseconds(recorded.plain_s)}"


def _others(others: Sequence[Tried]) -> list[str]:
    if not others:
        return []
    listed = ", ".join(
        f"{each.named} {milliseconds(each.measured_s)}" for each in sorted(others, key=lambda each: each.measured_s)
    )
    return [f"also tried: {listed}"]


def why_not_more(recorded: Recorded, winner: Tried, rule: Rule, next_rule: Rule | None) -> str:
    """Why a plan does not gain more, as a sentence without its capital. The arguments are those of
    :func:`compresses`."""
    bare_s = recorded.bare_s
    if bare_s is not None and winner.measured_s - bare_s < _BARE * winner.measured_s:
        return "hardly anything of a step waits for communication"
    waits = (
        "" if bare_s is None else f"{milliseconds(winner.measured_s - bare_s)} of a step still wait for communication; "
    )
    if next_rule is not None:
        return f"{waits}the rule {next_rule.name} follows later"
    if rule.name == "safe":
        return f'{waits}plans with a larger error need accuracy="aggressive"'
    return f"{waits}no faster plan that the rule {rule.name} allows was found"


def waiting_s(recorded: Recorded) -> float | None:
    """The seconds of a plain step that wait for communication, if they are too few to gain anything; else ``None``."""
    if recorded.bare_s is None or recorded.plain_s - recorded.bare_s >= _BARE * recorded.plain_s:
        return None
    return max(recorded.plain_s - recorded.bare_s, 0.0)


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
        f"a step takes {milliseconds(measured_s)} where {milliseconds(expected_s)} are expected "
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
        f"a step takes {milliseconds(measured_s)} where {milliseconds(expected_s)} are expected "
        f"({change(measured_s, expected_s)}), because it waits for communication {waits} before: planning anew"
    )


def tries_plain(measured_s: float, none_s: float) -> str:
    """The sentence when compressed steps are slower than plain ones were."""
    return (
        f"a compressed step takes {milliseconds(measured_s)}, a plain one took {milliseconds(none_s)} "
        f"({change(measured_s, none_s)}): trying {PLAIN} again"
    )


def faster(measured_s: float, expected_s: float) -> str:
    """The sentence when compressed steps are faster than in their trials, so that plain ones may be faster still.

    Args:
        measured_s: the median time of a step in the last window.
        expected_s: the expected time.
    """
    return (
        f"a compressed step takes {milliseconds(measured_s)} where {milliseconds(expected_s)} are expected "
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


# -------------------------------------------------------------------- numbers


def change(now_s: float, before_s: float) -> str:
    """The relative difference between two times, such as ``"-62 %"``; ``"the same"`` below half a percent."""
    if before_s <= 0:
        return "from 0"
    part = now_s / before_s - 1.0
    if abs(part) < _SAME:
        return "the same"
    return f"{part:+.0%}".replace("%", " %") if abs(part) >= 0.095 else f"{part:+.1%}".replace("%", " %")


def two_digits(error: float) -> str:
    """A relative error, such as ``"0.13"`` or ``"0.0039"``."""
    return f"{error:.2g}"
