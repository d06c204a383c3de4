"""Tests of the arms of the measurement of training steps, over loopback."""

from __future__ import annotations

import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from bench.lib import arms, goodput
from bench.lib.bounds import Alone
from bench.lib.models import WORKLOADS
from bench.sync import steps
from gckernels import sync
from gckernels.sync.lab import Network
from ranks import run_ranks, values_of

NUMEL = {"mlp": 7_347_200, "transformer_1m": 1_061_248, "transformer_10m": 10_038_400, "convnet": 2_776_906}
NUMEL |= {"bytes_lm": 469_760, "digits": 151_306, "fashion_mnist": 207_178, "embedding": 4_328_458}


@pytest.mark.parametrize("name", WORKLOADS)
def test_models_have_their_size_and_learn_the_same_everywhere(name):
    workload = WORKLOADS[name]
    model, again = workload.model(), workload.model()
    assert sum(each.numel() for each in model.parameters()) == NUMEL[name]
    assert all(map(torch.equal, model.state_dict().values(), again.state_dict().values()))
    inputs, answers = workload.batch(torch.Generator().manual_seed(1))
    workload.loss(model(inputs), answers).backward()
    assert all(bool(each.grad.isfinite().all()) for each in model.parameters())


def run_arms(specs):
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    with mock.patch.multiple(goodput, SECONDS=0.01, ROUNDS=2):
        found = {"goodput": goodput.goodput()}
    setting = arms.Setting.of("transformer_1m", Network(2))
    for spec in specs:
        arm = arms.Arm(spec, setting)
        for _ in range(arms.WARM_UP):
            arm.ticks()
        same = [torch.empty_like(each) for each in arm.model.parameters()]
        for copy, each in zip(same, arm.model.parameters(), strict=True):
            copy.copy_(each.detach())
            dist.broadcast(copy, 0)
        equal = all(map(torch.equal, same, arm.model.parameters()))
        traced = [] if arm.attachment is None else steps._traced(arm)
        columns = steps.bound_columns(1.0, Alone(0.1, 0.2, 0.3, 0.5, wire_s=0.4), traced)
        found[spec] = equal and arm.is_finite(), arm.sent_nbytes(), columns
        arm.close()
    return found


def test_every_kind_of_arm_trains_and_counts_its_bytes():
    specs = [arms.PLAIN, *arms.HOOKS, arms.SILENT, "BlockQuant"]
    first, second = values_of(run_ranks(2, run_arms, specs))
    assert first["goodput"] == second["goodput"] > 0
    assert all(first[spec][0] and second[spec][0] for spec in specs if spec != arms.SILENT)
    assert not second[arms.SILENT][0] and first[arms.SILENT][1] == 0
    dense = sync.programs.allreduce_sent_nbytes(4 * NUMEL["transformer_1m"], 2)
    assert first[arms.PLAIN][1] == dense
    assert first[arms.FP16_HOOK][1] == first[arms.BF16_HOOK][1] == dense / 2
    assert dense / 30 < first[arms.POWERSGD_HOOK][1] < dense / 10
    columns, unknown = first["BlockQuant"][2], first[arms.PLAIN][2]
    assert float(columns["encode_first_s"]) > 0 and float(columns["bound_s"]) > 0.8
    assert (unknown["bound_s"], unknown["step_over_bound"], unknown["step_over_ddp_bound"]) == (
        *("0.80000", "1.250", "1.111"),
    )
    assert second["BlockQuant"][2]["bound_s"] == "0.80000"  # rank 0 alone reads traces
