"""Changes of the plan while parameters are not used: they end, and what is left is sent when parameters are used."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gckernels import EFSignSGD, sync
from gckernels.sync import Topology, UnitPlan, attach
from gckernels.sync.frontends.changes import _USED_WITHIN
from gckernels.sync.plans.strides import in_memory, in_reals
from gckernels.sync.programs import ALLGATHER
from gckernels.sync.states.unsent import unsent_by_parameter
from ranks import run_ranks, values_of
from workloads import mass_of, summed

FRONTS = ("attach", "module")
LONG = _USED_WITHIN + 2
"""Steps after which what is left of unused parameters is parked."""


class Branches(nn.Module):
    """A layer, and a branch that a step may leave out: a convolution in channels-last format and complex numbers."""

    def __init__(self, dtype: torch.dtype = torch.complex64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(9, 7, bias=False)
        self.seldom = nn.Conv2d(3, 5, (2, 3)).to(memory_format=torch.channels_last)
        self.phases = nn.Parameter(torch.randn(4, 3, dtype=dtype))

    def forward(self, step: int, uses: bool) -> torch.Tensor:
        generator = torch.Generator().manual_seed(2 * step + dist.get_rank())
        loss = self.layer(torch.randn(4, 9, generator=generator)).square().sum()
        if uses:
            images = torch.randn(2, 3, 4, 4, generator=generator)
            loss = (
                loss
                + self.seldom(images).square().sum()
                + (self.phases @ images[0, :, :, 0].to(self.phases.dtype)).abs().sum()
            )
        return loss


PLANS = {
    "none": ("Identity", "allreduce"),
    "signs": ("EFSignSGD", "alltoall"),
    "root": ("EFSignSGD", "parameter_server"),
    "eight": ("BlockQuant", None),
}


class Training:
    """Training steps without effect on the parameters, and what they have got less than they were given."""

    def __init__(self, front: str, plan: str = "signs", **settings: Any) -> None:
        self.scaler, self.front = settings.get("grad_scaler"), front
        self.module = Branches(torch.complex64 if self.scaler is None else torch.float32)  # scalers refuse complex ones
        self.model: Any = self.module
        if front == "attach":
            self.model = DistributedDataParallel(self.module, bucket_cap_mb=1e-4, find_unused_parameters=True)
            self.handle: Any = attach(self.model, self.plan(plan), **settings)
        else:
            self.handle = attach(
                self.module, self.plan(plan), bucket_cap_mb=1e-4, find_unused_parameters=True, **settings
            )
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.0)
        self.missing = {
            name: torch.zeros_like(in_reals(each)).double() for name, each in self.module.named_parameters()
        }
        self.steps, self.is_poisoned = 0, False
        self.module.layer.weight.register_hook(lambda grad: grad * torch.inf if self.is_poisoned else grad)

    def plan(self, name: str) -> sync.Plan:
        compressor, program = PLANS[name]
        return sync.uniform_plan(self.module, compressor, program=program)

    def train(self, steps: int = 1, uses: bool = True, counts: bool = True, local: int = 0) -> None:
        """Steps.

        Args:
            steps: their number.
            uses: whether this rank uses the branch.
            counts: whether their gradients are used; else a scaler skips them, or the training discards them.
            local: backwards before each that only accumulate.
        """
        for _ in range(steps):
            self.module.zero_grad()
            for number in range(local + 1):
                self._backward(uses, is_poisoned=not counts and self.scaler is not None, averages=number == local)
                self._give(uses, counts)
            scale = 1.0 if self.scaler is None else self.scaler.get_scale()
            for name, parameter in self.module.named_parameters():
                if counts and parameter.grad is not None:
                    self.missing[name] -= in_reals(parameter.grad).double() / scale
            if self.scaler is not None:
                self.scaler.step(self.optimizer)
                self.scaler.update()
            elif not counts:
                self.handle.discard_step()
            self.steps += 1

    def _backward(self, uses: bool, is_poisoned: bool, averages: bool) -> None:
        self.is_poisoned = is_poisoned
        synchronises = self.model if self.front == "attach" else self.handle
        with contextlib.nullcontext() if averages else synchronises.no_sync():
            loss = self.model(self.steps, uses)
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        self.is_poisoned = False

    def _give(self, uses: bool, counts: bool) -> None:
        named = dict(self.module.named_parameters())
        mine = torch.autograd.grad(self.module(self.steps, uses), list(named.values()), allow_unused=True)
        for (name, parameter), grad in zip(named.items(), mine, strict=True):
            reals = in_reals(torch.zeros_like(parameter) if grad is None else grad).double()
            self.missing[name] += summed(reals) / dist.get_world_size() * counts

    def check(self) -> None:
        """Everything that was given and not got is in residuals or parked."""
        masses, parked = mass_of(self.handle), self.handle.state_dict().get("parked", {})
        for name, parameter in self.module.named_parameters():
            part = parked.get(name, torch.zeros(in_reals(parameter).numel()))
            parked_everywhere = summed(part.double().to(parameter.device)).cpu()
            held = masses[name][-1].cpu() + parked_everywhere / dist.get_world_size()
            # a sum of some dozen gradients in fp32
            torch.testing.assert_close(
                in_reals(in_memory(held, parameter)).cpu(), self.missing[name].cpu(), rtol=0, atol=2e-4
            )

    @property
    def parked(self) -> set[str]:
        """The parameters of which this rank has parked something."""
        return {name for name, part in self.handle.state_dict().get("parked", {}).items() if part.any()}


def left(front: str, before: str, after: str) -> None:
    """A change that ends without a use of the branch, which is then used by one rank, and by both."""
    training, rank = Training(front, before), dist.get_rank()
    training.train(3)
    training.handle.change_plan(training.plan(after))
    assert "exact steps, from" in repr(training.handle)
    training.train(_USED_WITHIN - 1, uses=False)
    assert training.handle.is_changing and not training.parked
    training.train(uses=False)
    assert not training.handle.is_changing and training.handle.plan == training.plan(after)
    assert "exact steps" not in repr(training.handle)
    assert training.parked == {"phases", "seldom.weight"} and training.handle.residual_nbytes() > 0
    training.check()
    training.train(2, uses=False)
    training.check()
    training.handle.change_plan(training.plan("eight"))  # nothing waits for the branch any more
    training.train(2, uses=False)
    assert training.handle.plan == training.plan("eight")
    training.check()
    training.train(uses=rank == 1)
    assert bool(training.parked) == (rank == 0)
    training.check()
    training.train(2)
    assert not training.parked and "parked" not in training.handle.state_dict()
    training.check()
    training.handle.close()


@pytest.mark.parametrize(
    ("front", "before", "after"),
    [
        ("attach", "signs", "root"),
        ("module", "root", "none"),
        pytest.param("module", "signs", "root", marks=pytest.mark.slow),
        pytest.param("attach", "root", "none", marks=pytest.mark.slow),
        *(pytest.param(front, "signs", "none", marks=pytest.mark.slow) for front in FRONTS),
    ],
)
def test_a_change_ends_while_parameters_are_not_used_and_loses_nothing(front, before, after):
    values_of(run_ranks(2, left, front, before, after))


def seen_by_hooks(front: str) -> None:
    """A hook that is registered when something is parked sees the gradient of the rank alone."""
    training = Training(front)
    training.train(3)
    training.handle.change_plan(training.plan("none"))
    training.train(_USED_WITHIN, uses=False)
    assert training.parked
    weight, seen = training.module.seldom.weight, []
    weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.clone()))
    (mine,) = torch.autograd.grad(training.module(training.steps, True), [weight])
    training.train()
    assert not training.parked
    torch.testing.assert_close(seen, [mine])
    training.check()
    training.handle.close()


@pytest.mark.parametrize("front", FRONTS)
def test_what_was_parked_comes_behind_hooks_that_change_gradients(front):
    values_of(run_ranks(2, seen_by_hooks, front))


def test_parts_of_parameters_and_merged_parameters_are_taken_apart():
    part = UnitPlan("a", 6, EFSignSGD(), ALLGATHER, True, start=2)
    merged = UnitPlan("b", 10, EFSignSGD(), ALLGATHER, True, also=("c",))
    residuals = {part.key: torch.arange(1.0, 7.0), merged.key: torch.arange(1.0, 11.0)}
    kept = lambda kind, key: residuals[key] if kind == "worker" else None
    found = unsent_by_parameter([part, merged], Topology(2), 1, kept, {"a": 8, "b": 7, "c": 3})
    assert {name: values.tolist() for name, values in found.items()} == {
        "a": [0.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0],  # times the weight 1/2, times 2 ranks
        "b": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0],
        "c": [8.0, 9.0, 10.0],
    }


def accumulated(front: str) -> None:
    training = Training(front)
    training.train(3)
    training.handle.change_plan(training.plan("none"))
    training.train(LONG, uses=False)
    assert training.parked
    with training.handle.exact():
        training.train()
    assert training.parked  # an exact backward is for gradients that are not used
    training.train(2, local=2)
    assert not training.parked
    training.check()
    training.handle.close()


@pytest.mark.parametrize("front", FRONTS)
def test_what_is_parked_waits_for_a_backward_that_averages(front):
    values_of(run_ranks(2, accumulated, front))


def not_counted(front: str, scales: bool) -> None:
    """Steps that do not count while what is parked is sent."""
    scaler = (
        torch.amp.GradScaler(torch.get_default_device().type, init_scale=2.0**6, growth_interval=3) if scales else None
    )
    training = Training(front, grad_scaler=scaler, can_discard=not scales)
    training.train(4)
    training.handle.change_plan(training.plan("none"))
    training.train(LONG, uses=False)
    assert not training.handle.is_changing and training.parked
    training.check()
    training.train(counts=False)  # sends it in vain
    training.train(uses=False)  # finds that out
    assert training.parked
    training.check()
    for _ in range(2):
        training.train(counts=False)
    training.train(3)
    training.check()
    assert not training.parked
    training.train(counts=False, uses=False)
    training.train(2, uses=False)
    assert not training.parked
    training.handle.close()


@pytest.mark.parametrize(
    ("front", "scales"),
    [
        ("attach", True),
        ("module", False),
        pytest.param("attach", False, marks=pytest.mark.slow),
        pytest.param("module", True, marks=pytest.mark.slow),
    ],
)
def test_steps_that_do_not_count_send_nothing_of_it(front, scales):
    values_of(run_ranks(2, not_counted, front, scales))


def frozen(front: str) -> None:
    """Plans that follow one another at once, while parameters are frozen."""
    training = Training(front)
    training.train(3)
    training.module.seldom.requires_grad_(False)
    training.handle.change_plan(training.plan("eight"))
    training.module.seldom.requires_grad_(True)
    training.handle.change_plan(training.plan("root"))
    training.train(2)
    training.check()
    training.handle.close()


@pytest.mark.parametrize("front", FRONTS)
def test_what_frozen_parameters_hold_is_sent_when_they_are_thawed(front):
    values_of(run_ranks(2, frozen, front))


def saved(front: str, folder: str, kind: str) -> dict[str, torch.Tensor]:
    """Save a training that has parked something. Return what it is missing."""
    training = Training(front)
    training.train(3)
    training.handle.change_plan(training.plan("eight"))
    training.train(LONG, uses=False)
    training.train(uses=dist.get_rank() == 1)
    if kind == "dcp":
        dcp.save({"gckernels": training.handle.checkpoint()}, checkpoint_id=f"{folder}/dcp")
    else:
        torch.save(training.handle.state_dict(), f"{folder}/{dist.get_rank()}.pt")
    dist.barrier()
    training.handle.close()
    return training.missing


def loaded(front: str, folder: str, kind: str, missing: dict[str, torch.Tensor]) -> None:
    training = Training(front, "eight")
    training.steps = 100
    training.missing = {name: each.to(torch.get_default_device()) for name, each in missing.items()}
    if kind == "dcp":
        dcp.load({"gckernels": training.handle.checkpoint(reads=f"{folder}/dcp")}, checkpoint_id=f"{folder}/dcp")
    else:
        states = [torch.load(each, weights_only=True) for each in sorted(Path(folder).glob("*.pt"))]
        is_same = len(states) == dist.get_world_size()
        training.handle.load_state_dict(states[dist.get_rank()] if is_same and kind == "own" else states)
    training.check()
    both = {"phases", "seldom.weight"}
    assert training.parked == (set() if (dist.get_rank(), dist.get_world_size()) == (1, 2) else both)
    training.train(2, uses=False)
    training.check()
    training.train(2)
    assert not training.parked
    training.check()
    training.handle.close()


@pytest.mark.parametrize(
    ("fronts", "kind", "ranks"),
    [
        (("attach", "module"), "own", 2),
        (("module", "attach"), "dcp", 3),
        pytest.param(("attach", "attach"), "dcp", 2, marks=pytest.mark.slow),
        pytest.param(("attach", "module"), "list", 3, marks=pytest.mark.slow),
        pytest.param(("module", "attach"), "list", 2, marks=pytest.mark.slow),
    ],
)
def test_what_is_parked_is_a_part_of_checkpoints(fronts, kind, ranks, tmp_path):
    missing = values_of(run_ranks(2, saved, fronts[0], str(tmp_path), kind))[0]
    values_of(run_ranks(ranks, loaded, fronts[1], str(tmp_path), kind, missing))


def damaged(front: str) -> list[str]:
    training = Training(front)
    training.train(2)
    state, texts = training.handle.state_dict(), []
    for parked in (
        {"seldom.weight": torch.zeros(3)},
        {"none": torch.zeros(3)},
        {"phases": torch.full((24,), torch.nan)},
        [],
    ):
        with pytest.raises(ValueError) as raised:
            training.handle.load_state_dict(state | {"parked": parked})
        texts.append(str(raised.value))
    training.handle.close()
    return texts


def test_damaged_parts_are_refused():
    for texts in values_of(run_ranks(2, damaged, "module")):
        assert all("parked" in text for text in texts)
