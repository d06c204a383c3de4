"""A tuned training: plans are tried in turns of real steps, the best one stays, and failures leave plain averaging."""

from __future__ import annotations

import itertools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import tunings
from gckernels import sync
from gckernels.sync.frontends.ddp.reducer import comm_hook
from gckernels.sync.tracing.model_tracer import ModelTracer
from gckernels.sync.tuning import recording, uniform_candidates
from gckernels.sync.tuning.trials.rules import STEPS
from gckernels.sync.tuning.trials.trials import MOST
from models import SMALL_BUCKETS, build
from ranks import run_ranks, values_of
from tunings import PLAIN, policy_of, scripted, train, tuned_handle
from workloads import digest_of, thinned

SPECS = {"four": "BlockQuant(bits=4)", "eight": "BlockQuant"}
FRONTS = ("ddp", "module")


def tried(front, step_s, count=STEPS + 10):
    """The plan of every step, digests of the last gradients, and the last decision."""
    module, handles = build("Mlp"), []
    with scripted(module, SPECS, step_s, handles):
        model, handle = tuned_handle(front, module)
        handles.append(handle)

        def look(step):
            grads = digest_of(parameter.grad for parameter in module.parameters())
            return policy_of(handle), grads, handle.is_changing

        seen = train(model, module, range(count), look)
    hooked = front == "ddp" and comm_hook(model) is not None
    result = seen, [(each.level, each.text, each.policy) for each in handle.decisions], hooked, handle.steps
    handle.close()
    return result


FASTEST_FOUR, FASTEST_PLAIN = {PLAIN: 1.0, "four": 0.5, "eight": 0.7}, {PLAIN: 1.0, "four": 0.99, "eight": 1.7}


@pytest.mark.parametrize(
    ("front", "step_s", "winner"),
    [
        ("ddp", FASTEST_FOUR, "four"),
        ("module", FASTEST_PLAIN, PLAIN),
        pytest.param("ddp", FASTEST_PLAIN, PLAIN, marks=pytest.mark.slow),
        pytest.param("module", FASTEST_FOUR, "four", marks=pytest.mark.slow),
    ],
)
def test_the_fastest_plan_stays(front, step_s, winner):
    ranks = values_of(run_ranks(2, tried, front, step_s))
    assert ranks[0] == ranks[1]  # decisions, plans and gradients are the same
    steps, decisions, hooked, counted = ranks[0]
    assert counted == len(steps)  # warm-up and recorded steps, too
    policies = [policy for policy, _, _ in steps]
    assert policies[:11] == [PLAIN] * 11  # a turn and recorded steps
    assert {*policies} == {PLAIN, "four", "eight"}
    assert {*policies[STEPS:]} == {winner}
    assert not any(is_changing for _, _, is_changing in steps[STEPS:])
    assert hooked == (front == "ddp" and winner != PLAIN)
    ((_, text, policy),) = decisions
    assert policy == winner and "plain" in text


class Noisy(dict):
    """Times that are by turns shorter and longer."""

    def __getitem__(self, name):
        self.steps = getattr(self, "steps", 0) + 1
        return super().__getitem__(name) * (0.6, 1.3, 1.0, 0.7, 1.4)[self.steps % 5]


def test_trials_go_on_in_longer_turns_if_noise_hides_the_fastest_plan():
    times = Noisy({PLAIN: 1.0, "four": 0.9, "eight": 9.0})
    (steps, decisions, _, _), _ = values_of(run_ranks(2, tried, "module", times, STEPS + MOST))
    policies = [policy for policy, _, _ in steps]
    turns = [len([*turn]) for policy, turn in itertools.groupby(policies) if policy == "four"]
    assert max(turns) > 2 * min(turns) and {*policies[STEPS - 20 : STEPS]} <= {PLAIN, "four"}, "the slow one is out"
    assert len(decisions) == 1


def accumulated(micro_batches, find_unused):
    """The steps at which plans were chosen while noise hid the fastest one, with gradients that are accumulated."""
    module, handles = build("Mlp"), []
    with scripted(module, SPECS, Noisy({PLAIN: 1.0, "four": 0.9, "eight": 9.0}), handles):
        model = DistributedDataParallel(module, bucket_cap_mb=SMALL_BUCKETS, find_unused_parameters=find_unused)
        handles.append(sync.attach(model))
        for step in range(STEPS + MOST):
            with model.no_sync():
                for _ in range(micro_batches - 1):
                    model(module.batch(step, dist.get_rank())).backward()
            model(module.batch(step, dist.get_rank())).backward()
    found = [decision.step for decision in handles[0].decisions]
    handles[0].close()
    return found


@pytest.mark.parametrize(("micro_batches", "find_unused"), [(2, True), (3, False)])
def test_accumulated_gradients_delay_no_choice(micro_batches, find_unused):
    """Steps are those of the optimizer, of which the choice takes no more than it says."""
    for steps in values_of(run_ranks(2, accumulated, micro_batches, find_unused)):
        assert len(steps) == 1 and steps[0] <= STEPS + MOST


