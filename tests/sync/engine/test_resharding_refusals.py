"""States that do not fit each other, or the plan of a job, are refused before their residuals are resharded."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch

from gckernels import DGC, BlockQuant, EFSignSGD
from gckernels.sync import Plan, Topology
from gckernels.sync.programs import ALLGATHER, ALLREDUCE, ALLTOALL, PARAMETER_SERVER
from gckernels.sync.states.jobs import read_job
from gckernels.sync.states.parts import ModelPart, read_states
from gckernels.sync.states.resharding import reshard
from resharded_jobs import NUMELS, plan_of, saved


def damaged(change: str, states: list[dict[str, Any]]) -> Any:
    first, second, third = states
    match change:
        case "none":
            return []
        case "one is no dict":
            return [first, None, third]
        case "one is missing":
            return [third, first]
        case "one is there twice":
            return [first, second, second]
        case "one too many":
            return [*states, dict(third)]
        case "a rank that there is not":
            return [first, second, third | {"rank": 3}]
        case "a rank that is no number":
            return [first, second, third | {"rank": True}]
        case "two steps":
            return [first, second, third | {"step": 5}]
        case "two sizes":
            return [first, second, third | {"world_size": 4}]
        case "two plans":
            return [first, second, third | {"plan": plan_of(ALLGATHER, EFSignSGD()).to_json()}]
        case "two topologies":
            there = plan_of(ALLTOALL, EFSignSGD(), topology=Topology(1, 3)).to_json()
            return [first, second, third | {"plan": there}]
        case "a topology of another size":
            there = plan_of(ALLTOALL, EFSignSGD(), topology=Topology(2, 2)).to_json()
            return [state | {"plan": there} for state in states]
        case "a plan that is none":
            return [state | {"plan": {"format": "a letter"}} for state in states]
        case "a program that does not work":
            there = json.loads(json.dumps(first["plan"]))
            there["units"][2]["program"].pop()
            return [state | {"plan": there} for state in states]
        case "a root that there is not":
            there = plan_of(PARAMETER_SERVER, EFSignSGD(), root=3).to_json()
            return [state | {"plan": there} for state in states]
        case "a size":
            shard = second["feedback"]["shard"] | {"w100": torch.zeros(33)}
            return [first, second | {"feedback": second["feedback"] | {"shard": shard}}, third]
        case "one has lost something":
            return [first, third, second | {"feedback": third["feedback"] | {"shard": {}}}]
        case "one is not finite":
            third["feedback"]["shard"]["w257"][0] = -torch.inf
            return states
        case "a dtype":
            worker = second["feedback"]["worker"] | {"w100": torch.zeros(100).double()}
            return [first, second | {"feedback": second["feedback"] | {"worker": worker}}, third]
        case _:
            return [first, second, {key: third[key] for key in third if key != change}]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("none", "the list is empty"),
        ("one is no dict", r"states\[1\]: state: expected a dict, got NoneType"),
        ("one is missing", "the state of rank 1 of 3 is missing"),
        ("one is there twice", "two states of rank 1"),
        ("one too many", "two states of rank 2"),
        ("a rank that there is not", r"states\[2\]: state: rank must be less than world_size 3, got 3"),
        ("a rank that is no number", r"states\[2\]: state: rank must be an int"),
        ("two steps", "ranks 0 and 2 differ in step: 4 and 5"),
        ("two sizes", "ranks 0 and 2 differ in world_size: 3 and 4"),
        ("two plans", "ranks 0 and 2 differ in plan"),
        ("two topologies", "ranks 0 and 2 differ in plan"),
        ("a topology of another size", r"the plan is for Topology\(machines=2, devices=2\), but the job had 3 ranks"),
        ("a plan that is none", "record must be an object with format, version"),
        ("a program that does not work", "w5: program .*: does not end"),
        ("a root that there is not", "root is 3, but the job had 3 ranks"),
        ("one has lost something", "rank 1: feedback: the shard residual of w100 is missing"),
        ("one is not finite", "rank 2: feedback: the shard residual of w257 holds inf or NaN"),
        ("a size", "rank 1: feedback: the shard residual of w100 has 33 elements, need 48"),
        ("a dtype", "rank 1: feedback: the worker residual of w100 must be a float32 vector"),
        ("plan", r"states\[2\]: state: plan missing"),
        ("feedback", r"states\[2\]: state: feedback missing"),
    ],
)
def test_a_damaged_list_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        read_job(damaged(change, saved(plan_of(ALLTOALL, EFSignSGD()), 3)))


def _of_parts(change: Any) -> list[Any]:
    """The states of two jobs of two ranks, which have a part each; the last state is changed."""
    states: list[Any] = [
        state | {"part": [index, 2]}
        for index in range(2)
        for state in saved(plan_of(ALLTOALL, EFSignSGD(), (5 - index, 100)), 2)
    ]
    last = states.pop()
    if not callable(change):
        return [*states, last | {"part": change}]
    changed = change(last)
    return states if changed is None else [*states, changed]


@pytest.mark.parametrize("part", [None, ModelPart(0, 2, None)], ids=["whole", "part"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (5, r"states\[3\]: part must be two ints, a number and the count of parts, .*, got 5"),
        ("12", r"states\[3\]: part must be"),
        ([1], r"states\[3\]: part must be"),
        ([1, 2, 3], r"states\[3\]: part must be"),
        ([2, 2], r"states\[3\]: part must be"),
        ([-1, 2], r"states\[3\]: part must be"),
        ([True, 2], r"states\[3\]: part must be"),
        ([1.0, 2], r"states\[3\]: part must be"),
        ([torch.zeros(1), 2], r"states\[3\]: part must be"),
        (None, r"states\[3\]: part must be"),
        ([1, 3], r"states\[0\] and states\[3\] differ in the count of parts: 2 and 3"),
        (lambda state: {key: state[key] for key in state if key != "part"}, "differ in the count of parts: 2 and 1"),
        (lambda state: None, "part 1 of 2: .*the state of rank 1 of 2 is missing"),
        (lambda state: 3, r"states\[3\]: expected a dict, got int"),
        (lambda state: state | {"step": 5}, "part 1 of 2: .*differ in step: 4 and 5"),
    ],
)
def test_a_damaged_list_of_parts_is_refused(change, message, part):
    with pytest.raises(ValueError, match=message):
        read_states(_of_parts(change), plan_of(ALLTOALL, EFSignSGD(), (5, 100)), part)


def test_parts_that_do_not_fit_each_other_are_refused():
    plan = plan_of(ALLTOALL, EFSignSGD(), (5, 100))
    (first,) = saved(plan, 1)
    (second,) = saved(plan_of(ALLTOALL, EFSignSGD(), (5,)), 1)
    for states, message in (
        ([first | {"part": [0, 2]}], "the states of part 1 of 2 are missing"),
        ([first | {"part": [0, 2]}, first | {"part": [1, 2], "step": 5}], "the parts are not of one step"),
        ([first | {"part": [0, 2]}, second | {"part": [1, 2]}], "parts 0 and 1 differ in units"),
    ):
        with pytest.raises(ValueError, match=message):
            read_states(states, plan, None)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (plan_of(ALLTOALL, EFSignSGD(), (0, 1, 5, 100)), "w257 is a unit of the saved plan only"),
        (plan_of(ALLTOALL, EFSignSGD(), (*NUMELS, 6)), "w6 is a unit of the current plan only"),
        (
            plan_of(ALLTOALL, BlockQuant()),
            "w0: compressor in the saved plan: EFSignSGD, in the current one: Block",
        ),
        (plan_of(ALLREDUCE, EFSignSGD()), "the current plan has no residual that could take the saved ones"),
    ],
)
def test_another_plan_is_refused(plan, message):
    states = saved(plan_of(ALLTOALL, EFSignSGD()), 3)
    with pytest.raises(ValueError, match=message):
        reshard(read_job(states), plan, Topology(2), 0)


@pytest.mark.parametrize(
    ("change", "message"), [({"numel": 6}, "elements in"), ({"feedback": False}, "feedback in"), (None, "states in")]
)
def test_another_unit_is_refused(change, message):
    old = plan_of(ALLGATHER, DGC(), (5,))
    other = {"compressor": DGC(momentum=0.0)} if change is None else change
    new = Plan((dataclasses.replace(old.units[0], **other),))
    with pytest.raises(ValueError, match=f"w5: {message} the saved plan"):
        reshard(read_job(saved(old, 3)), new, Topology(2), 0)
