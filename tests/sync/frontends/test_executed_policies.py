"""The plans of all policies train: they fit the model, lose no more than their compressors do, and ranks agree."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gckernels
from gckernels.planner.choice import POLICIES, choose
from gckernels.planner.drafts.problem import Problem, ProblemError
from gckernels.sync import Frontend, Plan, Topology, attach
from gckernels.sync.traces.model_trace import ModelTrace
from gckernels.sync.traces.traced_tensors import TracedTensor
from planning import problem_of
from ranks import run_ranks, values_of
from workloads import digest_of, topology

SLOW = pytest.mark.slow
COMPRESSORS = (gckernels.BlockQuant(bits=4), gckernels.Cast16())
QUICK = ("none", "auto")
STEPS = 3  # the first one is not compressed


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(96, 256), nn.ReLU(), nn.Linear(256, 300), nn.ReLU(), nn.Linear(300, 40))


def problem(module: nn.Module, frontend: Frontend, nbytes_per_s: float) -> Problem:
    """A problem whose trace has the tensors of the model, and for DDP buckets that DDP does not make."""
    tensors = [
        TracedTensor(name, each.numel(), 1e-3 * index, tuple(each.shape))
        for index, (name, each) in enumerate(reversed(list(module.named_parameters())))
    ]
    names = [tensor.name for tensor in tensors]
    buckets = (tuple(names[:1]), tuple(names[1:4]), tuple(names[4:])) if frontend == Frontend.DDP else ()
    trace = ModelTrace("network", tuple(tensors), 0.01, buckets=buckets)
    where = topology(dist.get_world_size()) if nbytes_per_s > 1e7 else Topology(dist.get_world_size())
    return problem_of(trace, frontend, COMPRESSORS, topology=where, link_nbytes_per_s=nbytes_per_s)


def gradients(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def executed(folder: str, frontend: Frontend, nbytes_per_s: float, policies: tuple[str, ...]) -> dict[str, Any]:
    """For each policy that has a plan: a digest of the gradients of its training, their largest relative error, and
    how many units it compresses."""
    rank, found = dist.get_rank(), {}
    for policy in policies:
        module = network()
        try:
            choice = choose(problem(module, frontend, nbytes_per_s), policy, compared=())
        except ProblemError:
            continue
        path = Path(folder, f"{policy}-{rank}.json")
        choice.plan.save(path)
        plan = Plan.load(path)
        # a plan of auto that gains little gives way to that of all
        assert plan.prediction is not None and plan.prediction.policy in (policy, *["all"] * (policy == "auto"))
        exact = copy.deepcopy(module)
        if frontend == Frontend.DDP:
            model = DistributedDataParallel(module, bucket_cap_mb=0.3)
            handle: Any = attach(model, plan)
        else:
            model = module
            handle = attach(module, plan)
        digests, errors = [], []
        for step in range(STEPS):
            batch = torch.randn(16, 96, generator=torch.Generator().manual_seed(100 * step + rank))
            for each in (model, exact):
                each.zero_grad()
                each(batch).square().mean().backward()
            expected = gradients(exact)
            dist.all_reduce(expected.div_(dist.get_world_size()))
            digests.append(digest_of([gradients(module)]))
            errors.append(((gradients(module) - expected).norm() / expected.norm()).item())
        handle.close()
        compressed = sum(unit.compressor != gckernels.Identity() for unit in plan.units)
        found[policy] = (digests, max(errors), compressed)
    return found


@pytest.mark.parametrize("frontend", [Frontend.DDP, Frontend.MODULE])
@pytest.mark.parametrize(
    ("world_size", "nbytes_per_s", "policies"),
    [
        (2, 1e6, QUICK),
        pytest.param(2, 1e8, tuple(POLICIES), marks=SLOW),
        pytest.param(4, 1e6, tuple(POLICIES), marks=SLOW),
        pytest.param(4, 1e8, tuple(POLICIES), marks=SLOW),
    ],
)
def test_the_plans_of_policies_train(tmp_path, frontend, world_size, nbytes_per_s, policies):
    ranks = values_of(run_ranks(world_size, executed, str(tmp_path), frontend, nbytes_per_s, policies))
    assert ranks.count(ranks[0]) == world_size
    assert {"none", "auto"} <= ranks[0].keys()
    for policy, (_, error, compressed) in ranks[0].items():
        # four bits lose 13 %; a second encoding of the mean, and feedback, add to it
        assert error < (0.4 if compressed else 1e-5), policy
    assert ranks[0]["none"][2] == 0
    if nbytes_per_s == 1e6:
        assert ranks[0]["auto"][2] > 0
