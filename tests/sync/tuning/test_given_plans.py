"""Plans in the middle of a tuning: one that the training gives stays, and one that is refused changes nothing."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from gckernels import sync
from gckernels.sync.tuning.trials.rules import STEPS
from models import build
from ranks import run_ranks, values_of
from tunings import PLAIN, policy_of, predicted, scripted, train, tuned_handle

SPECS = {"four": "BlockQuant(bits=4)", "eight": "BlockQuant"}
TIMES_S = {PLAIN: 1.0, "four": 0.5, "eight": 0.7, "mine": 2.0}


def given(front, at_step):
    """The plans of the steps after one is given, first one that does not fit."""
    module, handles, errors = build("Mlp"), [], []
    with scripted(module, SPECS, TIMES_S, handles):
        model, handle = tuned_handle(front, module)
        handles.append(handle)
        train(model, module, range(at_step), lambda _: None)
        before = policy_of(handle), handle.is_changing
        foreign = sync.uniform_plan(torch.nn.Linear(3, 3), "EFSignSGD", world_size=2)
        with pytest.raises((ValueError, RuntimeError)) as caught:
            handle.change_plan(foreign if dist.get_rank() else sync.uniform_plan(model, "Cast16"))
        errors.append(str(caught.value))
        assert (policy_of(handle), handle.is_changing) == before and handle.decisions == ()
        handle.change_plan(predicted(sync.uniform_plan(model, "Cast16"), "mine"))
        seen = train(model, module, range(at_step, at_step + 3), lambda _: policy_of(handle))
        seen += train(model, module, range(at_step + 3, STEPS + 5), lambda _: policy_of(handle))
    texts = [each.text for each in handle.decisions]
    listeners = handle._listeners.functions
    handle.close()
    return seen, texts, len(listeners), errors


@pytest.mark.parametrize(
    ("front", "at_step"),
    [
        ("ddp", 25),  # in a trial
        ("module", 12),  # while steps are recorded
        pytest.param("ddp", 12, marks=pytest.mark.slow),
        pytest.param("module", 25, marks=pytest.mark.slow),
    ],
)
def test_a_plan_that_the_training_gives_ends_the_tuning_and_stays(front, at_step):
    for rank, (seen, texts, listeners, errors) in enumerate(values_of(run_ranks(2, given, front, at_step))):
        assert {*seen[1:]} == {"mine"} and listeners == 0
        (text,) = texts
        assert "keeping the plan that you set" in text and "Cast16" in text
        assert ("failed on rank 1" in errors[0]) == (rank == 0)


def hooked():
    """Decisions of a training that registers a hook of its own while it is plain."""
    module, handles = build("Mlp"), []
    with scripted(module, SPECS, TIMES_S, handles):
        model, handle = tuned_handle("ddp", module)
        handles.append(handle)
        train(model, module, range(5), lambda _: None)
        model.register_comm_hook(None, default_hooks.allreduce_hook)
        seen = train(model, module, range(5, 40), lambda _: policy_of(handle))
    return {*seen}, [each.text for each in handle.decisions]


def test_a_plan_that_is_refused_leaves_the_training_as_it_is():
    first, second = values_of(run_ranks(2, hooked))
    assert first == second
    policies, (not_recorded, text) = first
    assert policies == {PLAIN} and "has a communication hook already" in not_recorded
    assert "has a communication hook already" in text and "next attempt in" in text


PROPOSED = 14
"""Steps after which plans are tried."""


def refused(names):
    """The plans of a training in whose trials some plans are refused on rank 1, its decisions, and its last plan."""
    module, handles = build("Mlp"), []
    with scripted(module, SPECS, TIMES_S, handles):
        model, handle = tuned_handle("module", module, replan=False)
        handles.append(handle)
        check = handle._changes.checked

        def refuses(plan):
            name = PLAIN if plan.prediction is None else plan.prediction.policy
            if name in names and dist.get_rank() == 1 and handle.steps > PROPOSED:
                raise ValueError(f"not {name}")
            return check(plan)

        handle._changes.checked = refuses
        seen = train(model, module, range(50), lambda _: policy_of(handle))
    decisions = [(each.text, each.policy, each.plan_fingerprint) for each in handle.decisions]
    plan, policy = handle.plan, handle.stats()["policy"]
    handle.close()
    return seen, decisions, plan.fingerprint(), policy


@pytest.mark.parametrize(
    ("names", "goes_on", "words"),
    [
        ({"eight"}, PLAIN, "with plain averaging"),  # nobody knows yet that another plan is faster
        ({"eight", PLAIN}, "four", "with the plan that runs now"),
    ],
)
def test_the_decision_for_a_plan_that_is_refused_names_the_one_that_goes_on(names, goes_on, words):
    for seen, decisions, fingerprint, policy in values_of(run_ranks(2, refused, names)):
        assert {*seen} == {PLAIN, "four"} and seen[-1] == policy == goes_on
        ((text, decided, of_plan),) = decisions
        assert "not eight (rank 1)" in text and words in text
        assert (decided, of_plan) == (goes_on, fingerprint)
