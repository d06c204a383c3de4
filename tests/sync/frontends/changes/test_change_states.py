"""Changes of the plan with gradient scalers, unused and frozen parameters, momenta, and checkpoints in the middle."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gckernels import DGC, EFSignSGD, Identity, PowerSGD, SigNUM, sync
from gckernels.sync import Plan, attach
from gckernels.sync.programs import ALLGATHER, ALLREDUCE, ALLTOALL
from ranks import run_ranks, values_of
from workloads import mass_of, summed

FRONTS = ("attach", "module")


class Gated(nn.Module):
    """Two layers, of which a step may use one alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(9, 7, bias=False), nn.Linear(9, 5, bias=False)])

    def forward(self, step: int, used: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(2 * step + dist.get_rank())
        batch = torch.randn(4, 9, generator=generator)
        return torch.stack([layer(batch).square().sum() for layer in list(self.layers)[:used]]).sum()


class Training:
    """Training steps without effect on the parameters, and the sums of what they give and get."""

    def __init__(self, front: str, plan: str, scaler: torch.amp.GradScaler | None = None, unused: bool = False) -> None:
        self.module, self.scaler = Gated(), scaler
        self.names = [name for name, _ in self.module.named_parameters()]
        self.model: Any = self.module
        if front == "attach":
            self.model = DistributedDataParallel(self.module, bucket_cap_mb=1e-4, find_unused_parameters=unused)
            self.handle: Any = attach(self.model, self.plan(plan), grad_scaler=scaler)
        else:
            settings: dict[str, Any] = {"bucket_cap_mb": 1e-4, "find_unused_parameters": unused}
            self.handle = attach(self.module, self.plan(plan), grad_scaler=scaler, **settings)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.0)
        self.sums = {name: torch.zeros_like(each).double() for name, each in self.module.named_parameters()}
        self.steps, self.is_poisoned = 0, False
        next(self.module.parameters()).register_hook(self._poison)

    def plan(self, name: str) -> Plan:
        programs = {
            "signs": (EFSignSGD(), ALLTOALL),
            "others": (EFSignSGD(), ALLGATHER),
            "none": (Identity(), ALLREDUCE),
        }
        compressor, program = programs[name]
        return sync.uniform_plan(self.module, compressor, program=program)

    def _poison(self, grad: torch.Tensor) -> torch.Tensor:
        return torch.full_like(grad, torch.inf) if self.is_poisoned and dist.get_rank() == 1 else grad

    def train(self, steps: int = 1, poisoned: bool = False, used: int = 2) -> None:
        for _ in range(steps):
            self._step(poisoned, used)

    def _step(self, poisoned: bool, used: int) -> None:
        parameters = [each for each in self.module.parameters() if each.requires_grad]
        mine = torch.autograd.grad(self.module(self.steps, used), parameters, allow_unused=True)
        given = dict(zip(map(id, parameters), mine, strict=True))
        loss, scale = self.model(self.steps, used), 1.0
        self.is_poisoned = poisoned
        if self.scaler is None:
            loss.backward()
        else:
            self.scaler.scale(loss).backward()
            scale = self.scaler.get_scale()
        self.is_poisoned = False
        for name, parameter in self.module.named_parameters():
            exact = given.get(id(parameter))
            mean = torch.zeros_like(parameter) if exact is None else exact
            mean = summed(mean.double()) / dist.get_world_size()
            if not poisoned and parameter.grad is not None and parameter.requires_grad:
                self.sums[name] += parameter.grad.double() / scale - mean
        if self.scaler is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.model.zero_grad()
        self.steps += 1

    def check(self) -> None:
        """Everything that was given has been got, or is in residuals."""
        masses = mass_of(self.handle)
        for name, missing in self.sums.items():
            torch.testing.assert_close(masses[name][-1], -missing.flatten(), rtol=0, atol=1e-4)

    @property
    def is_empty(self) -> bool:
        return not any(bool(mass.any()) for mass in mass_of(self.handle).values())


# -------------------------------------------------------------------- gradient scalers


def skipped(front: str) -> None:
    """Exact steps that the scaler skips are made again; its scale falls meanwhile."""
    training = Training(
        front, "signs", torch.amp.GradScaler(torch.get_default_device().type, init_scale=2.0**10, growth_interval=3)
    )
    training.train(4)
    training.handle.change_plan(training.plan("others"))
    for poisoned in (True, True, False, True):  # the last one shows that the third was made, and sends nothing
        assert training.handle.is_changing
        training.train(poisoned=poisoned)
        training.check()
    assert training.handle.plan == training.plan("others")
    training.train(3)
    training.train(poisoned=True)
    training.handle.change_plan(training.plan("none"))  # while the last step is undone
    training.train(2)
    assert not training.handle.is_changing and training.is_empty
    training.check()
    training.handle.close()


@pytest.mark.parametrize("front", FRONTS)
def test_exact_steps_that_a_scaler_skips_lose_nothing(front):
    values_of(run_ranks(2, skipped, front))


# -------------------------------------------------------------------- unused and frozen parameters


