"""Models of FSDP2, plans and settings that are refused on all ranks alike, and what is warned of."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from unittest import mock

import pytest
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import Shard

from gckernels import sync
from gckernels.sync import Attachment
from gckernels.sync.frontends.checks.models import refuse_sharded
from gckernels.sync.frontends.sharded.shard_groups import ShardGroup
from ranks import run_ranks, values_of
from sharded_models import SETTINGS, Net, Reentrant, Setting, adamw, model_of, split, train

PLAIN = SETTINGS["plain"]


def _twice() -> Attachment:
    model = model_of(PLAIN, "hsdp")
    first = sync.attach(model, "EFSignSGD")
    try:
        return sync.attach(model, "EFSignSGD")
    finally:
        first.close()


def _with_parts(form: str) -> Attachment:
    model = model_of(PLAIN, form)
    return sync.attach(model, sync.uniform_plan(model, "EFSignSGD").parted(16))


def _along_columns() -> Attachment:
    model = nn.Linear(8, 8)
    split(model, [model], "fsdp", shard_placement_fn=lambda parameter: Shard(parameter.dim() - 1))
    return sync.attach(model, "EFSignSGD")


def _offloading() -> Attachment:
    model = nn.Linear(8, 8)
    split(model, [model], "fsdp")
    with mock.patch.object(ShardGroup, "offloads", True):  # FSDP offloads nothing without a device
        return sync.attach(model, "EFSignSGD")


ATTEMPTS: dict[str, tuple[Callable[[], Attachment], str]] = {
    "scaler": (
        lambda: sync.attach(model_of(PLAIN, "hsdp"), "EFSignSGD", can_discard=True),
        "ValueError: attach: grad_scaler and can_discard must be",
    ),
    "budget": (
        lambda: sync.attach(model_of(PLAIN, "hsdp"), "EFSignSGD", memory_budget_mb=1.0),
        "ValueError: attach: memory_budget_mb must be None for a model of fully_shard or replicate",
    ),
    "group": (
        lambda: sync.attach(model_of(PLAIN, "fsdp"), "EFSignSGD", bucket_cap_mb=1.0),
        "ValueError: attach: bucket_cap_mb is only for bare modules",
    ),
    "parts of hsdp": (lambda: _with_parts("hsdp"), "PlanError: plan has parts of parameters"),
    "parts of fsdp": (lambda: _with_parts("fsdp"), "PlanError: plan has parts of parameters"),
    "twice": (_twice, "ValueError: attach: parameter"),
    "columns": (_along_columns, "ValueError: attach: parameter weight or another of its group is sharded along"),
    "factors": (
        lambda: sync.attach(model_of(PLAIN, "fsdp"), "PowerSGD"),
        "PlanError: plan does not fit the model:\n  second.weight: PowerSGD takes whole parameters, and FSDP has",
    ),
    "momentum": (
        lambda: sync.attach(model_of(PLAIN, "fsdp"), "DGC"),
        "PlanError: plan does not fit the model:\n  second.weight: DGC takes whole parameters, and FSDP has",
    ),
    "offload": (_offloading, "ValueError: attach: parameter weight is offloaded to the CPU, which is not supported"),
    "plan for DDP": (
        lambda: sync.attach(model_of(PLAIN, "fsdp"), sync.uniform_plan(Net(), "EFSignSGD", world_size=2)),
        "PlanError: attach: the plan is for",
    ),
}


def refused(attempt: str) -> str:
    try:
        ATTEMPTS[attempt][0]()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def all_refused() -> dict[str, str]:
    return {attempt: refused(attempt) for attempt in ATTEMPTS}


def test_what_is_not_supported_is_refused_on_all_ranks():
    for texts in values_of(run_ranks(4, all_refused)):
        for attempt, (_, begin) in ATTEMPTS.items():
            assert texts[attempt].startswith(begin), attempt


def in_parts(form: str) -> str:
    """The error of a backward with a backward of its own in it."""
    setting = Setting(
        make=lambda model: setattr(model, "second", Reentrant()),
        splits=lambda model: iter((model.second.inner, model)),
    )
    model = model_of(setting, form)
    attachment = sync.attach(model, "EFSignSGD")
    try:
        train(model, setting, range(1), adamw(model))
    except RuntimeError as error:
        return str(error)
    finally:
        attachment.close()
    return ""


@pytest.mark.parametrize("form", ["hsdp", "fsdp"])
def test_a_backward_in_parts_is_refused(form):
    for text in values_of(run_ranks(2, in_parts, form)):
        assert "use use_reentrant=False" in text


def left_alone() -> list[str]:
    """The warnings of an attachment to a model of which FSDP knows only a part."""
    model = Net()
    split(model, [model.second], "fsdp")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sync.attach(model, "EFSignSGD").close()
    return [str(each.message) for each in caught if "gckernels" in str(each.message)]


def test_parameters_that_fsdp_does_not_know_are_warned_of():
    for texts in values_of(run_ranks(2, left_alone)):
        assert texts == [
            "gckernels: parameter first.weight and 5 more are in no group of FSDP, or in one with another mesh than "
            "the first; without compression, as before"
        ]


def test_fsdp1_is_refused():
    model = FullyShardedDataParallel.__new__(FullyShardedDataParallel)  # its constructor needs a device
    nn.Module.__init__(model)
    with pytest.raises(TypeError, match="attach: the model is not supported, it is in FullyShardedDataParallel; use"):
        refuse_sharded("attach", model)
