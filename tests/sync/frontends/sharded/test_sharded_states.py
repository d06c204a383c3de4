"""Checkpoints of models of FSDP2: resumed trainings go on bit for bit, and states go from one form to another without
loss."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.nn.parallel import DistributedDataParallel

from gckernels import sync
from ranks import run_ranks, values_of
from sharded_models import SETTINGS, Net, adamw, digest, model_of, shards_of, train

QUANT, SLOW = "BlockQuant(bits=4)", pytest.mark.slow


def resumed(spec: str, path: str | None, form: str, bits: int = 32) -> tuple[str, str]:
    """The digests of a training, and of one that was interrupted; with a path, DCP saves its residuals there."""
    setting, digests = SETTINGS["plain"], []
    for interrupted in (False, True):
        model = model_of(setting, form)
        attachment, optimizer = sync.attach(model, spec, residual_bits=bits), adamw(model)
        train(model, setting, range(3), optimizer)
        if interrupted:
            kept = [each.clone() for each in shards_of(model)]
            states = optimizer.state_dict(), attachment.state_dict()
            if path is not None:
                dcp.save({"gckernels": attachment.checkpoint()}, checkpoint_id=path)
            attachment.close()
            model = model_of(setting, form)
            with torch.no_grad():
                for parameter, each in zip(model.parameters(), kept, strict=True):
                    parameter.to_local().copy_(each)
            attachment, optimizer = sync.attach(model, spec, residual_bits=bits), adamw(model)
            optimizer.load_state_dict(states[0])
            if path is None:
                attachment.load_state_dict(states[1])
            else:
                dcp.load({"gckernels": attachment.checkpoint(reads=path)}, checkpoint_id=path)
        train(model, setting, range(3, 6), optimizer)
        digests.append(digest(model))
        attachment.close()
    return digests[0], digests[1]


@pytest.mark.parametrize(
    ("form", "ranks", "spec", "bits", "by_dcp"),
    [
        ("hsdp", 4, "PowerSGD", 32, False),
        pytest.param("hsdp", 4, "PowerSGD", 32, True, marks=SLOW),
        pytest.param("hsdp", 4, QUANT, 8, False, marks=SLOW),
        pytest.param("hsdp", 4, QUANT, 8, True, marks=SLOW),
        pytest.param("fsdp", 2, QUANT, 32, False, marks=SLOW),
        pytest.param("fsdp", 2, QUANT, 32, True, marks=SLOW),
        pytest.param("fsdp", 2, QUANT, 8, False, marks=SLOW),
        ("fsdp", 2, QUANT, 8, True),
    ],
)
def test_a_resumed_training_goes_on_bit_for_bit(form, ranks, spec, bits, by_dcp, tmp_path):
    path = str(tmp_path / "saved") if by_dcp else None
    for alone, again in values_of(run_ranks(ranks, resumed, spec, path, form, bits)):
        assert again == alone


MACHINES = "machines"
"""Flat shards of ranks that are in machines with two devices each."""


def plan_of(model: Any, spec: str, form: str | None, program: str | None = None) -> sync.Plan:
    """A plan for a model of a form."""
    topology = (dist.get_world_size() // 2, 2) if form == MACHINES else None
    return sync.uniform_plan(model, spec, program=program, topology=topology)


def as_ddp() -> Any:
    """The model in DDP, with the parameters of the sharded one."""
    torch.manual_seed(0)
    return DistributedDataParallel(Net(), find_unused_parameters=True)


def saved(form: str | None, path: str, spec: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The state of a rank after some steps, in DDP or sharded, and its residuals; DCP writes them to a path as well."""
    model = as_ddp() if form is None else model_of(SETTINGS["plain"], form)
    attachment = sync.attach(model, plan_of(model, spec, form))
    train(model, SETTINGS["plain"], range(3), adamw(model))
    dcp.save({"gckernels": attachment.checkpoint()}, checkpoint_id=path)
    state = attachment.state_dict()
    attachment.close()
    return state, state["feedback"]["worker"]


def loaded(form: str | None, states: list[dict[str, Any]] | None, path: str, spec: str) -> dict[str, torch.Tensor]:
    """The residuals of a rank that goes on from the states of all ranks of a job, or from what DCP has written."""
    model = as_ddp() if form is None else model_of(SETTINGS["plain"], form)
    program = None if form or spec == "PowerSGD" else "allgather"
    attachment = sync.attach(model, plan_of(model, spec, form, program))
    if states is None:
        dcp.load({"gckernels": attachment.checkpoint(reads=path)}, checkpoint_id=path)
    else:
        attachment.load_state_dict(states)
    found = attachment.state_dict()["feedback"]["worker"]
    train(model, SETTINGS["plain"], range(3, 5), adamw(model))
    attachment.close()
    return found


