"""Models with unusual parameters are planned as others are: without elements, of no dimension, frozen, complex."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gckernels import sync
from ranks import run_ranks, values_of

KINDS = {
    "none": lambda: None,
    "no elements": lambda: torch.empty(0, 4),
    "no elements, complex": lambda: torch.empty(3, 0, dtype=torch.complex64),
    "scalar": lambda: torch.tensor(1.0),
    "complex": lambda: torch.randn(5, 3, dtype=torch.complex64),
    "half": lambda: torch.randn(5, 3, dtype=torch.bfloat16),
    "double": lambda: torch.randn(5, 3, dtype=torch.float64),
}


class Unusual(nn.Module):
    """Two layers, and a parameter of which a step uses the sum."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(13, 257)
        made = KINDS[kind]()
        self.between = None if made is None else nn.Parameter(made)
        self.last = nn.Linear(257, 3)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(inputs))
        if self.between is not None:
            hidden = hidden + self.between.sum().abs().float()
        return self.frozen(self.last(hidden)).square().mean()


def planned(front: str) -> list[tuple[str, list[str], bool]]:
    """For each kind the decisions of a training, and whether a step compresses anything."""
    found = []
    for kind in KINDS:
        module = Unusual(kind)
        model = DistributedDataParallel(module) if front == "ddp" else module
        handle = sync.attach(model)
        compresses, optimizer = False, torch.optim.SGD(module.parameters(), lr=0.01)
        for step in range(60):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(2 * step + dist.get_rank())
            model(torch.randn(4, 13, generator=generator)).backward()
            optimizer.step()
            if compresses := handle.stats()["compressed_units"] > 0:
                break
        found.append((kind, [each.text for each in handle.decisions], compresses))
        handle.close()
    return found


@pytest.mark.parametrize("front", ["ddp", pytest.param("module", marks=pytest.mark.slow)])
def test_every_kind_of_parameter_is_planned(front):
    for found in values_of(run_ranks(2, planned, front)):
        for kind, texts, compresses in found:
            assert texts == [] and compresses, f"{kind}: plans are tried: {texts}"
