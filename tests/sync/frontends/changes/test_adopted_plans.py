"""A handle that adopts plans goes on with the plan of the job that it loads, on any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gckernels import EFSignSGD, Identity, PowerSGD, sync
from gckernels.sync import Plan, PlanError, attach
from gckernels.sync.attaching.saving import SavedTraining
from gckernels.sync.plans.builders import resumable
from gckernels.sync.programs import ALLREDUCE, PARAMETER_SERVER, ring
from models import SMALL_BUCKETS, build
from ranks import run_ranks, values_of
from workloads import mass_of


def handle_of(front: str, compressor: Any, **program: Any) -> tuple[Any, Any]:
    module: Any = build("Mlp")
    if front == "attach":
        ddp_model = DistributedDataParallel(module, bucket_cap_mb=SMALL_BUCKETS)
        return ddp_model, attach(ddp_model, sync.uniform_plan(ddp_model, compressor, **program))
    return module, attach(module, sync.uniform_plan(module, compressor, **program), bucket_cap_mb=SMALL_BUCKETS)


def train(model: Any, steps: int) -> None:
    module = getattr(model, "module", model)
    for step in range(steps):
        model(module.batch(step, dist.get_rank())).backward()
        model.zero_grad()


def saved(front: str, folder: str) -> tuple[dict[str, Any], dict[str, torch.Tensor], dict[str, Any]]:
    """The state of this rank and the masses after some steps, and the plan."""
    program: dict[str, Any] = {"program": ring(dist.get_world_size())}
    model, handle = handle_of(front, EFSignSGD(), **program)
    train(model, 3)
    dcp.save({"gckernels": handle.checkpoint()}, checkpoint_id=folder)
    state, masses, plan = handle.state_dict(), mass_of(handle), handle.plan.to_json()
    state.pop("note")
    handle.close()
    return state, masses, plan


def adopted(
    front: str, folder: str, states: list[Any], masses: dict[str, torch.Tensor], record: dict[str, Any]
) -> None:
    plan = Plan.from_json(record)
    as_before = plan.topology_of(len(states)).world_size == dist.get_world_size() == len(states)
    for source in ["dcp", "all states"] + (["own state"] if as_before else []):
        model, handle = handle_of(front, PowerSGD())
        train(model, 2)
        with mock.patch.object(SavedTraining, "adopts_plans", True):
            if source == "dcp":
                dcp.load({"gckernels": handle.checkpoint(reads=folder)}, checkpoint_id=folder)
            else:
                handle.load_state_dict(states if source == "all states" else states[dist.get_rank()])
        assert (handle.plan == plan) == as_before and not handle.is_changing
        assert handle.state_dict()["step"] == 3
        for name, mass in mass_of(handle).items():
            torch.testing.assert_close(mass.cpu(), masses[name].cpu(), rtol=0, atol=1e-6)
        handle.change_plan(sync.uniform_plan(model, Identity(), program=ALLREDUCE))
        train(model, 2)
        assert not handle.is_changing
        handle.close()


@pytest.mark.parametrize("front", ["module", pytest.param("attach", marks=pytest.mark.slow)])
def test_a_saved_plan_goes_on(front, tmp_path: Path):
    folder = str(tmp_path / "saved")
    found = values_of(run_ranks(2, saved, front, folder))
    _, masses, plan = found[0]
    for world_size in (2, 3):  # a ring is for one number of ranks
        values_of(run_ranks(world_size, adopted, front, folder, [each[0] for each in found], masses, plan))


def refused() -> None:
    """States that are damaged on one rank, or of another model, change nothing on any rank."""
    model, handle = handle_of("attach", EFSignSGD())
    train(model, 3)
    before, state = handle.state_dict(), handle.state_dict()
    other = attach(nn.Linear(4, 4), EFSignSGD())
    foreign = other.state_dict()
    if dist.get_rank():
        del state["feedback"]
    for wrong in (state, foreign):
        with mock.patch.object(SavedTraining, "adopts_plans", True), pytest.raises((RuntimeError, ValueError)):
            handle.load_state_dict(wrong)
    after = handle.state_dict()
    assert all(
        torch.equal(each, after["feedback"]["worker"][key]) for key, each in before["feedback"]["worker"].items()
    )
    train(model, 2)
    other.close()
    handle.close()


def test_nothing_is_adopted_from_wrong_states():
    values_of(run_ranks(2, refused))


def test_a_plan_is_resumable_on_any_number_of_ranks():
    parameters = dict(build("Mlp").named_parameters())
    for compressor, program in ((EFSignSGD(), ring(4)), (EFSignSGD(), PARAMETER_SERVER), (PowerSGD(), None)):
        plan = sync.uniform_plan(parameters.items(), compressor, program=program, world_size=4)
        assert resumable(plan, parameters, 4) is plan
        for world_size in (1, 2, 3, 8):
            found = resumable(plan, parameters, world_size)
            found.check(parameters.items(), world_size)
            assert [unit.key for unit in found.units] == [unit.key for unit in plan.units]
            assert [unit.compressor for unit in found.units] == [unit.compressor for unit in plan.units]
        parted = dict(list(parameters.items())[1:])
        with pytest.raises(PlanError, match="does not fit the model"):
            resumable(plan, parted, 3)