def unused(front: str) -> None:
    training = Training(front, "signs", unused=True)
    training.train(3)
    training.handle.change_plan(training.plan("others"))
    training.train(2, used=1)  # on all ranks
    training.check()
    assert training.handle.is_changing and not training.is_empty
    training.train(used=1 + dist.get_rank())  # one rank that uses a parameter sends for all
    assert not training.handle.is_changing and training.is_empty
    training.check()
    training.train(2)
    training.check()
    training.handle.close()


@pytest.mark.parametrize("front", FRONTS)
def test_residuals_of_unused_parameters_wait_for_their_use(front):
    values_of(run_ranks(2, unused, front))


def frozen(front: str, before: str) -> None:
    training = Training(front, before, unused=front == "attach")
    training.train(3)
    training.module.layers[1].requires_grad_(False)
    training.handle.change_plan(training.plan("others"))
    training.train()
    assert training.handle.plan == training.plan("others")
    assert training.is_empty == (before == "signs")  # after an exact step; without residuals the plan runs at once
    training.module.layers[1].requires_grad_(True)
    training.train(2)
    training.handle.close()


@pytest.mark.parametrize(("front", "before"), [("module", "signs"), ("attach", "none")])
def test_frozen_parameters_do_not_hold_up_a_change(front, before):
    values_of(run_ranks(2, frozen, front, before))


# -------------------------------------------------------------------- momenta


def momenta() -> None:
    """A unit that stays as it is keeps its momentum and its factors; nothing of it is sent twice."""
    for compressor, kind in ((SigNUM(), "worker"), (DGC(), "worker"), (PowerSGD(rank=2), "q")):
        module = Gated()
        attachment = attach(module, compressor)
        with_one = attachment.plan
        kept, exact = with_one.units
        exact = replace(exact, compressor=Identity(), program=ALLREDUCE, feedback=False)
        for step in range(3):
            module(step, 2).backward()
            module.zero_grad()
        before = attachment.state_dict()
        attachment.change_plan(with_one.with_units([kept, exact]))
        assert attachment.is_changing == (compressor != SigNUM())
        if attachment.is_changing:
            module(3, 2).backward()
        assert not attachment.is_changing
        after = attachment.state_dict()
        assert kept.key in after["units"] and after["step"] == before["step"] + (compressor != SigNUM())
        old, new = (state["feedback"][kind][kept.key].view(-1) for state in (before, after))
        momentum = slice(0, None if compressor != DGC() else kept.numel)
        assert old.any() and torch.equal(old[momentum], new[momentum])
        if compressor == DGC():
            assert old[kept.numel :].any() and not new[kept.numel :].any()
        attachment.load_state_dict(after)
        module(4, 2).backward()
        attachment.close()


def test_units_that_stay_keep_their_momenta_and_factors():
    values_of(run_ranks(2, momenta))


# -------------------------------------------------------------------- checkpoints in the middle


def resumed(front: str, folder: str, with_dcp: bool) -> None:
    """A job that resumes in the middle of a change goes on with the old plan, and can change it again."""
    first = Training(front, "signs")
    kept = first.handle.checkpoint()  # made before the plan changes
    first.train(3)
    first.handle.change_plan(first.plan("others"))
    assert first.handle.is_changing
    second = Training(front, "signs")
    if with_dcp:
        dcp.save({"gckernels": kept}, checkpoint_id=folder)
        dcp.load({"gckernels": second.handle.checkpoint(reads=folder)}, checkpoint_id=folder)
    else:
        second.handle.load_state_dict(first.handle.state_dict())
    assert second.handle.plan == first.plan("signs")
    second.steps, second.sums = first.steps, {name: each.clone() for name, each in first.sums.items()}
    second.check()
    second.handle.change_plan(second.plan("others"))
    for training in (first, second):
        training.train()
        assert not training.handle.is_changing
        training.train(2)
        training.check()
    masses, others = mass_of(first.handle), mass_of(second.handle)
    assert all(torch.equal(mass, others[name]) for name, mass in masses.items())
    third = Training(front, "others")
    if with_dcp:
        dcp.save({"gckernels": kept}, checkpoint_id=f"{folder}-others")
        dcp.load({"gckernels": third.handle.checkpoint(reads=f"{folder}-others")}, checkpoint_id=f"{folder}-others")
    else:
        third.handle.load_state_dict(first.handle.state_dict())
    assert all(torch.equal(mass, masses[name]) for name, mass in mass_of(third.handle).items())
    for training in (first, second, third):
        training.handle.close()


@pytest.mark.parametrize("front", ["attach", pytest.param("module", marks=pytest.mark.slow)])
def test_a_job_resumes_in_the_middle_of_a_change(front, tmp_path: Path):
    for with_dcp in (False, True):
        values_of(run_ranks(2, resumed, front, str(tmp_path / "saved"), with_dcp))


def loaded(front: str) -> None:
    """A state that is loaded in the middle of a change is sent by it."""
    first, second = Training(front, "signs"), Training(front, "signs")
    first.train(3)
    second.train(2)
    second.handle.change_plan(second.plan("others"))
    second.handle.load_state_dict(first.handle.state_dict())
    second.steps, second.sums = first.steps, first.sums
    second.train(2)
    assert second.handle.plan == second.plan("others")
    second.check()
    for training in (first, second):
        training.handle.close()


def test_a_state_can_be_loaded_in_the_middle_of_a_change():
    values_of(run_ranks(2, loaded, "attach"))
