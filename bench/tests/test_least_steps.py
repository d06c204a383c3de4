"""The least step is below every plan, and as high as the work of small examples."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

import gckernels
from bench.planner.least_steps import Limits, highest_s, least_step_s, limits_of
from gckernels.planner.choice import POLICIES
from gckernels.planner.drafts.drafts import Draft, MessageDraft, step_s
from gckernels.planner.drafts.options import all_options, placed, variants
from gckernels.planner.drafts.problem import Problem
from gckernels.planner.machines.files import load_machine
from gckernels.planner.timeline.pricing import Pricer
from gckernels.sync.plans.plan import Frontend
from gckernels.sync.programs import Place
from gckernels.sync.traces.model_trace import ModelTrace
from gckernels.sync.traces.traced_tensors import TracedTensor

DEVICE, BOTH = (Place.DEVICE,), (Place.DEVICE, Place.HOST)


def problem_of(
    tensors: tuple[TracedTensor, ...],
    backward_s: float,
    machine: str = "espresso-pcie",
    places: tuple[Place, ...] = DEVICE,
) -> Problem:
    allowed = dict.fromkeys((tensor.name for tensor in tensors), (gckernels.EFSignSGD(), gckernels.DGC()))
    return Problem(
        ModelTrace("m", tensors, backward_s), Pricer(load_machine(machine)), Frontend.MODULE, allowed, places
    )


def random_problem(rng: random.Random, machine: str, places: tuple[Place, ...]) -> Problem:
    ready_s, tensors = 0.0, []
    for number in range(rng.randint(1, 4)):
        ready_s += rng.choice((0.0, 1e-3, 1e-2))
        tensors.append(TracedTensor(f"t{number}", int(10 ** rng.uniform(3, 7.5)), ready_s))
    return problem_of(tuple(tensors), ready_s + rng.choice((0.0, 1e-2)), machine, places)


def random_draft(rng: random.Random, problem: Problem) -> Draft:
    """Launches in any order, with any options."""
    options = [each for option in all_options(problem) for each in placed(option, problem.places)]
    numbers = list(range(len(problem.trace.tensors)))
    cuts = sorted(rng.sample(numbers[1:], rng.randint(0, len(numbers) - 1)))
    launches = [
        (MessageDraft(tuple(numbers[first:stop]), rng.choice(variants(rng.choice(options)))),)
        for first, stop in itertools.pairwise([0, *cuts, len(numbers)])
    ]
    return tuple(rng.sample(launches, len(launches)))


def check(seed: int, machine: str, places: tuple[Place, ...], drafts: int, policies: tuple[str, ...]) -> None:
    rng = random.Random(seed)
    problem = random_problem(rng, machine, places)
    least_s = least_step_s(problem)
    found = [problem.step_s(POLICIES[policy](problem)) for policy in policies]
    found += [step_s(problem, random_draft(rng, problem)) for _ in range(drafts)]
    assert least_s <= min(found) * (1 + 1e-9), (seed, machine)


def test_no_plan_is_faster_than_the_least_step():
    check(1, "espresso-pcie", DEVICE, 20, ("none", "all", "cupcake"))


@pytest.mark.slow
@pytest.mark.parametrize("machine", ["espresso-pcie", "espresso-nvlink", "two-sites-1gbit", "h100-400gbit", "lab"])
@pytest.mark.parametrize("places", [DEVICE, BOTH], ids=["device", "host"])
@pytest.mark.parametrize("seed", range(10, 14))
def test_no_plan_of_many_is_faster_than_the_least_step(machine, places, seed):
    check(seed, machine, places, 50, ("none", "all", "cupcake", "auto"))


def test_work_begins_when_gradients_are_ready():
    """The last gradient of a long backward takes as long as alone; while backward computes, nothing is sent."""
    last = TracedTensor("last", 1 << 25, 1.0)
    alone_s = least_step_s(problem_of((replace(last, ready_s=0.0),), 0.0))
    assert least_step_s(problem_of((last,), 1.0)) == pytest.approx(1.0 + alone_s)
    first = TracedTensor("first", 1 << 10, 0.0)
    assert least_step_s(problem_of((first, last), 1.0)) == pytest.approx(1.0 + alone_s, rel=1e-3)


@pytest.mark.slow
def test_one_tensor_takes_as_long_as_its_fastest_option():
    problem = problem_of((TracedTensor("t", 1 << 22, 0.0),), 0.0)
    best_s = min(
        step_s(problem, ((MessageDraft((0,), each),),)) for option in all_options(problem) for each in variants(option)
    )
    assert best_s * 0.9 < least_step_s(problem) <= best_s


def test_every_later_tensor_is_in_the_limits_of_a_group():
    tensors = tuple(TracedTensor(f"t{number}", 1 << 20, number * 1e-3) for number in range(3))
    limits = limits_of(problem_of(tensors, 2e-3))
    work_s = [each.max(axis=0) > 0 for each in limits.work_s]
    assert all((one <= other).all() for one, other in itertools.pairwise(work_s))
    assert work_s[-1].sum() > work_s[0].sum() > 0


def test_the_largest_limit_is_as_small_as_with_the_best_mixture():
    """Half of the work with each option makes both limits 1.5 seconds."""
    work_s = np.array([[1.0, 2.0], [2.0, 1.0], [3.0, 3.0]])
    assert highest_s(Limits(np.zeros(2), (work_s,))) == pytest.approx(1.5, rel=0.01)
    assert highest_s(Limits(np.zeros(2), (work_s,))) <= 1.5
    assert highest_s(Limits(np.array([0.5, 0.0]), (work_s[:1],))) == pytest.approx(2.0, rel=0.01)
