"""Limits of plans: the best of all plans of a small model, and the best one if codecs took no time.

``exhaustive`` tries plans in the order of bounds from below, for which :mod:`gckernels.planner.search.maxplus` has the
times of steps. ``bound`` is no plan to use: it is judged on the machine of :func:`free_problem`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from gckernels.planner.choice import POLICIES
from gckernels.planner.drafts.drafts import Draft, Option, draft_of_launches, plan_of, usual_launches
from gckernels.planner.drafts.options import all_options
from gckernels.planner.drafts.problem import Problem, ProblemError
from gckernels.planner.machines.scaling import FasterCodecs
from gckernels.planner.policies.baselines import fastest, none
from gckernels.planner.search.item_rows import RowMaker
from gckernels.planner.search.maxplus import State, Steps
from gckernels.planner.search.rows import NOWHERE
from gckernels.planner.search.search import Search, messages_of_draft, ready_of, with_options
from gckernels.sync.plans.plan import Plan

MAX_BITS = 20
"""The largest problem of ``exhaustive``: the number of launches times the binary logarithm of that of the options."""
_UNIFORM = 20
"""Plans with the same option for all launches that ``exhaustive`` judges first."""


def exhaustive(problem: Problem) -> Plan:
    """The fastest plan in which every launch is one message with any of the options on the device.

    The timeline judges them in the order of bounds from below, until no bound is below the best of them.

    Raises:
        ProblemError: there are too many plans.
    """
    launches = usual_launches(problem)
    draft = draft_of_launches(launches, Option())
    search = Search(problem, sharing=False)
    options = search.worthwhile(draft, all_options(problem))
    bits = len(launches) * math.log2(len(options))
    if bits > MAX_BITS:
        raise ProblemError(
            f"exhaustive: {len(launches)} launches with {len(options)} options are {bits:.0f} bits, at most {MAX_BITS} "
            "are tried"
        )
    uniform_drafts = search.uniform(launches, options, _UNIFORM)
    best = fastest(problem, [none(problem), *(plan_of(problem, each) for each in uniform_drafts)])
    base_s = problem.trace.forward_s + problem.trace.optimizer_s
    bounds = products(lower_bounds(problem, draft, options), problem.step_s(best) - base_s)
    for bound_s, choice in sorted(bounds):
        if base_s + bound_s >= problem.step_s(best):
            break
        best = fastest(problem, [best, plan_of(problem, with_options(draft, [options[at] for at in choice]))])
    return best


def lower_bounds(problem: Problem, draft: Draft, options: Sequence[Option]) -> Steps:
    """The times of steps with any of the options for each launch of a draft, which has one message in each: no longer
    than on the timeline."""
    maker = RowMaker(problem, sharing=False)
    kinds, first = maker.kinds([message.tensors for message in messages_of_draft(draft)])
    rows = maker.rows(first, options).finishing_on(NOWHERE)  # launches may finish on any lane, so none waits for them
    ready_s = itertools.accumulate((ready_of(problem, launch) for launch in draft), max)
    until_s = np.array([0.0, *ready_s, problem.trace.backward_s])
    firsts = np.array([True] * len(draft) + [False])
    return Steps(rows, kinds, maker.gaps(np.maximum(np.diff(until_s), 0.0), firsts, rows))


def products(steps: Steps, below_s: float) -> Iterator[tuple[float, tuple[int, ...]]]:
    """All choices of an option for each item with times below ``below_s``, as pairs of time and choice."""
    idle: list[State] = [steps.end()]  # the ways if no item needed anything
    for item in range(len(steps.kinds) - 1, 0, -1):
        idle.append(steps.passed(idle[-1], item))
    stack: list[tuple[State, tuple[int, ...]]] = [(steps.start(), ())]
    while stack:
        state, choice = stack.pop()
        item = len(choice)
        state = steps.passed(state, item)
        times = steps.times(state, steps.kinds[item], idle[-1 - item])
        for option in np.flatnonzero(times < below_s).tolist():
            if item + 1 == len(steps.kinds):
                yield float(times[option]), (*choice, option)
            else:
                stack.append((steps.behind(state, steps.kinds[item], option), (*choice, option)))


def free_problem(problem: Problem) -> Problem:
    """The problem on a machine whose codecs take no time. No plan on the real machine should be faster than on it."""
    machine = FasterCodecs(problem.machine, math.inf)
    machine.margin = 0.0
    return replace(problem, pricer=problem.pricer.on(machine))


def bound(problem: Problem) -> Plan:
    """The plan of ``auto`` if codecs took no time."""
    return POLICIES["auto"](free_problem(problem))
