"""DDP's ``join()``, where ranks have different numbers of inputs: plain averaging goes on, and so does a plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gckernels import BlockQuant, EFSignSGD, SignSGD, sync
from gckernels.sync.tuning.trials.rules import STEPS
from models import SMALL_BUCKETS, build
from ranks import run_ranks, values_of
from tunings import PLAIN, policy_of, scripted, train
from workloads import digest_of, mass_of

EVEN = 4
"""Steps that all ranks have."""
SPECS = {"four": "BlockQuant(bits=4)", "eight": "BlockQuant"}
TRIALS = (12, 15, 18, 22)
"""Numbers of steps after which the tuned trainings of these tests are in the middle of different things."""


def trained(attaches: bool, before: int) -> tuple[list[str], list[str]]:
    """Digests of a training in which rank 1 has two inputs more, and decisions of its attachment.

    Args:
        attaches: whether there is an attachment without a plan.
        before: steps before ``join()``.
    """
    module: Any = build("Mlp")
    model, handles = DistributedDataParallel(module, bucket_cap_mb=SMALL_BUCKETS), []
    with scripted(module, {"four": "BlockQuant(bits=4)"}, {PLAIN: 1.0, "four": 0.5}, handles):
        if attaches:
            handles.append(sync.attach(model))

        def look(_: int) -> str:
            return digest_of(parameter.grad for parameter in module.parameters())

        seen = train(model, module, range(before), look)
        with model.join():
            seen += train(model, module, range(before, before + EVEN + 2 * dist.get_rank()), look)
        seen.append(digest_of(module.parameters()))
        seen += train(model, module, range(30, 32), look)  # the ranks are still in step
    texts = [each.text for handle in handles for each in handle.decisions]
    for handle in handles:
        handle.close()
    return seen, texts


def with_and_without(before: int) -> Any:
    return trained(True, before), trained(False, before)[0]


@pytest.mark.parametrize("before", [0, pytest.param(5, marks=pytest.mark.slow)])
def test_uneven_inputs_end_a_tuning_and_change_nothing(before):
    for (seen, texts), expected in values_of(run_ranks(2, with_and_without, before)):
        assert seen == expected
        (text,) = texts
        assert "join()" in text and "plain averaging" in text


# -------------------------------------------------------------------- plans


MODES: dict[str, tuple[str, dict[str, bool]]] = {
    "default": ("Mlp", {}),
    "gradient_as_bucket_view": ("Mlp", {"gradient_as_bucket_view": True}),
    "static_graph": ("Mlp", {"static_graph": True}),
    "find_unused_parameters": ("Mlp", {"find_unused_parameters": True}),
}


def compressed(mode: str, inputs: int, changes: bool, joins: bool) -> Any:
    """Digests of a training in which rank 1 has two inputs more than rank 0.

    Args:
        mode: the settings of DDP.
        inputs: the number of steps for which rank 0 has inputs.
        changes: whether another plan follows in the first of these steps.
        joins: whether the ranks are in ``join()``; otherwise rank 0 trains with zeros where it has no inputs.
    """
    kind, settings = MODES[mode]
    module: Any = build(kind)
    model = DistributedDataParallel(module, bucket_cap_mb=SMALL_BUCKETS, **settings)
    attachment, optimizer = sync.attach(model, EFSignSGD()), torch.optim.SGD(module.parameters(), lr=0.05)
    rank, seen = dist.get_rank(), []

    def step(number: int, factor: float = 1.0) -> None:
        optimizer.zero_grad()
        (model(module.batch(number, rank)) * factor).backward()
        optimizer.step()
        if rank:
            gradients = (parameter.grad for parameter in module.parameters())
            seen.append(digest_of(each for each in gradients if each is not None))

    for number in range(3):
        step(number)
    if changes:
        attachment.change_plan(sync.uniform_plan(model, BlockQuant()))
    with model.join(enable=joins):
        for number in range(3, 3 + inputs + 2 * (rank if joins else 1)):
            step(number, float(rank or number < 3 + inputs))
    seen.append(attachment.plan.fingerprint())
    for number in range(30, 33):
        step(number)
    seen += [digest_of(module.parameters()), digest_of(mass_of(attachment).values()), attachment.steps]
    attachment.close()
    return seen


def joined_and_not(mode: str, cases: list[tuple[int, bool]]) -> Any:
    return [[compressed(mode, *case, joins=joins) for joins in (True, False)] for case in cases]


@pytest.mark.parametrize(
    "mode", ["default", *(pytest.param(mode, marks=pytest.mark.slow) for mode in MODES if mode != "default")]
)
def test_a_rank_without_inputs_sends_what_its_residuals_hold(mode):
    cases = [(4, False), (0, False), *([(0, True)] if mode != "find_unused_parameters" else [])]
    for pairs in values_of(run_ranks(2, joined_and_not, mode, cases)):
        for joined, expected in pairs:
            assert joined == expected


def interrupted() -> Any:
    """Digests of the weights of a training whose plan changes in a step without inputs of rank 0, while parameters can
    be unused; and whether it changes before and after another attempt."""
    module: Any = build("Branches")
    model = DistributedDataParallel(module, bucket_cap_mb=SMALL_BUCKETS, find_unused_parameters=True)
    attachment, changing = sync.attach(model, EFSignSGD()), []
    train(model, module, range(3), lambda _: None)
    plan = sync.uniform_plan(model, BlockQuant())
    attachment.change_plan(plan)
    with model.join():
        train(model, module, range(2 * dist.get_rank()), lambda _: None)
    for turn in range(2):
        if turn:
            attachment.change_plan(plan)
        digests = train(model, module, range(12), lambda _: digest_of(module.parameters()))
        changing.append(attachment.is_changing)
    attachment.close()
    return digests, changing


def test_a_change_waits_for_ranks_with_inputs_if_parameters_can_be_unused():
    first, second = values_of(run_ranks(2, interrupted, group_timeout_s=30.0))
    assert first == second and first[1] == [True, False]


def tuned(before: int, inputs: int) -> Any:
    """The plan of a training whose ranks have different numbers of inputs at some time of its tuning, what it has said,
    and digests of its weights afterwards.

    Args:
        before: steps before ``join()``.
        inputs: the number of steps in it for which rank 0 has inputs.
    """
    module, handles = build("Mlp"), []
    model = DistributedDataParallel(module, bucket_cap_mb=SMALL_BUCKETS)
    with scripted(module, SPECS, {PLAIN: 1.0, "four": 0.5, "eight": 0.8}, handles):
        attachment = sync.attach(model)
        handles.append(attachment)
        train(model, module, range(before), lambda _: None)
        was = policy_of(attachment), attachment.is_changing
        with model.join():
            train(model, module, range(inputs + 2 * dist.get_rank()), lambda _: None)
        seen = train(model, module, range(30, 33), lambda _: digest_of(module.parameters()))
    texts, steps, is_now = [each.text for each in attachment.decisions], attachment.steps, policy_of(attachment)
    attachment.close()
    return seen, texts, steps, (*was, is_now)


def in_trials() -> Any:
    return [tuned(before, inputs) for before in TRIALS for inputs in (0, EVEN)]


def test_a_plan_that_was_found_goes_on_without_tuning():
    first, second = values_of(run_ranks(2, tuned, STEPS + 2, EVEN))
    assert first == second
    _, texts, steps, policies = first
    assert policies == ("four", False, "four") and steps == STEPS + 2 + EVEN + 2 + 3
    assert len(texts) == 2 and "join()" in texts[1] and "training goes on with the plan that runs now" in texts[1]


@pytest.mark.slow
def test_trials_end_with_the_plan_that_runs():
    first, second = values_of(run_ranks(2, in_trials))
    assert first == second
    changes = set()
    for _, (text,), _, (was, is_changing, is_now) in first:
        assert is_now == was and "join()" in text
        changes.add((was, is_changing))
    assert changes == {(PLAIN, True), ("four", True), ("four", False), ("eight", False)}


def voted() -> str:
    module: Any = build("Mlp")
    model = DistributedDataParallel(module, bucket_cap_mb=SMALL_BUCKETS)
    attachment = sync.attach(model, SignSGD())
    try:
        with model.join():
            train(model, module, range(EVEN + 2 * dist.get_rank()), lambda _: None)
    except RuntimeError as error:
        return str(error)
    finally:
        attachment.close()
    return ""


def test_a_rank_without_inputs_has_no_vote():
    first, second = values_of(run_ranks(2, voted, group_timeout_s=60.0, timeout_s=50.0, fresh=True, exits=False))
    assert "no inputs left" in first and second, "the others do not wait for it"
