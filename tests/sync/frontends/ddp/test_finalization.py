"""Steps whose end the training declares itself, with ``finalize_backward()`` of torch 2.15."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gckernels import Identity, sync
from gckernels.sync.programs import ALLREDUCE
from models import SMALL_BUCKETS, build
from ranks import run_ranks, values_of
from workloads import digest_of

pytestmark = pytest.mark.skipif(
    not hasattr(DistributedDataParallel, "finalize_backward"), reason="torch 2.15 is the first release with it"
)


def trained(compresses: bool | None, manual: bool, inside: bool = False) -> list[Any]:
    """Digests of the gradients of some steps, and the steps that a listener has seen.

    Args:
        compresses: whether the attachment does; ``None`` for no attachment.
        manual: whether the training declares the ends of backwards.
        inside: whether it does so in a hook of backward, where DDP allows it.
    """
    module: Any = build("Mlp")
    model: Any = DistributedDataParallel(module, bucket_cap_mb=SMALL_BUCKETS)
    model.require_manual_backward_finalization = manual
    heard: list[int] = []
    attachment = None
    if compresses is not None:
        plan = (
            sync.uniform_plan(model, "EFSignSGD")
            if compresses
            else sync.uniform_plan(model, Identity(), program=ALLREDUCE)
        )
        attachment = sync.attach(model, plan)
        attachment.on_step_end(lambda: heard.append(1))
    found: list[Any] = []
    for step in range(8):
        model.zero_grad()
        if step == 6 and attachment is not None:
            attachment.close()  # the new reducer must be one of the same kind
            compresses = None
        batch = module.batch(step, dist.get_rank())
        leaf = batch["x"].requires_grad_(True)
        batch["x"] = leaf * 1.0  # its gradient comes behind those of all parameters
        loss = model(batch)
        early = inside and manual and not model.should_finalize_after_backward
        if early:
            leaf.register_hook(lambda gradient: model.finalize_backward())
        loss.backward()
        if manual and not early:
            assert compresses is None or len(heard) == step
            model.finalize_backward()
        assert compresses is None or len(heard) == step + 1
        found.append(digest_of(parameter.grad for parameter in module.parameters()))
    return found


def trained_in_all_ways() -> None:
    plain = trained(None, False)
    for compresses in (False, True):
        expected = trained(compresses, False)
        assert compresses or expected == plain
        for inside in (False, True):
            assert trained(compresses, True, inside) == expected, (compresses, inside)


def test_a_step_ends_when_the_training_says_so():
    values_of(run_ranks(2, trained_in_all_ways))
