"""Outcomes of trials name the winner, its times, and what was tried beside it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gckernels import sync
from gckernels.sync.traces.model_trace import Trace, TracedTensor
from gckernels.sync.tuning.trials.rules import stages_of
from gckernels.sync.tuning.trials.trial_report import outcome
from gckernels.sync.tuning.trials.trial_runner import Played
from gckernels.sync.tuning.trials.trials import Trials
from tunings import predicted

LAYER = torch.nn.Linear(32, 32)
TRACE = Trace("layer", (TracedTensor("bias", 32, 0.01), TracedTensor("weight", 1024, 0.03)), 0.03)
PLAIN, SIGNS = (sync.uniform_plan(LAYER, spec, world_size=2) for spec in ("Identity", "EFSignSGD"))
ARMS = (PLAIN, predicted(SIGNS, "auto"))
SAFE = stages_of("safe")


def trials(*step_s: float) -> Played:
    found = Trials.of(len(step_s))
    for arm, each in enumerate(step_s):
        found = found.after(arm, [each] * 9)
    return Played(found, {arm: 2e6 * each for arm, each in enumerate(step_s)})


def test_a_plan_that_has_won():
    decision = outcome(60, TRACE, ARMS, trials(0.2, 0.1), SAFE, 2, sync.Frontend.DDP)
    assert (decision.step, decision.policy, decision.plan_fingerprint) == (60, "auto", SIGNS.fingerprint())
    assert (decision.measured_s, decision.none_s, decision.predicted_s, decision.error) == (0.1, 0.2, 0.5, 0.1)
    assert "plain 200 ms; chosen: 1 EFSignSGD by allgather, 1 exact (auto): predicted 500 ms" in decision.text
    assert "measured 100 ms (-50 %), 0.200 MB sent;" in decision.text


@pytest.mark.parametrize("frontend", sync.Frontend)
def test_plain_averaging_that_has_won(frontend):
    decision = outcome(60, TRACE, ARMS, trials(0.1, 0.2), SAFE, 2, frontend)
    assert (decision.policy, decision.plan_fingerprint) == ("none", PLAIN.fingerprint())
    assert (decision.measured_s, decision.none_s, decision.predicted_s) == (0.1, 0.1, None)
    assert "nothing is compressed: the best of 1 plan tried is 1 EFSignSGD by allgather" in decision.text
    assert ("without a hook" in decision.text) == (frontend is sync.Frontend.DDP)


def test_a_plan_without_a_prediction_is_a_refined_one():
    decision = outcome(
        900, TRACE, (PLAIN, replace(SIGNS, prediction=None)), trials(0.2, 0.1), SAFE, 2, sync.Frontend.DDP
    )
    assert (decision.policy, decision.predicted_s, decision.error) == ("refined", None, None)
    assert "1 exact (refined): measured 100 ms (-50 %)" in decision.text


def test_trials_without_a_turn_measure_nothing():
    decision = outcome(60, TRACE, ARMS, Played(Trials.of(2)), SAFE, 2, sync.Frontend.DDP)
    assert (decision.policy, decision.measured_s, decision.none_s) == ("none", None, None)