def plain_steps(front, fault, where, is_tuned):
    """Digests of the gradients of a training whose tuning fails on a rank, or that is not tuned; and its decisions."""
    module, handles = build("Mlp"), []
    with scripted(module, SPECS, {PLAIN: 1.0, "four": 0.5, "eight": 0.7}, handles), _broken(fault, where):
        model, handle = tuned_handle(front, module)
        handles.append(handle)
        if not is_tuned:
            handle._tuning.close()
        seen = train(model, module, range(STEPS), lambda _: digest_of(p.grad for p in module.parameters()))
    texts, listeners, policy = (
        [each.text for each in handle.decisions],
        len(handle._listeners.functions),
        policy_of(handle),
    )
    handle.close()
    return seen, texts, listeners, policy


def failed(front, fault, where):
    return plain_steps(front, fault, where, True), plain_steps(front, fault, where, False)


def _broken(fault, where):
    """A context in which something fails on the rank ``where``."""

    def fails(*_, **__):
        raise ValueError(f"no {fault}")

    if dist.get_rank() != where:
        return mock.patch.object(recording, "RECORDED", recording.RECORDED)
    return {
        "recorder": mock.patch.object(recording, "ModelTracer", fails),
        "errors": mock.patch.object(ModelTracer, "errors", fails),
        "candidates": mock.patch.object(uniform_candidates, "candidates", fails),
    }[fault]


@pytest.mark.parametrize(("front", "where"), [("ddp", 1), ("module", 0)])
def test_failures_leave_plain_averaging_on_all_ranks(front, where):
    for (seen, texts, listeners, _), (expected, *_) in values_of(run_ranks(2, failed, front, "candidates", where)):
        assert seen == expected  # plain from the first step to the last
        (text,) = texts
        assert "no candidates" in text and f"rank {where}" in text and "plain" in text
        assert "next attempt in 1,000 steps" in text and listeners == 1


@pytest.mark.parametrize(("front", "fault", "where"), [("ddp", "recorder", 1), ("module", "errors", 0)])
def test_plans_are_tried_although_no_step_can_be_recorded(front, fault, where):
    for (_, texts, _, policy), _ in values_of(run_ranks(2, failed, front, fault, where)):
        failure, chosen = texts
        assert f"no {fault} (rank {where})" in failure and "goes on with plans that need no recording" in failure
        assert "chosen" in chosen and policy == "four"


def in_two_stages(front):
    """The plan of some steps of a training that is tuned with a safe rule, and later with an aggressive one. For that
    only slower plans are proposed than the one that runs."""
    module, handles, calls, propose = build("Mlp"), [], [], tunings.proposal_of

    def proposal_of(model, specs):
        calls.append(0)
        return propose(model, SPECS if len(calls) == 1 else {"four": SPECS["four"]})

    times = {PLAIN: 1.0, "four": 0.7, "eight": 0.5}
    with scripted(module, SPECS, times, handles), mock.patch.object(tunings, "proposal_of", proposal_of):
        model, handle = tuned_handle(front, module, accuracy="aggressive", steps=1200, replan=False)
        handles.append(handle)
        policies = train(model, module, range(190), lambda _: policy_of(handle))
    texts = [each.text for each in handle.decisions]
    handle.close()
    return policies, texts


@pytest.mark.parametrize("front", ["module", pytest.param("ddp", marks=pytest.mark.slow)])
def test_an_aggressive_rule_is_tuned_after_a_tenth_of_the_training(front):
    first, second = values_of(run_ranks(2, in_two_stages, front))
    assert first == second
    policies, texts = first
    assert {*policies[STEPS:119]} == {"eight"} and PLAIN in policies[120:140]  # recorded again
    assert policies[-1] == "eight"
    assert len(texts) == 2 and "of 0.96 allowed" in texts[1] and "(eight)" in texts[1] and "(four) 700 ms" in texts[1]


def closed_early(front, at_step):
    module, handles = build("Mlp"), []
    with scripted(module, SPECS, {PLAIN: 1.0, "four": 0.5, "eight": 0.7}, handles):
        model, handle = tuned_handle(front, module)
        handles.append(handle)
        train(model, module, range(at_step), lambda _: None)
        handle.close()
    hooks = [*module._forward_hooks, *module._forward_pre_hooks, *model._forward_hooks]
    hooks += [each for p in module.parameters() for each in p._post_accumulate_grad_hooks or {}]
    return len(hooks)


@pytest.mark.parametrize(("front", "at_step"), thinned(itertools.product(FRONTS, (5, 25)), 3))
def test_closing_ends_the_tuning(front, at_step):
    assert values_of(run_ranks(2, closed_early, front, at_step)) == [0, 0]


def alone():
    module = build("Mlp")
    model, handle = tuned_handle("ddp", module)
    train(model, module, range(3), lambda _: None)
    finite = torch.isfinite(next(module.parameters())).all().item()
    return (
        handle._tuning._tuner is None,
        comm_hook(model) is None,
        len(handle.decisions),
        handle.stats()["step"],
        finite,
    )


def test_one_rank_has_nothing_to_tune_and_no_hook():
    assert values_of(run_ranks(1, alone)) == [(True, True, 0, 3, True)]
