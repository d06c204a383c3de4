"""Proposals of predicted plans: those that are worth a trial, and their way to all ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from gckernels import BlockQuant, Cast16, EFSignSGD, Identity
from gckernels.planner.choice import PLANNED_ERROR
from gckernels.planner.drafts.problem import Problem
from gckernels.planner.machines.machine import Sharding
from gckernels.planner.policies.baselines import uniform
from gckernels.planner.predictive.planning import (
    Proposal,
    TriedPlans,
    choice_of,
    finalists,
    proposal,
    proposed,
)
from gckernels.planner.timeline.pricing import Pricer
from gckernels.sync import Topology
from gckernels.sync.accuracy.accuracy import allowed_compressors
from gckernels.sync.communication.agreement import Failure, together
from gckernels.sync.plans.plan import Frontend
from gckernels.sync.programs.named import ALLREDUCE
from gckernels.sync.traces.model_trace import ModelTrace
from gckernels.sync.traces.traced_tensors import TracedGather, TracedTensor
from gckernels.sync.tuning.trials.rules import stages_of
from models import build
from planning import SimpleMachine, problem_of
from ranks import run_ranks, values_of
from tunings import proposal_of

LISTED = stages_of(["BlockQuant(bits=4)", "Cast16"])[0]


def trace() -> ModelTrace:
    tensors = tuple(TracedTensor(f"t{at}", 1 << 20, 1e-3 * at, (1024, 1024)) for at in range(4))
    buckets = (("t0", "t1"), ("t2", "t3"))
    gathers = tuple(TracedGather(bucket, 0.0, 0.0) for bucket in buckets)
    return ModelTrace("model", tensors, 3e-3, 1e-3, buckets=buckets, gathers=gathers)


SLOW_CODECS = SimpleMachine(Topology(4), link_nbytes_per_s=1e9, element_s=4e-9)
"""A machine on which it pays to compress some tensors only."""


SHARDED = {Frontend.FSDP: Sharding()}
FRONTENDS = pytest.mark.parametrize("frontend", [Frontend.DDP, Frontend.MODULE, Frontend.FSDP])


def tried(frontend: Frontend, times: Callable[[float], float]) -> TriedPlans:
    """The trials of two uniform plans, whose steps have taken what ``times`` makes of their predictions."""
    pricer = Pricer(SLOW_CODECS, SHARDED.get(frontend))
    problem = Problem(trace(), pricer, frontend, allowed_compressors(trace(), LISTED.accuracy))
    plans = [uniform(problem, method) for method in problem.compressors]
    measured_s = {plan: times(problem.step_s(plan)) for plan in plans}
    return TriedPlans(measured_s, min(measured_s.values()))


@pytest.mark.parametrize("frontend", [Frontend.DDP, Frontend.MODULE])
def test_a_plan_joins_that_is_predicted_to_beat_all_others(frontend):
    """Trials measure 1 ms less of a step than is predicted, which changes no difference."""
    known = tried(frontend, lambda predicted_s: predicted_s - 1e-3)
    found = proposal(trace(), SLOW_CODECS, frontend, LISTED, known, sharding=SHARDED.get(frontend))
    assert found.error == pytest.approx(0.0, abs=1e-9) and found.finalists
    for plan in found.finalists:
        assert plan.prediction.step_s < (1.0 - PLANNED_ERROR) * known.least_s
        assert plan.fingerprint() not in {each.fingerprint() for each in known.measured_s}


@FRONTENDS
def test_no_plan_joins_whose_gain_is_less_than_the_error_of_predictions(frontend):
    factors = iter((1.0, 3.0))
    known = tried(frontend, lambda predicted_s: next(factors) * predicted_s)
    found = proposal(trace(), SLOW_CODECS, frontend, LISTED, known, sharding=SHARDED.get(frontend))
    assert found.error > 0.5 and found.finalists == ()


@FRONTENDS
def test_no_plan_joins_that_does_not_beat_plain_steps(frontend):
    known = tried(frontend, lambda predicted_s: predicted_s)
    known = replace(known, least_s=1e-6)
    found = proposal(trace(), SLOW_CODECS, frontend, LISTED, known, sharding=SHARDED.get(frontend))
    assert found.finalists == ()


@pytest.mark.parametrize("frontend", [Frontend.DDP, Frontend.MODULE])
def test_finalists_are_of_different_kinds_and_the_fastest_comes_first(frontend):
    compressors = (BlockQuant(bits=4), EFSignSGD(), Cast16())
    choice = choice_of(problem_of(trace(), frontend, compressors, link_nbytes_per_s=1e7))
    plans = finalists(choice, 3)
    predicted_s = [plan.prediction.step_s for plan in plans]
    assert len(plans) == len(compressors) and predicted_s == sorted(predicted_s)
    chosen = [{unit.compressor for unit in plan.units} for plan in plans]
    assert chosen[0] != chosen[1] != chosen[2]
    compressing = [row for row in choice.rows if any(not unit.in_place for unit in row.plan.units)]
    assert predicted_s[0] == min(row.step_s for row in compressing)
    for plan in plans:
        (row, *_) = [row for row in compressing if row.plan == plan]
        assert (plan.prediction.step_s, plan.prediction.error) == (row.step_s, row.error)


def test_a_proposal_survives_its_text():
    made = Proposal(proposal_of(build("Mlp"), {"four": "BlockQuant(bits=4)"}, world_size=2), 0.1, 0.25)
    read = Proposal.from_text(made.to_text())
    assert read == made and read.finalists[0].prediction == made.finalists[0].prediction


def exchanged(fault):
    module, group, device = build("Mlp"), dist.distributed_c10d._get_default_group(), torch.device("cpu")
    parameters, rank = dict(module.named_parameters()), dist.get_rank()

    def propose():
        if fault == "proposal":
            raise ValueError("no plan")
        other = module if fault != "model" else build("Zoo")
        return Proposal(proposal_of(other, {"rank 0": "BlockQuant"}))

    def breaks(text):
        raise ValueError("cannot be read")

    def fitted(plan):
        plan.check(parameters.items(), 2)
        exact = [replace(unit, compressor=Identity(), program=ALLREDUCE, feedback=False) for unit in plan.units]
        left = {"one unit": 1, "no unit": len(exact)}.get(fault, 0)
        return plan.with_units((*exact[:left], *plan.units[left:]))

    broken = fault == "reading" and rank == 1
    with mock.patch.object(Proposal, "from_text", breaks if broken else Proposal.from_text):
        found = proposed(group, device, fitted, propose if rank == 0 else lambda: 1 / 0)
    alive = together(group, device, lambda: "alive")  # the ranks are still in step
    return (found.text if isinstance(found, Failure) else found.to_text()), alive


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("nothing", "rank 0"),
        ("proposal", "ValueError: no plan (rank 0)"),
        ("model", "plan does not fit the model"),
        ("reading", "cannot be read (rank 1)"),
    ],
)
def test_all_ranks_get_the_proposal_or_none(fault, expected):
    first, second = values_of(run_ranks(2, exchanged, fault))
    assert first == second and expected in first[0] and first[1] == "alive"


def test_plans_are_tried_as_they_will_run():
    """With a budget of memory they may compress less, or nothing."""
    (one, _), (none, _) = (values_of(run_ranks(2, exchanged, fault))[0] for fault in ("one unit", "no unit"))
    (plan,) = Proposal.from_text(one).finalists
    assert [unit.in_place for unit in plan.units][:2] == [True, False] and plan.prediction is None
    assert Proposal.from_text(none).finalists == ()
