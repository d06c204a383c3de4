"""Drafts have times without an error, and moves keep their tensors."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import gckernels
from gckernels.planner.drafts.drafts import MessageDraft, plan_of, step_s
from gckernels.planner.drafts.options import all_options, variants
from gckernels.planner.drafts.problem import Problem
from gckernels.planner.machines.machine import MachineError, Overheads
from gckernels.planner.search.restructure import after, moved, orders_of
from gckernels.sync import Topology
from gckernels.sync.plans.plan import Frontend
from gckernels.sync.traces.model_trace import ModelTrace
from gckernels.sync.traces.traced_tensors import TracedTensor
from planning import problem_of

COMPRESSORS = (gckernels.EFSignSGD(), gckernels.BlockQuant(bits=4), gckernels.DGC(), gckernels.PowerSGD(rank=2))


def small_problem(frontend: Frontend) -> Problem:
    tensors = tuple(TracedTensor(f"t{at}", 64 << at, at * 1e-3, (64, 1 << at)) for at in range(9))
    buckets = tuple(tuple(each.name for each in tensors[at : at + 3][::-1]) for at in (0, 3, 6))
    problem = problem_of(
        ModelTrace("m", tensors, 9e-3, buckets=buckets),
        frontend,
        COMPRESSORS,
        topology=Topology(3, 2),
        link_nbytes_per_s=1e8,
        overheads=Overheads(1e-5, 1e-5, 2e-5, 1e-6),
    )
    return replace(problem, allowed={**problem.allowed, "t1": (), "t5": ()})


def random_draft(rng: random.Random, problem: Problem, options):
    draft = []
    for first in range(0, 9, 3):
        tensors = list(problem.buckets[first // 3]) if problem.buckets else [first, first + 1, first + 2]
        cut = rng.randint(0, 2)
        parts = [part for part in (tensors[:cut], tensors[cut:]) if part]
        draft.append(tuple(MessageDraft(tuple(part), rng.choice(variants(rng.choice(options)))) for part in parts))
    return tuple(draft) if problem.buckets else tuple(rng.sample(draft, len(draft)))


def test_a_draft_without_a_price_takes_infinitely_long():
    problem, rng = small_problem(Frontend.MODULE), random.Random(2)
    problem = replace(problem, pricer=problem.pricer.on(replace(problem.machine, lacks=frozenset({"AllGather"}))))
    found = []
    for number in range(20):
        draft = random_draft(rng, problem, all_options(problem)[: 2 if number % 2 else None])
        try:
            expected = problem.timeline(plan_of(problem, draft)).step_s
        except MachineError:
            expected = math.inf
        found.append(expected)
        assert step_s(problem, draft) == expected
    assert min(found) < math.inf and max(found) == math.inf


def test_orders_of_launches_keep_all_of_them():
    problem, rng = small_problem(Frontend.MODULE), random.Random(3)
    draft = random_draft(rng, problem, all_options(problem))
    orders = [moved(draft, [move]) for move in orders_of(problem, draft)]
    assert len(set(orders)) == 4 and all(set(each) == set(draft) and each != draft for each in orders)
    assert not orders_of(small_problem(Frontend.DDP), draft)


def test_a_move_is_made_after_others_unless_they_have_changed_its_launches():
    problem, rng = small_problem(Frontend.MODULE), random.Random(4)
    draft = random_draft(rng, problem, all_options(problem))
    first, *_, last = (move for move in orders_of(problem, draft) if move.stop - move.first == 2)
    changed = after(draft, first, draft)
    assert changed == (draft[1], draft[0], draft[2])
    assert after(changed, last, draft) is None
    assert after((draft[1], draft[2]), last, draft) == (draft[2], draft[1])
