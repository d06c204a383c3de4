"""A training gives the same bits, whatever its process has set for torch."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gckernels import sync
from models import SMALL_BUCKETS
from process_settings import SETTINGS
from ranks import run_ranks, values_of
from workloads import SPECS, digest_of

STEPS = 2


class Layers(nn.Module):
    """A matrix for every method; both the loss and its gradients are in fp32 whatever the settings are."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(20, 30, device="cpu", dtype=torch.float32) for _ in SPECS)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return sum(((weight - batch) ** 2 * (index + 1)).sum() for index, weight in enumerate(self.weights))


def plan_of(module: nn.Module) -> sync.Plan:
    """A plan in which every matrix has another method."""
    units = []
    for spec, (name, weight) in zip(SPECS, module.named_parameters(), strict=True):
        (unit,) = sync.uniform_plan([(name, weight)], spec, exempt=None, world_size=2).units
        units.append(unit)
    return sync.Plan(tuple(units))


def trained(front: str, setting: str | None) -> str:
    """A digest of all gradients of a training under a setting that is on from the attachment on. In inference mode only
    calls of the package are, because nobody trains there."""
    whole, calls = (None, setting) if setting == "inference" else (setting, None)

    def calling() -> Any:
        return SETTINGS[calls]() if calls else contextlib.nullcontext()

    torch.manual_seed(0)
    module = Layers()
    batches = [torch.randn(20, 30) + dist.get_rank() for _ in range(2 * STEPS)]
    model = DistributedDataParallel(module, bucket_cap_mb=SMALL_BUCKETS) if front == "attach" else module
    seen: list[Any] = []
    with SETTINGS[whole]() if whole else contextlib.nullcontext():
        with calling():
            handle = sync.attach(model, plan_of(module), can_discard=True)
        for step, batch in enumerate(batches):
            model.zero_grad()
            model(batch).backward()
            seen += [weight.grad.clone() for weight in module.weights]
            if step == STEPS - 1:
                with calling():
                    handle.discard_step()
            if step == STEPS:
                with calling():
                    handle.load_state_dict(handle.state_dict())
        with calling():
            handle.change_plan(sync.uniform_plan(model, "BlockQuant"))
        model(batches[0]).backward()
        seen += [weight.grad.clone() for weight in module.weights]
        handle.close()
    return digest_of(seen)


def all_trained(front: str, settings: tuple[str | None, ...]) -> list[str]:
    return [trained(front, setting) for setting in settings]


# `make test` takes every setting, with one of the front ends
@pytest.mark.host_only("it sets the default device itself")
@pytest.mark.parametrize(
    ("front", "settings"),
    [
        ("attach", ("bfloat16", "inference")),
        ("module", ("another device", "deterministic")),
        pytest.param("attach", ("another device", "deterministic"), marks=pytest.mark.slow),
        pytest.param("module", ("bfloat16", "inference"), marks=pytest.mark.slow),
    ],
)
def test_gradients_are_the_same(front, settings):
    found = values_of(run_ranks(2, all_trained, front, (None, *settings)))
    assert len({digest for digests in found for digest in digests}) == 1
