"""DDP's ``join()``, where ranks have different numbers of inputs: plain averaging goes on, and so does a plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gckernels import BlockQuant, EFSignSGD, SignSGD, sync
from gckernels.sync.tuning.rules import STEPS
from models import SMALL_BUCKETS, build
from ranks import run_ranks, values_of
from tunings import PLAIN, policy_of, scripted, train
from workloads import digest_of, mass_of

EVEN = 4
"""Steps that all ranks have."""


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


def compressed(inputs: int, changes: bool, joins: bool) -> Any:
    """Digests of a training in which rank 1 has two inputs more than rank 0.

    Args:
        inputs: the number of steps for which rank 0 has inputs.
        changes: whether another plan follows in the first of these steps.
        joins: whether the ranks are in ``join()``; otherwise rank 0 trains with zeros where it has no inputs.
    """
    module: Any = build("Mlp")
    model = DistributedDataParallel(module, bucket_cap_mb=SMALL_BUCKETS)
    attachment, optimizer = sync.attach(model, EFSignSGD()), torch.optim.SGD(module.parameters(), lr=0.05)
    rank, seen = dist.get_rank(), []

    def step(number: int, factor: float = 1.0) -> None:
        optimizer.zero_grad()
        (model(module.batch(number, rank)) * factor).backward()
        optimizer.step()
        if rank:
            seen.append(digest_of(parameter.grad for parameter in module.parameters()))

    for number in range(3):
        step(number)
    if changes:
        attachment.change_plan(sync.plan(model, BlockQuant()))
    with model.join(enable=joins):
        for number in range(3, 3 + inputs + 2 * (rank if joins else 1)):
            step(number, float(rank or number < 3 + inputs))
    seen.append(attachment.plan.fingerprint())
    for number in range(30, 33):
        step(number)
    seen += [digest_of(module.parameters()), digest_of(mass_of(attachment).values()), attachment.steps]
    attachment.close()
    return seen


def joined_and_not(cases: list[tuple[int, bool]]) -> Any:
    return [(compressed(*case, joins=True), compressed(*case, joins=False)) for case in cases]


def test_a_rank_without_inputs_sends_what_its_residuals_hold():
    for pairs in values_of(run_ranks(2, joined_and_not, [(4, False), (0, False), (0, True)])):
        for joined, expected in pairs:
            assert joined == expected


def tuned() -> Any:
    """The plans of a training whose ranks have different numbers of inputs when its tuning has found one."""
    module, handles = build("Mlp"), []
    model = DistributedDataParallel(module, bucket_cap_mb=SMALL_BUCKETS)
    with scripted(module, {"four": "BlockQuant(bits=4)"}, {PLAIN: 1.0, "four": 0.5}, handles):
        attachment = sync.attach(model)
        handles.append(attachment)
        train(model, module, range(STEPS + 2), lambda _: None)
        with model.join():
            train(model, module, range(EVEN + 2 * dist.get_rank()), lambda _: None)
        seen = train(model, module, range(30, 33), lambda _: digest_of(module.parameters()))
    texts, policy, steps = [each.text for each in attachment.decisions], policy_of(attachment), attachment.steps
    attachment.close()
    return seen, texts, policy, steps


def test_a_plan_that_was_found_goes_on_without_tuning():
    first, second = values_of(run_ranks(2, tuned))
    assert first == second
    _, texts, policy, steps = first
    assert policy == "four" and steps == STEPS + 2 + EVEN + 2 + 3
    assert len(texts) == 2 and "join()" in texts[1] and "training goes on with the plan that runs now" in texts[1]


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
    first, second = values_of(run_ranks(2, voted, group_timeout_s=60.0, timeout_s=50.0, fresh=True))
    assert "no inputs left" in first and second, "the others do not wait for it"
