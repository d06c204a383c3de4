"""Training jobs that resume with another number of ranks."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gckernels
from gckernels import sync
from gckernels.sync import Attachment, attach
from gckernels.sync.plans.plan import Plan
from gckernels.sync.programs import PROGRAMS, ring
from gckernels.sync.programs.residuals import ENCODINGS
from gckernels.sync.resources.feedback import KINDS
from models import SMALL_BUCKETS, build
from ranks import run_ranks, values_of
from workloads import digest_of, mass_of, summed, trained

SAVED, STEPS = 4, 10
SETTINGS = (
    ("EFSignSGD", "default"),  # an all-to-all, or an all-gather between two ranks
    ("BlockQuant(bits=4)", "alltoall"),
    ("TopK(ratio=0.05)", "parameter_server"),
    ("BlockQuant(bits=4)", "ring"),
    ("DGC", "default"),
    ("SigNUM", "default"),
    ("PowerSGD(rank=2)", "default"),
    ("PowerSGD(rank=2, one_sided=True)", "default"),
)


def _job(setting: tuple[str, str], seed: int) -> tuple[torch.nn.Module, DistributedDataParallel, Any, Attachment]:
    compressor, program = setting
    module = build("Mlp", seed=seed)
    hooked = DistributedDataParallel(module, bucket_cap_mb=SMALL_BUCKETS)
    optimizer = torch.optim.SGD(hooked.parameters(), lr=0.02)
    steps = {"default": None, "ring": ring(dist.get_world_size())} | PROGRAMS
    attachment = attach(
        hooked, sync.uniform_plan(hooked, gckernels.from_spec(compressor), program=steps[program]), seed=7
    )
    return module, hooked, optimizer, attachment


def saved(folder: str) -> None:
    """For every setting: train and save."""
    for index, setting in enumerate(SETTINGS):
        module, hooked, optimizer, attachment = _job(setting, seed=0)
        for step in range(SAVED):
            optimizer.zero_grad()
            hooked(module.batch(step, dist.get_rank())).backward()
            optimizer.step()
        state = {"model": module.state_dict(), "attachment": attachment.state_dict(), "mass": mass_of(attachment)}
        torch.save(state, Path(folder, f"{index}-{dist.get_rank()}.pt"))
        attachment.close()


def gone_on(folder: str, old: int) -> list[str]:
    """For every setting: resume from the states of ``old`` ranks and train; return the digests of the results."""
    return [
        _gone_on(index, [Path(folder, f"{index}-{rank}.pt") for rank in range(old)]) for index in range(len(SETTINGS))
    ]


def _gone_on(index: int, files: list[Path]) -> str:
    module, hooked, optimizer, attachment = _job(SETTINGS[index], seed=1)
    states = [torch.load(file, weights_only=True) for file in reversed(files)]
    module.load_state_dict(states[0]["model"])
    before = attachment.state_dict()
    with pytest.raises(ValueError, match=r"rank 0 of \d is missing"):
        attachment.load_state_dict([state["attachment"] for state in states[:-1]])
    assert attachment.state_dict() == before  # the refused states have changed nothing
    attachment.load_state_dict([state["attachment"] for state in states])
    assert attachment.state_dict()["step"] == SAVED
    mass = mass_of(attachment)
    for key, expected in states[0]["mass"].items():
        torch.testing.assert_close(mass[key], expected, rtol=0, atol=2.0**-22 * max(1.0, *expected.abs().flatten()))
    assert any(each.any() for each in mass.values())
    losses = []
    for step in range(SAVED, STEPS):
        twin = copy.deepcopy(module)
        twin.zero_grad()
        twin(module.batch(step, dist.get_rank())).backward()
        optimizer.zero_grad()
        loss = hooked(module.batch(step, dist.get_rank()))
        loss.backward()
        losses.append(summed(loss.detach()).item())
        now = mass_of(attachment)
        _check_balance(attachment.plan, module, twin, mass, now)
        mass = now
        optimizer.step()
    found = attachment.state_dict()
    attachment.close()
    assert found["step"] == STEPS
    assert losses[-1] < losses[0] * 1.05
    return digest_of(module.parameters())


def _check_balance(plan: Plan, module: Any, twin: Any, before: Any, after: Any) -> None:
    """Assert that contributions plus old residuals equal the results plus new residuals."""
    own = dict(twin.named_parameters())
    for name, parameter in module.named_parameters():
        unit = next(unit for unit in plan.units if unit.key == name)
        if not unit.compressor.traits.conserves or not unit.compressor.traits.averages:
            continue
        contributed = summed(own[name].grad.double()).flatten() / dist.get_world_size()
        given = contributed + before[name][-1] - after[name][-1]
        torch.testing.assert_close(given, parameter.grad.double().flatten(), rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("new", [2, 4])
def test_a_job_of_three_ranks_goes_on_with_others(new, tmp_path):
    values_of(run_ranks(3, saved, str(tmp_path)))
    digests = values_of(run_ranks(new, gone_on, str(tmp_path), 3))
    assert all(each == digests[0] for each in digests)


# -------------------------------------------------------------------- one rank


def alone(folder: str) -> None:
    """One rank keeps no residuals: it drops those of two ranks with a warning and saves a state without any."""
    states = [torch.load(Path(folder, f"0-{rank}.pt"), weights_only=True)["attachment"] for rank in range(2)]
    _module, _hooked, _, attachment = _job(SETTINGS[0], seed=0)
    with pytest.warns(UserWarning, match="one rank does not compress and has no residuals; those of the 2 ranks"):
        attachment.load_state_dict(states)
    state = attachment.state_dict()
    assert state["step"] == SAVED and state["feedback"] == {kind: {} for kind in KINDS}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attachment.load_state_dict([state])
        for each in states:
            each["feedback"], each["units"] = state["feedback"], state["units"]
        attachment.load_state_dict(states)  # no residual is dropped, so there is no warning
    assert attachment.state_dict() == state
    attachment.close()
    torch.save(state, Path(folder, "alone.pt"))


def not_alone(folder: str) -> str:
    module, hooked, _, attachment = _job(SETTINGS[0], seed=0)
    attachment.load_state_dict([torch.load(Path(folder, "alone.pt"), weights_only=True)])
    state = attachment.state_dict()
    assert state["step"] == SAVED and not any(state["feedback"][kind] for kind in ENCODINGS)
    hooked(module.batch(0, dist.get_rank())).backward()
    assert attachment.state_dict()["feedback"]["worker"]  # compressed, for the job's first step is over
    attachment.close()
    return digest_of(parameter.grad for parameter in trained(hooked).values())


def test_one_rank_has_no_residuals(tmp_path):
    values_of(run_ranks(2, saved, str(tmp_path)))
    values_of(run_ranks(1, alone, str(tmp_path)))
    first, second = values_of(run_ranks(2, not_alone, str(tmp_path)))
    assert first == second
