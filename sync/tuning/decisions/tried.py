"""Measured steps and plans, and the phrases that long and short sentences share."""

from __future__ import annotations

from dataclasses import dataclass

from ...plans.numbers import duration, two_digits

UNIFORM = "uniform"
"""The name of the policy of plans with one compressor for the whole model."""
_BARE = 0.05
"""The part of a step below which waiting for communication is not worth a word."""


@dataclass(frozen=True)
class PlainSteps:
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
        predicted_s: the predicted time of a step; ``None`` without a prediction.
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
        return "" if self.predicted_s is None else f"predicted {duration(self.predicted_s)}, "


@dataclass(frozen=True)
class AccuracyRule:
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


def why_not_more(recorded: PlainSteps, winner: Tried, rule: AccuracyRule, next_rule: AccuracyRule | None) -> str:
    """Why a plan does not gain more, as a sentence without its capital. The arguments are those of
    :func:`~gckernels.sync.tuning.decisions.sentences.compresses`."""
    bare_s = recorded.bare_s
    if bare_s is not None and winner.measured_s - bare_s < _BARE * winner.measured_s:
        return "hardly anything of a step waits for communication"
    waits = "" if bare_s is None else f"{duration(winner.measured_s - bare_s)} of a step still wait for communication; "
    if next_rule is not None:
        return f"{waits}the rule {next_rule.name} follows later"
    if rule.name == "safe":
        return f'{waits}plans with a larger error need accuracy="aggressive"'
    return f"{waits}no faster plan that the rule {rule.name} allows was found"


def waiting_s(recorded: PlainSteps) -> float | None:
    """The seconds of a plain step that wait for communication, if they are too few to gain anything; else ``None``."""
    if recorded.bare_s is None or recorded.plain_s - recorded.bare_s >= _BARE * recorded.plain_s:
        return None
    return max(recorded.plain_s - recorded.bare_s, 0.0)
