"""Estimates are the times of the timeline where nothing is shared, bounds of them where something is."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

import gckernels
from gckernels.planner.drafts.drafts import Draft, MessageDraft, Option, plan_of
from gckernels.planner.drafts.options import all_options, variants
from gckernels.planner.drafts.problem import Problem
from gckernels.planner.machines.files import load_machine
from gckernels.planner.machines.machine import Overheads, Shared
from gckernels.planner.search.restructure import moved
from gckernels.planner.search.search import Search
from gckernels.sync import Topology
from gckernels.sync.plans.plan import Frontend
from gckernels.sync.programs.steps import Broadcast
from gckernels.sync.traces.model_trace import ModelTrace
from gckernels.sync.traces.traced_tensors import TracedTensor
from planning import problem_of

COMPRESSORS = (gckernels.EFSignSGD(), gckernels.BlockQuant(bits=4))
UNLIMITED = dict.fromkeys(Shared, math.inf)


def random_problem(rng: random.Random, units: int, **machine: object) -> Problem:
    tensors, ready_s = [], 0.0
    for index in range(units):
        ready_s += rng.choice([0.0, 1e-4, 1e-3])
        tensors.append(TracedTensor(f"t{index}", rng.choice([100, 5000, 100_000, 1_000_000]), ready_s))
    trace = ModelTrace("m", tuple(tensors), ready_s + rng.choice([0.0, 1e-3]), forward_s=0.002, optimizer_s=0.001)
    return problem_of(trace, Frontend.MODULE, COMPRESSORS, **machine)


def random_draft(rng: random.Random, problem: Problem, options: list[Option]) -> Draft:
    tensors = list(range(len(problem.trace.tensors)))
    draft = []
    while tensors:
        size = rng.randint(1, 3)
        draft.append((MessageDraft(tuple(tensors[:size]), rng.choice(options)),))
        tensors = tensors[size:]
    return tuple(draft)


@pytest.mark.parametrize("topology", [Topology(4), Topology(3, 2)])
@pytest.mark.parametrize("seed", range(3))
def test_estimates_are_exact_where_nothing_is_shared(topology, seed):
    rng = random.Random(seed)
    overheads = Overheads(stage_s=1e-5, submit_s=2e-5, hook_s=3e-5)
    problem = random_problem(rng, 6, topology=topology, capacities=UNLIMITED, overheads=overheads)
    search = Search(problem)
    # estimates are those of the root, as timelines are if all messages have the same one
    options = [replace(option, root=0) for option in all_options(problem)]
    for _ in range(10):
        draft = random_draft(rng, problem, options)
        expected = problem.step_s(plan_of(problem, draft)) - 0.003
        assert search.estimate(draft) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("topology", [Topology(4), Topology(3, 2)])
@pytest.mark.parametrize("computes_on", [Shared.DEVICE, Shared.CORES])
def test_estimates_are_bounds_where_resources_are_shared(topology, computes_on):
    rng = random.Random(1)
    for _ in range(2):
        problem = random_problem(rng, 6, topology=topology, computes_on=computes_on, overheads=Overheads(1e-5, 2e-5))
        search, options = Search(problem, sharing=False), list(all_options(problem))
        for _ in range(8):
            draft = random_draft(rng, problem, options)
            step_s = problem.step_s(plan_of(problem, draft)) - 0.003
            assert 0.5 * step_s < search.estimate(draft) <= step_s * (1.0 + 1e-9)


@pytest.mark.parametrize("name", ["espresso-nvlink", "two-sites-1gbit", "lab"])
def test_estimates_are_bounds_on_described_machines(name):
    """There roots of one machine share its card, and have more to receive than others."""
    rng = random.Random(5)
    problem = random_problem(rng, 6)
    problem = replace(problem, pricer=problem.pricer.on(load_machine(name)))
    search, options = Search(problem, sharing=False), list(all_options(problem))
    options += [option for option in options if any(isinstance(step, Broadcast) for step in option.program)]
    for _ in range(12):
        draft = random_draft(rng, problem, options)
        step_s = problem.step_s(plan_of(problem, draft)) - 0.003
        assert search.estimate(draft) <= step_s * (1.0 + 1e-9)


def test_a_sweep_never_makes_the_estimate_worse():
    rng = random.Random(2)
    problem = random_problem(rng, 8, topology=Topology(3, 2))
    search, options = Search(problem), list(all_options(problem))
    for _ in range(2):
        draft = random_draft(rng, problem, options)
        better = search.improved(draft, options)
        assert search.estimate(better) <= search.estimate(draft) * 1.01
        assert search.improved(better, options, sweeps=1) == better or search.estimate(better) < search.estimate(draft)


def test_all_options_of_an_item_have_the_times_that_they_have_one_by_one():
    rng = random.Random(3)
    problem = random_problem(rng, 5, topology=Topology(3, 2))
    search = Search(problem)
    options = [variant for option in rng.sample(list(all_options(problem)), 6) for variant in variants(option)]
    (draft,) = search.uniform([(0, 1), (2,), (3, 4)], options[:1], 1)
    for move in search.neighbours(draft, options, 10):
        near = moved(draft, [move])
        assert search.estimate(near) == pytest.approx(search.estimates([near])[0], rel=1e-12)


def test_options_that_others_dominate_do_not_change_the_best_uniform_plan():
    problem = random_problem(random.Random(4), 6, topology=Topology(3, 2))
    search, options, launches = Search(problem), list(all_options(problem)), [(0, 1), (2, 3), (4, 5)]
    (best,) = search.uniform(launches, options, 1)
    kept = search.worthwhile(best, options)
    (best_of_kept,) = search.uniform(launches, kept, 1)
    assert len(kept) < len(options)
    assert search.estimate(best_of_kept) == pytest.approx(search.estimate(best), rel=1e-12)
