"""Models with sparse gradients, which DDP averages and no plan can send: attached without a plan, they stay plain."""

from __future__ import annotations

import logging
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gckernels import sync
from gckernels.sync.frontends.ddp.reducer import comm_hook
from gckernels.sync.tuning import tuning
from ranks import run_ranks, values_of
from workloads import digest_of


def trained(attaches: bool) -> Any:
    """Digests of the weights of a training, and what its attachment says."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.EmbeddingBag(50, 8, sparse=True, mode="sum"), torch.nn.Linear(8, 8))
    model, found = DistributedDataParallel(module), []
    handle = sync.attach(model) if attaches else None
    optimizer, tokens = torch.optim.SGD(module.parameters(), lr=0.1), torch.Generator().manual_seed(dist.get_rank())
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randint(50, (4, 3), generator=tokens)).square().sum().backward()
        optimizer.step()
        found.append(digest_of(module.parameters()))
    if handle is None:
        return found
    with pytest.raises(ValueError, match=r"change_plan: parameter 0\.weight has a sparse gradient"):
        handle.change_plan(sync.uniform_plan(model, "BlockQuant"))
    state = [(each.level, each.text) for each in handle.decisions], comm_hook(model), handle.steps
    handle.close()
    return found, state


def with_and_without() -> Any:
    with mock.patch.object(tuning, "Tuner", None):  # nothing is tried in vain
        return trained(True), trained(False)


@pytest.mark.host_only("the simulated device has no sparse tensors")
def test_a_model_with_sparse_gradients_stays_plain_with_one_line_that_says_why():
    for (found, (decisions, hook, steps)), expected in values_of(run_ranks(2, with_and_without)):
        ((level, text),) = decisions
        assert found == expected and hook is None and steps == len(found)
        assert level == logging.WARNING and "parameter 0.weight has a sparse gradient" in text
        assert "training goes on with plain averaging" in text
