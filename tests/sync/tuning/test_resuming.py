"""Checkpoints of tuned trainings: the plan that was found runs again without trials, and nothing unsent is lost."""

from __future__ import annotations

import pytest

from gckernels.sync.tuning.rules import STEPS
from models import build
from ranks import run_ranks, values_of
from tunings import PLAIN, policy_of, scripted, train, tuned_handle
from workloads import digest_of

SPECS = {"four": "BlockQuant(bits=4)"}


def interrupted(front, at_step, winner_s):
    """A training without an interruption, and one that is saved and continued; plans and gradients after the step."""
    module, step_s = build("Mlp"), {PLAIN: 1.0, "four": winner_s}
    handles, seen = [], []

    def look(step):
        return digest_of(p.grad for p in module.parameters())

    with scripted(module, SPECS, step_s, handles):
        model, handle = tuned_handle(front, module)
        handles.append(handle)
        train(model, module, range(at_step), look)
        state, weights = handle.state_dict(), {k: v.clone() for k, v in module.state_dict().items()}
        expected = train(model, module, range(at_step, at_step + 5), look)
        plans = [policy_of(handle)]
        handle.close()
    module, handles = build("Mlp"), []
    module.load_state_dict(weights)
    with scripted(module, SPECS, step_s, handles):
        model, handle = tuned_handle(front, module)
        handles.append(handle)
        handle.load_state_dict(state)
        fingerprint = handle.plan.fingerprint()
        seen = train(model, module, range(at_step, at_step + 5), look)
        texts = [each.text for each in handle.decisions]
        runs = any(not unit.in_place for unit in handle.plan.units)
        handle.close()
    return seen == expected, plans, texts, runs, fingerprint == handle.plan.fingerprint()


@pytest.mark.parametrize(("front", "winner_s"), [("ddp", 0.5), ("synchronizer", 0.5), ("ddp", 2.0)])
def test_a_settled_training_goes_on_with_its_plan(front, winner_s):
    for same, _, texts, runs, stays in values_of(run_ranks(2, interrupted, front, STEPS + 3, winner_s)):
        assert stays and runs == (winner_s < 1.0)
        assert same or front == "ddp"  # DDP's first step has one bucket, which is sent exactly
        (text,) = texts
        assert "resumed" in text and "no trials" in text


def compresses(handle):
    return any(not unit.in_place for unit in handle.plan.units)


def saved_in_trials(front, at_step):
    """The plans and residuals of a training that was saved in its trials, when it is continued."""
    module, step_s, handles = build("Mlp"), {PLAIN: 1.0, "four": 0.5}, []
    with scripted(module, SPECS, step_s, handles):
        model, handle = tuned_handle(front, module)
        handles.append(handle)
        train(model, module, range(at_step), lambda _: None)
        state = handle.state_dict()
        handle.close()
    module, handles = build("Mlp"), []
    with scripted(module, SPECS, step_s, handles):
        model, handle = tuned_handle(front, module)
        handles.append(handle)
        handle.load_state_dict(state)
        loaded = compresses(handle), handle.residual_nbytes() > 0
        train(model, module, range(2), lambda _: None)
        sent = compresses(handle), handle.residual_nbytes() > 0
        train(model, module, range(STEPS), lambda _: None)
        texts = [each.text for each in handle.decisions]
        last = policy_of(handle)
        handle.close()
    return loaded, sent, last, len(texts)


@pytest.mark.parametrize("front", ["ddp", "synchronizer"])
def test_a_training_that_was_saved_in_its_trials_sends_what_is_left_and_is_tuned_anew(front):
    for loaded, sent, last, decisions in values_of(run_ranks(2, saved_in_trials, front, 24)):
        assert (loaded, sent) == ((True, True), (False, False))
        assert (last, decisions) == ("four", 1)
