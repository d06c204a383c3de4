"""Traces with tensors without elements, and of several dtypes: every policy has a plan for all of their parameters."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from gckernels.planner.choice import COMPARED, choose
from gckernels.planner.drafts.problem import Problem
from gckernels.planner.timeline.pricing import Pricer
from gckernels.sync import Topology
from gckernels.sync.accuracy.accuracy import allowed_compressors
from gckernels.sync.plans.plan import Frontend
from gckernels.sync.traces.model_trace import ModelTrace
from gckernels.sync.traces.traced_tensors import Role, TracedTensor
from planning import PLANNED, SimpleMachine
from workloads import thinned

SHAPES: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
    "weight": (torch.float32, (1024, 1024)),
    "vector": (torch.float32, (1024,)),
    "empty": (torch.float32, (0, 4)),
    "scalar": (torch.float32, ()),
    "half": (torch.bfloat16, (1024, 1024)),
    "empty half": (torch.bfloat16, (0,)),
    "double": (torch.float64, (512, 512)),
    "empty double": (torch.float64, (3, 0)),
}
MODELS = [
    ("empty", "weight"),
    ("weight", "empty", "vector"),
    ("empty", "empty"),
    ("empty double", "double"),
    ("vector", "weight", "empty double"),
    ("half", "empty half", "weight", "empty"),
    ("scalar", "empty"),
]
RULES = ("safe", ("BlockQuant(bits=4)", "Cast16", "PowerSGD", "ChunkTopK"), "exact")


def trace_of(kinds: tuple[str, ...]) -> ModelTrace:
    """A trace with DDP's buckets, one for each dtype."""
    tensors, buckets = [], {}
    for number, kind in enumerate(kinds):
        dtype, shape = SHAPES[kind]
        numel, role = torch.Size(shape).numel(), Role.VECTOR if len(shape) < 2 else Role.WEIGHT
        tensors.append(TracedTensor(f"t{number}", numel, 1e-3 * number, shape, dtype, role, float(bool(numel))))
        buckets.setdefault(dtype, []).append(f"t{number}")
    return ModelTrace("model", tuple(tensors), 1e-3 * len(kinds), 1e-3, buckets=tuple(map(tuple, buckets.values())))


@pytest.mark.parametrize(("kinds", "frontend"), thinned(itertools.product(MODELS, PLANNED), 3))
def test_every_policy_plans_them(kinds, frontend):
    trace = trace_of(kinds)
    parameters = {
        tensor.name: torch.nn.Parameter(torch.empty(tensor.shape, dtype=tensor.dtype)) for tensor in trace.tensors
    }
    trace = trace if frontend is Frontend.DDP else replace(trace, buckets=())
    for rule in RULES:
        problem = Problem(trace, Pricer(SimpleMachine(Topology(2))), frontend, allowed_compressors(trace, rule))
        policies = (*COMPARED, *(f"all:{method}" for method in problem.compressors))
        for row in choose(problem, "auto", policies).rows:
            row.plan.check(parameters.items(), 2)
