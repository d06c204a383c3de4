"""Models whose branches compute on streams of their own: their gradients come on several streams."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gckernels import sync
from gckernels.devices import current_stream, is_accelerator, new_stream, on_stream
from ranks import run_ranks, values_of
from workloads import digest_of


class Beside(nn.Module):
    """Two branches of two layers each, side by side if there are streams."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32)) for _ in range(2))

    def forward(self, inputs: torch.Tensor, streams: list[torch.Stream]) -> torch.Tensor:
        if not streams:
            return sum(branch(inputs) for branch in self.branches)
        here, results = current_stream(inputs.device), []
        for branch, stream in zip(self.branches, streams, strict=True):
            stream.wait_stream(here)
            with on_stream(stream):
                results.append(branch(inputs))
        for stream in streams:
            here.wait_stream(stream)
        return sum(results)


def plan_of(model: nn.Module, first: str, second: str) -> sync.Plan:
    """A plan with a compressor for each branch. Messages of the second one come first."""
    one, other = (sync.uniform_plan(model, spec, exempt=None) for spec in (first, second))
    pairs = zip(one.units, other.units, strict=True)
    return one.with_units([a if "branches.0" in a.key else b for a, b in pairs])


def trained(specs: tuple[str, str], has_streams: bool, ddp: dict[str, Any] | None, bucket_cap_mb: float) -> str:
    """The digest of the gradients of some steps."""
    torch.manual_seed(0)
    model: Any = Beside()
    device = torch.get_default_device()
    streams = [new_stream(device) for _ in model.branches] if has_streams and is_accelerator(device) else []
    own = {"bucket_cap_mb": bucket_cap_mb}
    if ddp is not None:
        model, own = DistributedDataParallel(model, bucket_cap_mb=bucket_cap_mb, **ddp), {}
    attachment = sync.attach(model, plan_of(model, *specs), start_step=1, **own)
    generator, found = torch.Generator().manual_seed(dist.get_rank()), []
    for _ in range(4):
        model(torch.randn(8, 32, generator=generator), streams).square().mean().backward()
        found += [each.grad.clone() for each in model.parameters()]
        model.zero_grad()
    attachment.close()
    return digest_of(found)


def both(specs: tuple[str, str], ddp: dict[str, Any] | None) -> bool:
    """Whether streams change nothing, in one bucket and in several, of which each has gradients of one branch."""
    return all(trained(specs, True, ddp, each) == trained(specs, False, ddp, each) for each in (1.0, 0.003))


@pytest.mark.parametrize(
    "specs", [("QSGD", "QSGD"), ("PowerSGD(rank=2)", "PowerSGD(rank=2)"), ("QSGD", "Identity")], ids="-".join
)
@pytest.mark.parametrize("ddp", [None, {}, {"gradient_as_bucket_view": True}, {"static_graph": True}])
def test_branches_on_streams(specs, ddp):
    assert all(values_of(run_ranks(2, both, specs, ddp)))
