"""A hook that nobody uses averages as DDP does, and copies of a model have none."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gckernels import EFSignSGD
from gckernels.sync import attach
from models import SMALL_BUCKETS, build
from ranks import run_ranks, values_of
from workloads import digest_of

NEVER = 10**9  # a start_step: all gradients go through the hook, and none is compressed


def trained(model: Any, step: int) -> str:
    """The digest of the gradients of a step."""
    model.zero_grad()
    model(model.module.batch(step, dist.get_rank())).backward()
    return digest_of(each.grad for each in model.parameters())


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
}


def copied(how: str) -> None:
    """A model is copied while it has a hook, and when that is released; both go on as plain DDP."""
    plain: Any = DistributedDataParallel(build("Mlp"), bucket_cap_mb=SMALL_BUCKETS)
    model: Any = DistributedDataParallel(build("Mlp"), bucket_cap_mb=SMALL_BUCKETS)
    attachment = attach(model, EFSignSGD(), start_step=NEVER)
    copies = []
    for step in range(6):
        expected = trained(plain, step)
        assert all(trained(each, step) == expected for each in (model, *copies)), step
        if step == 1:
            copies.append(COPIES[how](model))
        if step == 3:
            attachment.close()
            copies.append(COPIES[how](model))
            again = attach(copies[0], EFSignSGD(), start_step=NEVER)  # a copy can have its own
    again.close()
    assert not any(each._comm_hooks for each in (model, *copies))


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_has_no_hook(how):
    values_of(run_ranks(2, copied, how))


def uneven(closes: bool, divides_by_all: bool) -> list[str]:
    """Digests of a training in which rank 0 has no inputs in ``join()``, so that only rank 1 has forwards there."""
    model: Any = DistributedDataParallel(build("Mlp"), bucket_cap_mb=SMALL_BUCKETS)
    rank, seen = dist.get_rank(), []
    if closes:
        attachment = attach(model, EFSignSGD(), start_step=NEVER)
    for step in range(2):
        trained(model, step)
    if closes:
        attachment.close()
    with model.join(divide_by_initial_world_size=divides_by_all):
        for step in range(2, 2 + 2 * rank):
            seen.append(trained(model, step))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
    return [*seen, trained(model, 9)]


def uneven_after_the_end() -> None:
    for divides_by_all in (True, False):
        assert uneven(True, divides_by_all) == uneven(False, divides_by_all)


def test_a_released_hook_averages_uneven_inputs_as_ddp_does():
    values_of(run_ranks(2, uneven_after_the_end))
