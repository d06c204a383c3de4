"""Parameters that a step does not use: autograd says so, and gradient is neither invented nor lost."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from conservation import plans
from gckernels import sync
from models import SMALL_BUCKETS, Branches, Mlp
from ranks import run_ranks, values_of
from workloads import digest_of, mass_of, summed

PASSES = [  # for each backward, whether ranks 0 and 1 use the right branch, and whether DDP averages
    [((True, True), True), ((False, False), True), ((True, False), True), ((False, False), True)],
    [((False, False), True), ((True, True), False), ((False, False), True), ((False, True), True)],
    [((False, True), False), ((False, False), True), ((False, False), True), ((True, True), True)],
    [((True, True), True), ((True, True), True)],
]
"""The backwards of some steps of an optimizer, which keep their gradients."""


class Account:
    """The gradients that all ranks have given to the parameters of a model, and what has become of them."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._parameters = dict(module.named_parameters())
        self.given = {name: torch.zeros(each.numel(), dtype=torch.float64) for name, each in self._parameters.items()}
        self.got = {name: torch.zeros(each.numel(), dtype=torch.float64) for name, each in self._parameters.items()}

    def give(self, loss: torch.Tensor) -> None:
        gradients = torch.autograd.grad(loss, list(self._parameters.values()), allow_unused=True)
        for given, gradient in zip(self.given.values(), gradients, strict=True):
            mine = torch.zeros_like(given) if gradient is None else gradient.flatten().double()
            given += summed(mine) / dist.get_world_size()

    def close_step(self) -> None:
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                self.got[name] += parameter.grad.flatten().double()
                parameter.grad = None

    def check(self, handle: Any, what: str) -> None:
        masses = mass_of(handle)
        held = {name: torch.zeros_like(each) for name, each in self.given.items()}
        for unit in handle.plan.units:
            start = unit.start or 0
            held[unit.parameter][start : start + unit.numel] += masses[unit.key][-1]
        for name, given in self.given.items():
            grad = self._parameters[name].grad
            kept = self.got[name] + (0.0 if grad is None else grad.flatten().double())
            torch.testing.assert_close(kept + held[name], given, rtol=1e-4, atol=1e-5, msg=f"{what}, {name}")


def kept(as_views: bool, every: int, *names: str) -> None:
    """Gradients are kept over several averages, in which DDP's buckets have old gradients of parameters that are not
    used; and plans change in the middle of it. Each plan has every ``every``-th of the steps, another one first."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    module = Branches()
    options = {"find_unused_parameters": True, "gradient_as_bucket_view": as_views}
    model: Any = DistributedDataParallel(module, bucket_cap_mb=SMALL_BUCKETS, **options)
    account, number = Account(module), 0
    following = plans(module, (2, 1)) | {"levels": plans(module, (1, 2))["levels"]}
    attachment = sync.attach(model, following["none"])
    for turn, name in enumerate(names or following):
        attachment.change_plan(following[name])
        was_used = False
        for passes in PASSES[turn % every :: every]:
            for uses, averages in passes:
                own = Mlp.batch(number, rank) | {"left": True, "right": uses[rank]}
                number += 1
                account.give(module(own))
                was_used = was_used or any(uses)
                before = copy.deepcopy(module.right.weight.grad)
                with contextlib.nullcontext() if averages else model.no_sync():
                    model(own).backward()
                if before is not None and not was_used:
                    assert torch.equal(module.right.weight.grad, before), f"{name}, {uses}"
                if averages:
                    was_used = False
                    account.check(attachment, f"{name}, {uses}")
            account.close_step()
    attachment.close()


@pytest.mark.parametrize(
    ("as_views", "names"), [(False, ()), pytest.param(True, ("signs", "low rank", "ring"), marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("every", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_kept_gradients_of_unused_parameters_come_once(as_views, names, every):
    values_of(run_ranks(2, kept, as_views, every, *names))


class Twins(torch.nn.Module):
    """Two layers, of which the second is used with a factor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(23, 40), torch.nn.Linear(40, 7)

    def forward(self, batch: dict[str, Any], factor: float) -> torch.Tensor:
        hidden = self.second(torch.tanh(self.first(batch["x"])))
        return F.cross_entropy(hidden, batch["y"]) * factor


def with_zeros(program: str, **options: bool) -> list[str]:
    """Digests of a training in which some gradients are zero although all parameters are used."""
    torch.manual_seed(0)
    module: Any = Twins()
    model = DistributedDataParallel(module, bucket_cap_mb=SMALL_BUCKETS, **options)
    attachment = sync.attach(model, sync.uniform_plan(model, "EFSignSGD", program=program, exempt=None), start_step=1)
    digests = []
    for step in range(6):
        model.zero_grad()
        model(Mlp.batch(step, dist.get_rank()), float(step % 3 > 0)).backward()
        digests.append(digest_of(each.grad for each in module.parameters()))
    attachment.close()
    return digests


def with_zeros_both() -> None:
    for program in ("allgather", "alltoall"):
        expected = with_zeros(program)
        assert with_zeros(program, find_unused_parameters=True) == expected
        assert with_zeros(program, static_graph=True) == expected


def test_a_parameter_whose_gradient_is_zero_is_used():
    values_of(run_ranks(2, with_zeros_both))
