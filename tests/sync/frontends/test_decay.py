"""Residuals decay as the units of a plan say: what is forgotten is the rest of each, and nothing else is lost."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from conservation import Training
from gckernels import BlockQuant, EFSignSGD, PowerSGD, sync
from gckernels.sync.plans.plan import Plan
from ranks import run_ranks, values_of
from workloads import mass_of

WEIGHT = [("weight", torch.nn.Parameter(torch.ones(8, 8)))]
PARTS = (0.5, 1, 0.1)
"""The parts of the residuals of units that are kept, in turns."""


def decaying(plan: Plan) -> Plan:
    return plan.with_units(unit.decaying(PARTS[number % 3]) for number, unit in enumerate(plan.units))


def conserved(front: str) -> None:
    training = Training(front)
    for compressor, program in ((EFSignSGD(), "allgather"), (BlockQuant(bits=4), "alltoall"), (PowerSGD(), None)):
        exempt = None if compressor.name == "PowerSGD" else lambda name, parameter: False
        plan = decaying(sync.uniform_plan(training.module, compressor, program=program, exempt=exempt))
        assert {unit.feedback for unit in plan.units} - {0} == set(PARTS)
        training.handle.change_plan(plan)
        decayed = 0
        for _ in range(5):
            for unit in training.handle.plan.units if not training.handle.is_changing else ():
                forgotten = (1 - unit.feedback) * mass_of(training.handle)[unit.key][-1]
                training.given[unit.parameter] -= forgotten
                decayed += bool(forgotten.any())
            training.train(1)
            training.check()
        assert training.handle.plan == plan and decayed


@pytest.mark.parametrize("front", ["ddp", pytest.param("module", marks=pytest.mark.slow)])
def test_a_unit_forgets_the_rest_of_its_residual_in_each_step(front):
    values_of(run_ranks(2, conserved, front))


@pytest.mark.parametrize("feedback", [-0.1, 1.5, float("nan"), "1", None])
def test_feedback_is_a_number_from_0_to_1(feedback):
    (unit,) = sync.uniform_plan(WEIGHT, EFSignSGD(), world_size=2).units
    with pytest.raises(sync.PlanError, match="weight: feedback must be a number from 0 to 1, got"):
        replace(unit, feedback=feedback)


@pytest.mark.parametrize("feedback", [0, 0.5, 1])
def test_a_file_has_the_feedback_of_units(feedback):
    plan = sync.uniform_plan(WEIGHT, EFSignSGD(), world_size=2)
    changed = plan.with_units(unit.decaying(feedback) for unit in plan.units)
    record = changed.to_json()
    assert sync.Plan.from_json(record) == changed
    (unit,) = record["units"]
    assert unit["feedback"] == feedback and isinstance(unit["feedback"], float if feedback == 0.5 else bool)
    unit["feedback"] = 1.5
    with pytest.raises(sync.PlanError, match=r"units\[0\].feedback must be a finite number from 0 up and at most 1"):
        sync.Plan.from_json(record)
