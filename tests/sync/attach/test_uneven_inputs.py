"""DDP's ``join()``, where ranks have different numbers of inputs: plain averaging goes on, compression refuses it."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gckernels import EFSignSGD, sync
from models import SMALL_BUCKETS, build
from ranks import run_ranks, values_of
from tunings import PLAIN, scripted, train
from workloads import digest_of

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


def compressed() -> str:
    module: Any = build("Mlp")
    model = DistributedDataParallel(module, bucket_cap_mb=SMALL_BUCKETS)
    attachment = sync.attach(model, EFSignSGD())
    try:
        with model.join():
            train(model, module, range(EVEN + 2 * dist.get_rank()), lambda _: None)
    except RuntimeError as error:
        return str(error)
    finally:
        attachment.close()
    return ""


def test_a_rank_without_inputs_cannot_compress():
    first, second = values_of(run_ranks(2, compressed, group_timeout_s=5.0, fresh=True))
    assert "no inputs left" in first and second
