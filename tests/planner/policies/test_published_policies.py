"""Plans of published policies fit any model, and do what their papers say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import gckernels
from gckernels.planner.choice import POLICIES
from gckernels.planner.drafts.problem import Problem
from gckernels.planner.policies.messages import GATHERED_BETWEEN_MACHINES, MAX_PARTS
from gckernels.sync import Topology
from gckernels.sync.plans.plan import Frontend
from gckernels.sync.programs import ALLGATHER, ALLREDUCE, Place
from gckernels.sync.programs.steps import Broadcast, Decode, Encode, Gather, Hop
from planning import PLANNED, checked_plan, problem_of, traced

PUBLISHED = ("secopa", "mergecomp", "espresso", "byteps", "hitopkcomm")
SIGN = gckernels.EFSignSGD()


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("frontend", PLANNED)
@pytest.mark.parametrize("topology", [Topology(4), Topology(2, 2), Topology(1, 3), Topology(1)], ids=str)
def test_plans_fit(name, frontend, topology):
    trace = traced(300, 100_000, 7, 20_000, 1_000_000)
    problem = problem_of(trace, frontend, (SIGN, gckernels.Cast16()), topology=topology)
    checked_plan(problem, POLICIES[name])


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("frontend", PLANNED)
def test_plans_fit_models_with_several_dtypes_and_exempt_tensors(name, frontend):
    dtypes = (torch.float32, torch.float32, torch.bfloat16, torch.bfloat16, torch.float64)
    trace = traced(300, 100_000, 70_000, 20_000, 50_000, dtypes=dtypes)
    problem = problem_of(trace, frontend, (SIGN,), topology=Topology(2, 2))
    exempt = {"t0", "t2"}
    allowed = {tensor: methods for tensor, methods in problem.allowed.items() if tensor not in exempt}
    plan = checked_plan(Problem(trace, problem.pricer, frontend, allowed), POLICIES[name])
    units = {unit.parameter: unit for unit in plan.units}
    assert all(units[tensor].compressor.name == "Identity" for tensor in (*exempt, "t4"))


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("methods", [(), (gckernels.PowerSGD(rank=2),)], ids=["nothing", "factors"])
def test_without_codecs_nothing_is_compressed(name, methods):
    problem = problem_of(traced(1000, 100_000), Frontend.MODULE, methods)
    assert not any(
        isinstance(step, Encode) for unit in checked_plan(problem, POLICIES[name]).units for step in unit.program
    )


@pytest.mark.parametrize("name", (*PUBLISHED, "auto"))
def test_compressors_that_cannot_go_around_a_ring_are_planned(name):
    checked_plan(problem_of(traced(300, 100_000), Frontend.MODULE, (gckernels.DGC(),)), POLICIES[name])


def test_all_policies_are_documented():
    page = Path(__file__).parents[3].joinpath("docs/reference/policies.md").read_text().partition("\n## Rivals\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == [*POLICIES]


@pytest.mark.parametrize("name", PUBLISHED)
def test_buckets_of_ddp_stay(name):
    plan = checked_plan(problem_of(traced(300, 100_000, 500_000), Frontend.DDP, (SIGN,)), POLICIES[name])
    assert {unit.launch for unit in plan.units} == {None} and plan.frontend == Frontend.DDP


def test_espresso_launches_every_tensor_alone_and_compresses_where_the_link_is_slow():
    trace = traced(2_000_000, 2_000_000, 100)
    slow = checked_plan(problem_of(trace, Frontend.MODULE, (SIGN,), link_nbytes_per_s=1e8), POLICIES["espresso"])
    fast = checked_plan(
        problem_of(trace, Frontend.MODULE, (SIGN,), link_nbytes_per_s=1e11, latency_s=1e-6), POLICIES["espresso"]
    )
    assert {unit.launch for unit in slow.units} == {0, 1, 2}
    assert any(unit.compressor == SIGN for unit in slow.units)
    assert not any(unit.compressor == SIGN for unit in fast.units)


def test_espresso_moves_compression_to_the_host_where_that_has_time():
    """Encoding delays backward on the device; on the host it takes five times as long, but beside backward."""
    trace = traced(*[1_000_000] * 6, gap_s=0.01)
    on_device = problem_of(trace, Frontend.MODULE, (SIGN,))
    both = Problem(trace, on_device.pricer, Frontend.MODULE, on_device.allowed, (Place.DEVICE, Place.HOST))
    plans = [checked_plan(problem, POLICIES["espresso"]) for problem in (on_device, both)]
    hosts = [{unit.parameter for unit in plan.units if Encode(Place.HOST) in unit.program} for plan in plans]
    assert not hosts[0] and hosts[1]
    assert both.step_s(plans[1]) < 0.95 * both.step_s(plans[0])


def test_byteps_compresses_everything_on_the_host_in_parts():
    trace = traced(5_000_000, 10)
    problem = problem_of(trace, Frontend.MODULE, (SIGN,), topology=Topology(2, 2))
    both = Problem(trace, problem.pricer, Frontend.MODULE, problem.allowed, (Place.DEVICE, Place.HOST))
    plan = checked_plan(both, POLICIES["byteps"])
    codings = {step for unit in plan.units for step in unit.program if isinstance(step, Encode | Decode)}
    assert {step.place for step in codings} == {Place.HOST}
    assert sum(unit.parameter == "t0" for unit in plan.units) == 5
    assert {unit.compressor for unit in plan.units} == {SIGN}


@pytest.mark.parametrize(
    ("numel", "machines"), [(10**11, 16), (10**15, 16), pytest.param(10**11, 512, marks=pytest.mark.slow)]
)
def test_plans_of_huge_models_have_few_parts(numel, machines):
    """A part of 4 MB each, or one for each machine, would be millions of messages."""
    problem = problem_of(traced(numel, 1000), Frontend.MODULE, (SIGN,), topology=Topology(machines))
    for name in PUBLISHED:
        assert len(checked_plan(problem, POLICIES[name]).units) <= MAX_PARTS + 2, name


def test_hitopkcomm_gathers_payloads_between_machines():
    trace = traced(5000, 10)
    for topology, program in ((Topology(2, 2), GATHERED_BETWEEN_MACHINES), (Topology(4), ALLGATHER)):
        plan = checked_plan(problem_of(trace, Frontend.MODULE, (SIGN,), topology=topology), POLICIES["hitopkcomm"])
        assert {unit.program for unit in plan.units} == {program}
        assert {unit.compressor for unit in plan.units} == {SIGN}


def test_secopa_compresses_large_gradients_and_spreads_the_roots_of_their_parts():
    trace = traced(100, 8_000_000)
    plan = checked_plan(problem_of(trace, Frontend.MODULE, (SIGN,), link_nbytes_per_s=1e9), POLICIES["secopa"])
    small, *large = sorted(plan.units, key=lambda unit: (unit.parameter, unit.start or 0))
    assert small.program == ALLREDUCE
    assert all(unit.compressor == SIGN for unit in large)
    kinds = {type(step) for unit in large for step in unit.program}
    assert Hop in kinds or ({Gather, Broadcast} <= kinds and len({unit.root for unit in large}) == len(large))
