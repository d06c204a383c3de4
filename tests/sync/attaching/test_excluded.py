"""Parameters and buffers that each rank has alone stay its own, as those that DDP ignores do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gckernels import sync
from ranks import run_ranks, values_of
from workloads import digest_of

OWN = ["experts.0.weight", "experts.0.bias", "table"]


class Experts(nn.Module):
    """A network with an expert and a buffer of its own on each rank, and a parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate = nn.Linear(8, 40)
        self.empty = nn.Parameter(torch.empty(0, 3))
        torch.manual_seed(100 + dist.get_rank())
        self.experts = nn.ModuleList([nn.Linear(40, 40)])
        self.register_buffer("table", torch.randn(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts[0](torch.relu(self.gate(x))).square().mean() + self.empty.sum()


def on_all(tensors: Any) -> bool:
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, digest_of(tensors))
    return len(set(digests)) == 1


def own() -> None:
    for kind in ("bare", "updates"):
        for ignored in (OWN, OWN[:2], []):
            model = Experts()
            before = digest_of([*model.experts.parameters(), model.table])
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
            settings: dict[str, Any] = {"exclude": [name for name in OWN if name not in ignored]}
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            if kind == "bare":
                attachment = sync.attach(model, "BlockQuant(bits=4)", **settings)
            else:
                plan = sync.uniform_plan(model, "BlockQuant(bits=4)")
                attachment = sync.attach(model, sync.Updates(optimizer, plan, every=2), **settings)
            assert digest_of([*model.experts.parameters(), model.table]) == before
            assert {"gate.weight", "gate.bias"} == attachment.parameters().keys() - {"empty"}
            generator = torch.Generator().manual_seed(dist.get_rank())
            for step in range(8):
                optimizer.zero_grad()
                model(torch.randn(4, 8, generator=generator)).backward()
                optimizer.step()
                if step == 3:
                    attachment.load_state_dict(attachment.state_dict())
                    attachment.change_plan(sync.uniform_plan(model, "EFSignSGD"))
            assert on_all(model.gate.parameters()) and not on_all(model.experts.parameters())
            assert digest_of([*model.experts.parameters(), model.table]) != before
            other = sync.attach(model.experts, "Identity")  # nobody else has a claim on them
            other.close()
            attachment.close()


def tied() -> None:
    """A parameter that has a name which is not left out is averaged."""
    model = Experts()
    model.gate.weight = nn.Parameter(torch.randn(40, 8))
    model.again = nn.Linear(8, 40)
    model.again.weight = model.gate.weight
    attachment = sync.attach(model, "Identity", exclude=["gate.weight", *OWN], find_unused_parameters=True)
    assert "gate.weight" in attachment.parameters() and on_all([model.gate.weight])
    attachment.close()


def refused() -> None:
    model = Experts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for how in ("Identity", sync.Updates(optimizer, "Identity")):
        for wrong, error in ((["experts.1.weight"], ValueError), ("table", TypeError), ([3], TypeError)):
            with pytest.raises(error, match=r"exclude must (have|be a list of) names of parameters and buffers, got"):
                sync.attach(model, how, exclude=wrong)
        with pytest.raises(RuntimeError, match=r"the ranks do not have the same settings|does not fit|failed on rank"):
            sync.attach(model, how, exclude=OWN if dist.get_rank() else [])
    wrapped = DistributedDataParallel(model)
    with pytest.raises(ValueError, match="exclude is only for bare modules"):
        sync.attach(wrapped, "Identity", exclude=OWN)


def kinds() -> None:
    own()
    tied()
    refused()


def test_what_each_rank_has_alone():
    values_of(run_ranks(2, kinds))