def adopted(form: str, path: str) -> tuple[set[str], dict[str, torch.Tensor], int]:
    """The compressors of matrices, residuals and step of a rank that goes on with the plan that DCP has read."""
    model = model_of(SETTINGS["plain"], form)
    attachment = sync.attach(model)
    dcp.load({"gckernels": attachment.checkpoint(reads=path)}, checkpoint_id=path)
    state = attachment.state_dict()
    matrices = {str(unit.compressor) for unit in attachment.plan.units if unit.feedback}
    train(model, SETTINGS["plain"], range(3, 5), adamw(model))
    attachment.close()
    return matrices, state["feedback"]["worker"], state["step"]


def whole_means(ranks: list[dict[str, torch.Tensor]], form: str | None) -> dict[str, torch.Tensor]:
    """The means of residuals over the ranks that have the same elements, of whole parameters."""
    shards = {"hsdp": 2, MACHINES: 2, "three shards": 3}.get(form or "", 1)
    parts = [ranks[shard::shards] for shard in range(shards)]
    none = torch.zeros(0)  # DCP leaves residuals of empty shards out
    means = {
        name: [torch.stack([each.get(name, none) for each in part]).mean(0) for part in parts] for name in ranks[0]
    }
    if form == MACHINES:  # the shards of two devices in turns
        means = {name: in_turns(name, *each, ranks=len(ranks)) for name, each in means.items()}
    return {name: torch.cat(each) for name, each in means.items()}


def in_turns(name: str, first: torch.Tensor, second: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    """The shards of a parameter, of which every other one is in ``first``."""
    shape = dict(Net().named_parameters())[name].shape
    row = -(-shape[0] // ranks) * (first.numel() + second.numel()) // shape[0]
    pairs = itertools.zip_longest(first.split(row), second.split(row), fillvalue=first[:0])
    return [each for pair in pairs for each in pair]


@pytest.mark.parametrize(
    ("before", "after", "spec"),
    [
        pytest.param((None, 2), ("fsdp", 3), QUANT, marks=SLOW),
        (("fsdp", 3), (None, 2), QUANT),
        pytest.param(("fsdp", 2), ("fsdp", 3), QUANT, marks=SLOW),
        pytest.param((None, 2), ("hsdp", 4), QUANT, marks=SLOW),
        (("hsdp", 4), ("fsdp", 2), QUANT),
        pytest.param(("hsdp", 4), ("hsdp", 6), QUANT, marks=SLOW),
        pytest.param(("hsdp", 4), ("three shards", 6), QUANT, marks=SLOW),
        (("three shards", 6), ("hsdp", 4), QUANT),
        pytest.param(("hsdp", 4), (None, 2), "PowerSGD", marks=SLOW),
        ((None, 2), ("hsdp", 4), "PowerSGD"),
        pytest.param(("hsdp", 4), ("hsdp", 4), QUANT, marks=SLOW),
        pytest.param((MACHINES, 4), (MACHINES, 4), QUANT, marks=SLOW),
        ((MACHINES, 4), ("hsdp", 4), QUANT),
        pytest.param(("fsdp", 3), (MACHINES, 4), QUANT, marks=SLOW),
        pytest.param((MACHINES, 6), (None, 2), QUANT, marks=SLOW),
    ],
)
def test_residuals_go_from_ddp_to_shards_and_back(before, after, spec, tmp_path):
    (form, ranks), (next_form, next_ranks) = before, after
    path = str(tmp_path / "dcp")
    states, residuals = zip(*values_of(run_ranks(ranks, saved, form, path, spec)), strict=True)
    expected = whole_means(list(residuals), form)
    for given in (list(states), None):
        kept = values_of(run_ranks(next_ranks, loaded, next_form, given, path, spec))
        if before == after:
            assert all(
                torch.equal(each[name], old[name]) for each, old in zip(kept, residuals, strict=True) for name in each
            )
        found = whole_means(kept, next_form)
        assert found.keys() == expected.keys()
        for name, mean in expected.items():
            assert mean.any(), name
            torch.testing.assert_close(found[name], mean, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(("before", "after"), [(("hsdp", 4), ("fsdp", 2)), (("fsdp", 2), ("hsdp", 4))])
def test_a_plan_is_adopted_from_another_mesh(before, after, tmp_path):
    path = str(tmp_path / "dcp")
    _, residuals = zip(*values_of(run_ranks(before[1], saved, before[0], path, QUANT)), strict=True)
    found = values_of(run_ranks(after[1], adopted, after[0], path))
    expected, means = whole_means(list(residuals), before[0]), whole_means([each for _, each, _ in found], after[0])
    for matrices, _, step in found:
        assert len(matrices) == 1 and "bits=4" in matrices.pop() and step == 3
    for name, mean in expected.items():
        torch.testing.assert_close(means[name], mean, rtol=1e-6, atol=1e-9)
