"""Gradients of a bare module are averaged as the hooks of its parameters have left them, whenever they came to be."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gckernels import sync
from models import SMALL_BUCKETS, Mlp, build
from ranks import run_ranks, values_of
from workloads import digest_of

STEPS = 3


def _in_place(parameter: torch.Tensor) -> None:
    parameter.grad *= 2 + dist.get_rank()


def _replaced(parameter: torch.Tensor) -> None:
    parameter.grad = parameter.grad * (2 + dist.get_rank())


def _at_tensor(parameter: torch.nn.Parameter, kept: list[Any]) -> None:
    parameter.register_hook(lambda gradient: gradient * (2 + dist.get_rank()))


def _at_node(parameter: torch.nn.Parameter, kept: list[Any]) -> None:
    kept.append(torch.autograd.graph.get_gradient_edge(parameter).node)  # which lives as long as somebody has it
    kept[-1].register_hook(lambda *_: _in_place(parameter))


REGISTERED: dict[str, Callable[[torch.nn.Parameter, list[Any]], object]] = {
    "in place": lambda parameter, kept: parameter.register_post_accumulate_grad_hook(_in_place),
    "replaced": lambda parameter, kept: parameter.register_post_accumulate_grad_hook(_replaced),
    "tensor": _at_tensor,
    "node": _at_node,
}


def hooked(kind: str, when: str, spec: str) -> list[str]:
    """Digests of a training whose hooks change each gradient on each rank in another way."""
    module, kept = build("Mlp"), list[Any]()
    model: Any = DistributedDataParallel(module, bucket_cap_mb=SMALL_BUCKETS) if when == "DDP" else module
    if when == "DDP" and kind == "node":  # DDP has its own first
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(_in_place)
    attaches: list[Callable[[], Any]] = [
        lambda: [REGISTERED[kind](each, kept) for each in module.parameters() if (when, kind) != ("DDP", "node")],
        lambda: sync.attach(model, spec, **({} if when == "DDP" else {"bucket_cap_mb": SMALL_BUCKETS})),
    ]
    for act in attaches[:: -1 if when == "after" else 1]:
        act()
    optimizer, digests = torch.optim.SGD(module.parameters(), lr=0.01), []
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=bool(step % 2))
        model(module.batch(step, dist.get_rank())).backward()
        digests.append(digest_of(each.grad for each in module.parameters()))
        optimizer.step()
    return digests


def all_hooked(spec: str) -> dict[tuple[str, str], list[str]]:
    return {(kind, when): hooked(kind, when, spec) for kind in REGISTERED for when in ("DDP", "before", "after")}


@pytest.mark.parametrize("spec", ["BlockQuant", pytest.param("Identity", marks=pytest.mark.slow)])
def test_hooks_of_parameters_come_before_the_average(spec):
    found, other = values_of(run_ranks(2, all_hooked, spec))
    assert found == other
    for kind in REGISTERED:
        assert found[kind, "before"] == found[kind, "after"] == found[kind, "DDP"][:STEPS], kind


def compiled() -> list[str]:
    """The errors of backwards under compiled autograd."""
    compiled_autograd = pytest.importorskip("torch._dynamo.compiled_autograd")
    module, texts = build("Mlp"), []
    sync.attach(module, "BlockQuant")
    for _ in range(2):
        with pytest.raises(RuntimeError) as raised, compiled_autograd._enable(lambda graph: graph):
            module(module.batch(0, dist.get_rank())).backward()
        texts.append(str(raised.value))
    module.zero_grad()
    module(module.batch(0, dist.get_rank())).backward()  # nothing has begun before
    return texts


def test_compiled_autograd_is_refused_at_once():
    for texts in values_of(run_ranks(2, compiled)):
        assert all("compiled autograd is not supported" in text for text in texts)


class _GivesNone(torch.autograd.Function):
    """A function that gives its second argument a gradient only if it is told to."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, scale: torch.Tensor, gives: bool) -> torch.Tensor:
        ctx.gives = gives
        ctx.save_for_backward(value, scale)
        return value * scale

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        value, scale = ctx.saved_tensors
        return gradients[0] * scale, (gradients[0] * value).sum() if ctx.gives else None, None


class Scaled(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))
        self.gives = True

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        return super().forward({**batch, "x": _GivesNone.apply(batch["x"], self.scale, self.gives)})


def without_gradient(finds: bool) -> list[list[float | None]]:
    """The gradient of a parameter that no rank, one rank, and all ranks give a gradient, with DDP and bare."""
    found = []
    for is_ddp in (True, False):
        torch.manual_seed(0)
        module, row = Scaled(), list[float | None]()
        options = {"find_unused_parameters": finds, "bucket_cap_mb": SMALL_BUCKETS}
        model: Any = DistributedDataParallel(module, **options) if is_ddp else copy.deepcopy(module)
        sync.attach(model, "Identity", **({} if is_ddp else options))
        inner = model.module if is_ddp else model
        for ranks in ((0, 1), (), (1,), (0, 1)):
            inner.zero_grad()
            inner.gives = dist.get_rank() in ranks
            model(Mlp.batch(len(row), dist.get_rank())).backward()
            row.append(None if inner.scale.grad is None else inner.scale.grad.item())
        found.append(row)
    return found


@pytest.mark.parametrize("finds", [True, False])
def test_a_function_may_give_a_parameter_no_gradient(finds):
    for of_ddp, of_module in values_of(run_ranks(2, without_gradient, finds)):
        assert of_ddp == pytest.approx(of_module)
        assert all(of_ddp[number] is not None for number in (0, 2, 3))
