"""Outcomes of trials name the winner, its times, and what was tried beside it."""

from __future__ import annotations

import pytest
import torch

from gckernels import sync
from gckernels.sync.accuracy.accuracy import relative_error
from gckernels.sync.traces.model_trace import ModelTrace
from gckernels.sync.traces.traced_tensors import TracedTensor
from gckernels.sync.tuning.trials.race import Race
from gckernels.sync.tuning.trials.rules import stages_of
from gckernels.sync.tuning.trials.trial_report import outcome
from tunings import played, predicted

LAYER = torch.nn.Linear(32, 32)
TRACE = ModelTrace("layer", (TracedTensor("bias", 32, 0.01), TracedTensor("weight", 1024, 0.03)), 0.03)
PLAIN, SIGNS = (sync.uniform_plan(LAYER, spec, world_size=2) for spec in ("Identity", "EFSignSGD"))
SAFE = stages_of("safe")


def race(*step_s: float, plan: sync.Plan = SIGNS, policy: str = "auto") -> Race:
    """A race of plain averaging and a plan, whose steps have taken these seconds."""
    found = Race(None, None, PLAIN)
    found.join({plan: policy})
    for arm, each in enumerate(step_s):
        found.sent_nbytes[arm] = 2e6 * each
    return played(found, step_s)


def test_a_plan_that_has_won():
    decision = outcome(60, TRACE, race(0.2, 0.1, plan=predicted(SIGNS, "auto")), SAFE, 2, sync.Frontend.DDP)
    assert (decision.step, decision.policy, decision.plan_fingerprint) == (60, "auto", SIGNS.fingerprint())
    assert (decision.measured_s, decision.none_s, decision.predicted_s) == (0.1, 0.2, 0.5)
    assert decision.error == pytest.approx(relative_error(SIGNS, TRACE))
    assert "plain 200 ms; chosen: 1 EFSignSGD by allgather, 1 exact (auto): predicted 500 ms" in decision.text
    assert "measured 100 ms (-50 %), 0.200 MB sent;" in decision.text


@pytest.mark.parametrize("frontend", sync.Frontend)
def test_plain_averaging_that_has_won(frontend):
    decision = outcome(60, TRACE, race(0.1, 0.2), SAFE, 2, frontend)
    assert (decision.policy, decision.plan_fingerprint) == ("none", PLAIN.fingerprint())
    assert (decision.measured_s, decision.none_s, decision.predicted_s) == (0.1, 0.1, None)
    assert "nothing is compressed: the best of 1 plan tried is 1 EFSignSGD by allgather" in decision.text
    assert ("without a hook" in decision.text) == (frontend is sync.Frontend.DDP)


def test_a_plan_without_a_prediction_has_the_policy_with_which_it_joined():
    decision = outcome(900, TRACE, race(0.2, 0.1, policy="uniform"), SAFE, 2, sync.Frontend.DDP)
    assert (decision.policy, decision.predicted_s) == ("uniform", None)
    assert "1 exact (uniform): measured 100 ms (-50 %)" in decision.text


def test_the_wait_for_communication_is_that_of_recorded_steps():
    found = race(0.2, 0.1)
    assert found.computing_s == 0.0 and "still wait" not in outcome(60, TRACE, found, SAFE, 2, sync.Frontend.DDP).text
    found.exposed_s[1] = 0.03
    assert found.computing_s == pytest.approx(0.07)
    assert "30.0 ms of a step still wait" in outcome(60, TRACE, found, SAFE, 2, sync.Frontend.DDP).text


def test_trials_without_a_turn_measure_nothing():
    decision = outcome(60, TRACE, race(), SAFE, 2, sync.Frontend.DDP)
    assert (decision.policy, decision.measured_s, decision.none_s) == ("none", None, None)
