"""Rivals of the planner's policies have plans that fit, and the limits are limits."""

from __future__ import annotations

import itertools

import pytest
import torch

import gckernels
from bench.rivals.limits import bound, exhaustive, free_problem
from bench.rivals.policies import EVERY_POLICY, RIVALS
from gckernels.planner.choice import POLICIES
from gckernels.planner.drafts.drafts import Option, draft_of_launches, plan_of, usual_launches
from gckernels.planner.drafts.options import all_options
from gckernels.planner.drafts.problem import Problem, ProblemError
from gckernels.planner.policies.messages import MAX_PARTS
from gckernels.planner.search.search import with_options
from gckernels.sync import Topology
from gckernels.sync.plans.plan import Frontend
from gckernels.sync.programs.steps import Encode
from planning import PLANNED, checked_plan, problem_of, random_problem, traced

SIGN = gckernels.EFSignSGD()
CUPCAKE = RIVALS["cupcake"]


def test_no_rival_has_the_name_of_a_policy():
    assert len(EVERY_POLICY) == len(POLICIES) + len(RIVALS)


@pytest.mark.parametrize("frontend", PLANNED)
@pytest.mark.parametrize("topology", [Topology(4), Topology(2, 2), Topology(1, 3), Topology(1)], ids=str)
def test_plans_of_cupcake_fit(frontend, topology):
    trace = traced(300, 100_000, 7, 20_000, 1_000_000)
    checked_plan(problem_of(trace, frontend, (SIGN, gckernels.Cast16()), topology=topology), CUPCAKE)


@pytest.mark.parametrize("frontend", PLANNED)
def test_plans_of_cupcake_fit_models_with_several_dtypes_and_exempt_tensors(frontend):
    dtypes = (torch.float32, torch.float32, torch.bfloat16, torch.bfloat16, torch.float64)
    trace = traced(300, 100_000, 70_000, 20_000, 50_000, dtypes=dtypes)
    problem = problem_of(trace, frontend, (SIGN,), topology=Topology(2, 2))
    allowed = {tensor: methods for tensor, methods in problem.allowed.items() if tensor not in {"t0", "t2"}}
    plan = checked_plan(Problem(trace, problem.pricer, frontend, allowed), CUPCAKE)
    units = {unit.parameter: unit for unit in plan.units}
    assert all(units[tensor].compressor.name == "Identity" for tensor in ("t0", "t2", "t4"))


@pytest.mark.parametrize("methods", [(), (gckernels.PowerSGD(rank=2),)], ids=["nothing", "factors"])
def test_without_codecs_cupcake_compresses_nothing(methods):
    plan = checked_plan(problem_of(traced(1000, 100_000), Frontend.MODULE, methods), CUPCAKE)
    assert not any(isinstance(step, Encode) for unit in plan.units for step in unit.program)


def test_cupcake_puts_groups_into_launches():
    """Many small gradients: a launch for each would cost a latency for each."""
    problem = problem_of(traced(*[5000] * 30), Frontend.MODULE, (SIGN,), latency_s=2e-3)
    plan = checked_plan(problem, CUPCAKE)
    launches = [unit.launch for unit in sorted(plan.units, key=lambda unit: int(unit.parameter[1:]))]
    assert launches == sorted(launches)  # groups are neighbours in the order of backward
    assert len({*launches}) <= 15
    assert problem.step_s(plan) < 0.6 * problem.step_s(POLICIES["hitopkcomm"](problem))


def test_buckets_of_ddp_stay_and_huge_models_have_few_parts():
    plan = checked_plan(problem_of(traced(300, 100_000, 500_000), Frontend.DDP, (SIGN,)), CUPCAKE)
    assert {unit.launch for unit in plan.units} == {None} and plan.frontend == Frontend.DDP
    problem = problem_of(traced(10**15, 1000), Frontend.MODULE, (SIGN,), topology=Topology(16))
    assert len(checked_plan(problem, CUPCAKE).units) <= MAX_PARTS + 2


@pytest.mark.slow
def test_auto_is_close_to_the_best_of_all_plans_of_small_problems():
    distances = []
    for seed in range(1000, 1200):
        problem = random_problem(seed, Frontend.DDP, launches=2)
        try:
            best_s = problem.step_s(exhaustive(problem))
        except ProblemError:
            continue
        distances.append(problem.step_s(POLICIES["auto"](problem)) / best_s - 1.0)
    assert len(distances) > 100
    assert sum(distance <= 0.01 for distance in distances) >= 0.97 * len(distances) and max(distances) <= 0.03


@pytest.mark.parametrize("seed", [3, 5])
def test_exhaustive_finds_the_best_of_all_products_of_options(seed):
    """Restated: every option for every bucket, each judged by the timeline."""
    problem = random_problem(seed, Frontend.DDP, launches=2)
    draft, options = draft_of_launches(usual_launches(problem), Option()), all_options(problem)
    products = (with_options(draft, list(each)) for each in itertools.product(options, repeat=2))
    best_s = min(problem.step_s(plan_of(problem, each)) for each in products)
    assert problem.step_s(exhaustive(problem)) == pytest.approx(best_s)


def test_exhaustive_refuses_large_problems():
    with pytest.raises(ProblemError, match="launches"):
        exhaustive(random_problem(4, Frontend.DDP, launches=12))


def test_codecs_for_nothing_leave_every_plan_at_least_as_fast():
    problem = random_problem(0, Frontend.DDP, launches=2)
    plan, free = POLICIES["auto"](problem), free_problem(problem)
    assert free.step_s(bound(problem)) <= free.step_s(plan) * 1.001
    assert free.step_s(plan) <= problem.step_s(plan)
