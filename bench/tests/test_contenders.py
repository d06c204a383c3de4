"""Tests of the arms that compete with a plan which is chosen while training."""

from __future__ import annotations

import argparse
import math

import pytest
import torch

from bench.lib.arms import COMPRESSORS, PLAIN
from bench.lib.contenders import (
    ACCURACIES,
    ARMS,
    accuracy_of,
    accuracy_on,
    checked_contender,
    distinct,
    rivals_of,
    summary,
)
from gckernels import sync
from gckernels.sync.traces.model_trace import ModelTrace
from gckernels.sync.traces.traced_tensors import Role, TracedTensor


@pytest.fixture
def model():
    return torch.nn.Sequential(torch.nn.Linear(96, 96), torch.nn.Linear(96, 32))


def test_accuracies():
    found = {arm: accuracy_of(arm) for arm in ARMS}
    assert [arm for arm in COMPRESSORS if found[arm] == "safe"] == list(COMPRESSORS[1:5])
    assert found["fp16_compress_hook"] == "safe" and found["powerSGD_hook(rank=4)"] == "aggressive"
    assert accuracy_of("EFSignSGD through alltoall") == "aggressive" and set(found.values()) == set(ACCURACIES[:3])


def test_names_in_a_command_line():
    names = [*ARMS, "TopK(ratio=0.1)", "BlockQuant through alltoall", "hook that sends nothing"]
    assert [checked_contender(name) for name in names] == names


@pytest.mark.parametrize("name", ["PyTorch's PowerSGD hook", "TopQ", "BlockQuant through alltonone", "policy best"])
def test_unknown_names_in_a_command_line(name):
    with pytest.raises(argparse.ArgumentTypeError, match=r"expected a (compressor|program)"):
        checked_contender(name)


def test_rivals_are_as_accurate():
    accuracies = {"plain": "exact", "Cast16": "safe", "EFSignSGD": "aggressive", "TopK": "looser", "auto, safe": "safe"}
    assert rivals_of("auto, safe", accuracies) == ["plain", "Cast16"]
    assert rivals_of("EFSignSGD", accuracies) == ["plain", "Cast16", "auto, safe"]


def test_a_plan_is_as_accurate_as_its_worst_use_of_a_compressor(model):
    def trace(error: float, role: Role = Role.WEIGHT) -> ModelTrace:
        roles = {"0.weight": Role.WEIGHT, "1.weight": role, "0.bias": Role.VECTOR, "1.bias": Role.VECTOR}
        errors = {"EFSignSGD(block=128)": error, "BlockQuant(bits=4, block=256, scale_dtype=torch.float32)": 0.1}
        shapes = {name: tuple(each.shape) for name, each in model.named_parameters()}
        tensors = [
            TracedTensor(name, math.prod(shape), 0.01 * at, shape=shape, role=roles[name], errors=errors)
            for at, (name, shape) in enumerate(shapes.items(), start=1)
        ]
        return ModelTrace("two layers", tuple(tensors), backward_s=0.05)

    signs = sync.uniform_plan(model, "EFSignSGD", world_size=2)
    assert accuracy_on(signs, trace(0.6)) == "aggressive"
    assert accuracy_on(signs, trace(0.95)) == accuracy_on(signs, trace(0.6, Role.EMBEDDING)) == "looser"
    blocks = sync.uniform_plan(model, "BlockQuant(bits=4)", world_size=2)
    assert accuracy_on(blocks, trace(0.6, Role.EMBEDDING)) == "safe"
    assert accuracy_on(sync.uniform_plan(model, "Identity", world_size=2), trace(0.6)) == "exact"


def test_equal_plans_are_measured_once(model):
    plan = sync.uniform_plan(model, "BlockQuant", world_size=2)
    nothing = sync.uniform_plan(model, "Identity", world_size=2)
    plans = {
        "a": plan,
        "b": sync.uniform_plan(model, "EFSignSGD", world_size=2),
        "c": plan.for_frontend(sync.Frontend.DDP),
        "d": nothing,
    }
    assert distinct(plans) == {"a": "a", "b": "b", "c": "a", "d": PLAIN}


def test_summaries_have_shares_of_the_elements(model):
    assert summary(sync.uniform_plan(model, "Identity", world_size=2)) == "nothing"
    found = summary(sync.uniform_plan(model, "BlockQuant", world_size=2))
    weights = (96 * 96 + 96 * 32) / (96 * 96 + 96 * 32 + 128)
    assert found.startswith(f"{weights:.1%} BlockQuant through allgather, ") and found.endswith(
        " Identity through allgather"
    )
    four_bits = summary(sync.uniform_plan(model, "BlockQuant(bits=4)", world_size=2))
    assert f"{weights:.1%} BlockQuant(bits=4) through" in four_bits
    assert "PowerSGD through powersgd" in summary(sync.uniform_plan(model, "PowerSGD(rank=4)", world_size=2))
