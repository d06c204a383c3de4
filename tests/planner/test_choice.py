"""A choice has the plan of the policy that was asked for, what it promises, and all others beside it."""

from __future__ import annotations

import pytest

from gckernels.planner.choice import COMPARED, STARTS, choose
from gckernels.planner.drafts.problem import ProblemError
from gckernels.sync.plans.plan import Frontend, Plan
from planning import random_problem


def test_a_choice_has_the_prediction_of_its_plan_and_a_row_of_every_policy():
    problem = random_problem(8, Frontend.MODULE)
    choice = choose(problem)
    prediction = choice.plan.prediction
    assert prediction is not None and prediction.policy == "auto" and prediction.estimated
    assert prediction.step_s == choice.timeline.step_s == choice.row.step_s == problem.step_s(choice.plan)
    assert prediction.none_s == choice.none.step_s
    assert {row.policy for row in choice.rows} == {*COMPARED, "auto"}
    assert min(row.step_s for row in choice.rows) == choice.row.step_s
    assert choice.pays == (choice.row.step_s < choice.none.step_s)
    assert Plan.from_json(choice.plan.to_json()).prediction == prediction


def test_auto_takes_a_faster_plan_of_a_policy_from_which_it_does_not_start(monkeypatch):
    monkeypatch.setattr("gckernels.planner.auto._searched", lambda problem, starts: [])
    problem = random_problem(3, Frontend.MODULE)
    best = min((row for row in choose(problem, "none").rows), key=lambda row: row.step_s)
    assert best.policy not in STARTS and choose(problem).row.step_s == best.step_s


def test_a_compressor_can_be_named():
    problem = random_problem(9, Frontend.DDP)
    spec = str(problem.compressors[0])
    choice = choose(problem, f"all:{spec}", compared=())
    assert {str(unit.compressor) for unit in choice.plan.units} <= {spec, "Identity()"}
    assert [row.policy for row in choice.rows] == ["none", f"all:{spec}"]


def test_a_compressor_that_nothing_may_use_is_refused():
    problem = random_problem(9, Frontend.DDP)
    with pytest.raises(ProblemError, match=r"no tensor may use SignSGD\(.*\), so there is nothing to compress"):
        choose(problem, "all:SignSGD", compared=())
    assert "all:SignSGD" not in {row.policy for row in choose(problem, "none", ["all:SignSGD"]).rows}


@pytest.mark.parametrize("policy", ["fastest", "all:Nothing", "all:EFSignSGD(size=1)"])
def test_an_unknown_policy_is_refused(policy):
    with pytest.raises(ProblemError, match=r"auto|unknown"):
        choose(random_problem(11, Frontend.DDP), policy)
