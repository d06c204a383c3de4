"""``examples/two_phases.py`` gives the same averages as the engine."""

from __future__ import annotations

import torch
import torch.distributed as dist

import gckernels
from examples.two_phases import TwoPhases
from gckernels import sync
from ranks import run_ranks, values_of

SHAPE = 50, 70


def averages() -> tuple[torch.Tensor, torch.Tensor]:
    """The averages of the engine and of the example for the same gradients, in three steps."""
    network = torch.nn.Linear(SHAPE[1], SHAPE[0], bias=False)
    attachment = sync.attach(network, "EFSignSGD")
    two_phases = TwoPhases(gckernels.EFSignSGD(), network.weight.numel())
    generator = torch.Generator().manual_seed(dist.get_rank())
    engine, example = [], []
    for step in range(4):
        grad = torch.randn(SHAPE, generator=generator)
        network.zero_grad(set_to_none=False)
        (network.weight * grad).sum().backward()
        if step:  # the engine averages the first step exactly
            engine.append(network.weight.grad.clone())
            example.append(two_phases.average(grad.view(-1)).view(SHAPE))
    attachment.close()
    return torch.stack(engine), torch.stack(example)


def test_it_gives_the_bits_of_the_engine_on_all_ranks():
    engines, examples = zip(*values_of(run_ranks(3, averages)), strict=True)
    assert all(torch.equal(one, examples[0]) for one in (*engines, *examples))
    assert examples[0].unique().numel() > 100
