"""Whatever a training does with its model between two steps, gradients are those of a run with plain averages."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations, prune

import model_uses
from gckernels import Identity, sync
from gckernels.sync.programs import ALLGATHER
from ranks import run_ranks, values_of
from workloads import digest_of


class Net(nn.Module):
    """A network with a convolution, whose weights can lie in memory in two orders, and with buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8 * 16, 9)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.norm(self.conv(batch)))
        return self.head(hidden.flatten(1)).square().mean()

    @staticmethod
    def batch(step: int, rank: int) -> torch.Tensor:
        return torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(2 * step + rank))


USES = model_uses.USES | {
    "pruned": lambda module, loss: prune.identity(module.head, "weight"),
    "normed": lambda module, loss: parametrizations.spectral_norm(module.head),
}


def loss_of(module: nn.Module) -> torch.Tensor:
    return module(Net.batch(100, dist.get_rank()))


# -------------------------------------------------------------------- comparison with plain averages

FRONTS = ("module", "attach", "attach to views")
NOT_UNDER = {
    "module": set[str](),
    "attach": {*model_uses.BREAKS_DDP, "normed"},
    "attach to views": {*model_uses.BREAKS_VIEWS, "normed"},
}


def gradients(module: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


def average_plainly(module: nn.Module) -> None:
    for gradient in gradients(module):
        dist.all_reduce(gradient.mul_(1 / dist.get_world_size()))


def trained(use: str, front: str | None) -> list[str]:
    """Train around a use of the model with a plan that encodes without error, and return the digests of each step's
    gradients.

    Args:
        use: a key of :data:`USES`.
        front: the way in which gradients are averaged; ``None`` for plain averages.
    """
    module, handle = Net(), None
    model: nn.Module = module
    if front is not None and front != "module":
        model = DistributedDataParallel(module, gradient_as_bucket_view=front == "attach to views")
    if front is not None:
        start = sync.attach
        handle = start(model, sync.uniform_plan(model, Identity(), program=ALLGATHER))
    digests = []
    for step in range(5):
        if step in (1, 3):
            USES[use](module, loss_of)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        optimizer.zero_grad(set_to_none=step > 2)
        model(Net.batch(step, dist.get_rank())).backward()
        if front is None:
            average_plainly(module)
        digests.append(digest_of(gradients(module)))
        optimizer.step()
    if handle is not None:
        handle.close()
    return digests


def wrong(in_turns: bool) -> list[tuple[str, str, list[bool]]]:
    """Uses after which gradients are not the plain averages, with the steps in which they are; each use with all front
    ends, or with one of the first two in turns."""
    found = []
    for number, use in enumerate(USES):
        expected = trained(use, None)
        fronts = [front for front in FRONTS if use not in NOT_UNDER[front]]
        for front in (fronts[: number % 2 + 1][-1],) if in_turns else fronts:
            if (digests := trained(use, front)) != expected:
                found.append((use, front, list(map(str.__eq__, digests, expected))))
    return found


@pytest.mark.parametrize("in_turns", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["in turns", "all"])
def test_gradients_after_any_use_of_the_model(in_turns):
    assert values_of(run_ranks(2, wrong, in_turns)) == [[], []]
