"""Outcomes of trials, as decisions that people read."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence

from ...accuracy.accuracy import relative_error
from ...plans.names import summary_of
from ...plans.plan import Frontend
from ...stats.decisions import Decision
from ...traces.model_trace import ModelTrace
from ...traces.traced_tensors import TraceError
from ..decisions import short_sentences
from ..decisions.sentences import compresses, stays_plain
from ..decisions.tried import AccuracyRule, PlainSteps, Tried
from .race import Race
from .rules import Phase
from .trials import PLAIN

_HOW = {Frontend.DDP: "by DDP, without a hook", Frontend.MODULE: "in the buckets of plain steps"}


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
    trials, winner = race.trials, race.trials.winner
    plain_s = trials.median_s(PLAIN)
    nbytes = sum(tensor.numel * tensor.dtype.itemsize for tensor in trace.tensors)
    recorded = PlainSteps(max(len(trace.buckets), 1), nbytes, plain_s, race.computing_s or None)
    rules = [_rule(stage) for stage in stages[:2]]
    tried = {arm: _tried(race, arm, trace, world_size) for arm in sorted(race.sent_nbytes) if arm != PLAIN}
    if winner == PLAIN:
        text = stays_plain(recorded, list(tried.values()), rules[0], _HOW[frontend])
        short = short_sentences.stays_plain(recorded, list(tried.values()), rules[0])
        return _decision(step, race, text, short, None)
    others = [each for arm, each in tried.items() if arm != winner]
    given = (recorded, tried[winner], others, rules[0], rules[1] if len(rules) > 1 else None)
    return _decision(step, race, compresses(*given), short_sentences.compresses(*given), tried[winner])


def _decision(step: int, race: Race, text: str, short: str, winner: Tried | None) -> Decision:
    trials = race.trials
    return Decision(
        step,
        text,
        policy="none" if winner is None else winner.policy,
        plan_fingerprint=race.winner.fingerprint(),
        predicted_s=None if winner is None else winner.predicted_s,
        measured_s=_finite(trials.median_s(trials.winner)),
        none_s=_finite(trials.median_s(PLAIN)),
        error=None if winner is None else winner.error,
        short=short,
    )


def _finite(seconds: float) -> float | None:
    """A time; ``None`` for that of a plan that has had no turn."""
    return seconds if math.isfinite(seconds) else None


def _rule(stage: Phase) -> AccuracyRule:
    return AccuracyRule(stage.name, stage.accuracy.largest)


def _tried(race: Race, arm: int, trace: ModelTrace, world_size: int) -> Tried:
    plan, error = race.arms[arm], None
    with contextlib.suppress(TraceError):  # no error is known
        error = relative_error(plan, trace)
    predicted_s = None if plan.prediction is None else plan.prediction.step_s
    measured_s, sent_nbytes = race.trials.median_s(arm), race.sent_nbytes[arm]
    return Tried(summary_of(plan, world_size), race.policies[arm], predicted_s, measured_s, error, sent_nbytes)
