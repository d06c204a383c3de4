"""Every step of a model with a hook is counted once, whichever buckets DDP hands over, in however many backwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from gckernels import sync
from models import SMALL_BUCKETS, Halves
from ranks import run_ranks, values_of
from workloads import digest_of

STEPS = 6


class Three(nn.Module):
    """Three layers of a bucket each. One can be left out, or all be computed once more, in backwards of their own."""

    def __init__(self, left_out: str = "", recomputes: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(40, 40) for _ in range(3))
        self._names, self._recomputes = [name for name in "abc" if name != left_out], recomputes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in self._names:
            layer = getattr(self, name)
            x = checkpoint(layer, x, use_reentrant=True) if self._recomputes else layer(x)
        return torch.tanh(x).sum()


class Mixed(nn.Module):
    """Two layers with parameters of two types, which DDP puts into two buckets in any case."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(40, 40), nn.Linear(40, 40).to(torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x).sum() + self.b(x.to(torch.bfloat16)).float().sum()


class Broken(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("no gradient")


def at_once(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step * 97 + dist.get_rank())
    model(torch.randn(8, 40, generator=generator).requires_grad_()).backward()


def after_a_failure(model: nn.Module, step: int) -> None:
    with pytest.raises(ArithmeticError, match="no gradient"):
        Broken.apply(model(torch.ones(8, 40))).backward()
    at_once(model, step)


def in_two_parts(model: nn.Module, step: int) -> None:
    losses = model(torch.ones(2, 5) + dist.get_rank())
    losses["1"].backward()
    losses["0"].backward()


SKIPS = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True}
CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, bool], Callable[[nn.Module, int], None]]] = {
    "no first bucket": (lambda: Three("c"), SKIPS, at_once),
    "no second bucket": (lambda: Three("b"), SKIPS, at_once),
    "no last bucket": (lambda: Three("a"), SKIPS, at_once),
    "buckets with one number": (Mixed, {"static_graph": True}, at_once),
    "backwards in a backward": (lambda: Three(recomputes=True), {}, at_once),
    "two backwards": (Halves, {}, in_two_parts),
    "failed backwards": (Three, {}, after_a_failure),
}


def counted(case: str) -> None:
    make, options, train = CASES[case]
    torch.manual_seed(0)
    model = DistributedDataParallel(make(), bucket_cap_mb=SMALL_BUCKETS, **options)
    attachment = sync.attach(model, sync.uniform_plan(model, "RandomK(ratio=0.2)", exempt=None))
    heard: list[int] = []
    attachment.on_step_end(lambda: heard.append(attachment.steps))
    sent, drawn = [], []
    for step in range(STEPS):
        model.zero_grad()
        train(model, step)
        assert heard == list(range(1, step + 2)), case
        assert attachment.state_dict()["step"] == step + 1, case
        sent.append(attachment.stats()["sent_nbytes"])
        drawn.append(digest_of(each.grad != 0 for each in model.parameters() if each.grad is not None))
    attachment.close()
    assert len(set(sent[-3:])) == 1 and sent[-1] > 0, case
    assert len(set(drawn[-3:])) == 3, case  # other elements in each step


def all_counted() -> None:
    for case in CASES:
        counted(case)


def test_every_step_is_counted_once():
    values_of(run_ranks(2, all_counted))
