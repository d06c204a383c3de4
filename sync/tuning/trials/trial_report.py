"""Outcomes of trials, as decisions that people read."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...plans.names import summary_of
from ...plans.plan import Frontend, Plan
from ...stats.decisions import Decision
from ...traces.model_trace import Trace
from ..decisions import short_sentences
from ..decisions.sentences import compresses, stays_plain
from ..decisions.tried import REFINED, AccuracyRule, PlainSteps, Tried
from .rules import Phase
from .trial_runner import Played
from .trials import PLAIN

_HOW = {Frontend.DDP: "by DDP, without a hook", Frontend.MODULE: "in the buckets of plain steps"}


def outcome(
    step: int,
    trace: Trace,
    arms: Sequence[Plan],
    found: Played,
    stages: Sequence[Phase],
    world_size: int,
    frontend: Frontend,
) -> Decision:
    """The decision for the plan that has won its trials.

    Args:
        step: the number of synchronised steps before it.
        trace: the recorded steps.
        arms: the plans that were tried, plain first.
        found: their trials.
        stages: the rule of accuracy, and those that follow it later.
        world_size: the number of ranks.
        frontend: the kind of the model.
    """
    trials = found.trials
    winner, plain_s = trials.winner, trials.median_s(PLAIN)
    nbytes = sum(tensor.numel * tensor.dtype.itemsize for tensor in trace.tensors)
    bare_s = trace.forward_s + trace.backward_s + trace.optimizer_s
    recorded = PlainSteps(max(len(trace.buckets), 1), nbytes, plain_s, bare_s)
    rules = [_rule(stage) for stage in stages[:2]]
    tried = {
        arm: _tried(arms[arm], trials.median_s(arm), world_size, sent_nbytes)
        for arm, sent_nbytes in sorted(found.sent_nbytes.items())
        if arm != PLAIN
    }
    if winner == PLAIN:
        text = stays_plain(recorded, list(tried.values()), rules[0], _HOW[frontend])
        short = short_sentences.stays_plain(recorded, list(tried.values()), rules[0])
    else:
        others = [each for arm, each in tried.items() if arm != winner]
        given = (recorded, tried[winner], others, rules[0], rules[1] if len(rules) > 1 else None)
        text, short = compresses(*given), short_sentences.compresses(*given)
    prediction = arms[winner].prediction
    return Decision(
        step,
        text,
        policy="none" if winner == PLAIN else tried[winner].policy,
        plan_fingerprint=arms[winner].fingerprint(),
        predicted_s=None if prediction is None else prediction.step_s,
        measured_s=_finite(trials.median_s(winner)),
        none_s=_finite(plain_s),
        error=None if prediction is None else prediction.error,
        short=short,
    )


def _finite(seconds: float) -> float | None:
    """A time; ``None`` for that of a plan that has had no turn."""
    return seconds if math.isfinite(seconds) else None


def _rule(stage: Phase) -> AccuracyRule:
    return AccuracyRule(stage.name, stage.accuracy.largest)


def _tried(plan: Plan, measured_s: float, world_size: int, sent_nbytes: float) -> Tried:
    named, prediction = summary_of(plan, world_size), plan.prediction
    if prediction is None:  # some of its units have finer compressors than its policy has chosen
        return Tried(named, REFINED, None, measured_s, None, sent_nbytes)
    return Tried(named, prediction.policy, prediction.step_s, measured_s, prediction.error, sent_nbytes)
