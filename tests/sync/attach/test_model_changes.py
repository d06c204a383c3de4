"""Models whose parameters change after Synchronizer was constructed."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from gckernels import sync
from models import Mlp, build
from ranks import run_ranks, values_of


def error_of_step(module: nn.Module, step: int = 0, dtype: torch.dtype = torch.float32) -> str:
    try:
        module(Mlp.batch(step, dist.get_rank(), dtype)).backward()
    except RuntimeError as error:
        return str(error)
    return "no error"


def converted() -> None:
    """A training with another dtype is refused on all ranks, and goes on when the model is as it was."""
    module = build("Mlp")
    sync.Synchronizer(module, "BlockQuant")
    assert error_of_step(module) == "no error"
    text = error_of_step(module.double(), dtype=torch.float64)
    assert "gradient of layers.4.bias is torch.float64 [7] on cpu, and was to be torch.float32 [7] on cpu" in text
    module.float().zero_grad()
    assert error_of_step(module) == "no error"


def test_parameters_that_have_been_converted_are_named():
    values_of(run_ranks(2, converted))
