"""Plans say which units are launched together, in which messages and on which channels, and not what contradicts
itself."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from gckernels import BlockQuant, Cast16, Identity, PowerSGD, sync
from gckernels.compressor import Compressor
from gckernels.sync import Frontend, Plan, PlanError, Prediction, UnitPlan
from gckernels.sync.plans.buckets import cut_buckets
from gckernels.sync.plans.grouping import MessageSpec, PlacedUnit, group_units
from gckernels.sync.plans.prediction import Source
from gckernels.sync.programs import (
    ALLGATHER,
    ALLREDUCE,
    ALLTOALL,
    ENCODED_ALLREDUCE,
    PARAMETER_SERVER,
    POWERSGD,
    Program,
)
from gckernels.sync.programs.named import REDUCE_SCATTER, SHARDS
from gckernels.sync.programs.spans import MEAN, SHARD

QUANT, EXACT = BlockQuant(), Identity()
SOURCE = Source("lab", "5f3c")
PREDICTION = Prediction(0.1, 0.2, "auto", False, 0.05, SOURCE, SOURCE, 0.13)


def unit(name: str, method: Compressor = QUANT, program: Program = ALLTOALL, **settings) -> UnitPlan:
    return UnitPlan(name, 100, method, program, False, **settings)


def shown(units: list[UnitPlan], channels: int = 1) -> list[tuple[tuple[str, ...], int]]:
    """The keys and the channel of every message of a bucket."""
    placed = [PlacedUnit(each, 100 * index) for index, each in enumerate(units)]
    found: tuple[MessageSpec, ...] = group_units(placed, channels)
    return [(message.keys, message.channel) for message in found]


# -------------------------------------------------------------------- launches


def test_launches_are_the_buckets_in_the_order_of_their_numbers():
    launches = {"a": 7, "b": 0, "c": 7, "d": 2}
    plan = Plan(tuple(unit(name, launch=number) for name, number in launches.items()))
    for max_nbytes in (1, 10**9):
        buckets = cut_buckets(plan, dict.fromkeys(launches, torch.float32), max_nbytes)
        assert [[each.plan.key for each in bucket.units] for bucket in buckets] == [["b"], ["d"], ["c", "a"]]
        assert [each.start for each in buckets[-1].units] == [0, 100]


def test_the_parts_of_a_parameter_lie_in_its_launch_in_order():
    parts = [unit("a", launch=1, start=start) for start in (100, 0, 200)]
    plan = Plan((*parts, unit("b", launch=0), unit("c", launch=1)))
    first, second = cut_buckets(plan, dict.fromkeys("abc", torch.bfloat16), 1)
    assert [each.plan.key for each in first.units] == ["b"]
    assert [each.plan.key for each in second.units] == ["c", "a[0:100]", "a[100:200]", "a[200:300]"]
    assert (second.numel, second.dtype) == (400, torch.bfloat16)


# -------------------------------------------------------------------- messages and channels


def test_units_share_a_message_if_the_plan_gives_them_the_same():
    units = [unit("a", message=1), unit("b", message=2), unit("c", message=1), unit("d"), unit("e")]
    assert shown(units) == [(("a", "c"), 0), (("b",), 0), (("d", "e"), 0)]


def test_a_message_has_one_program_root_and_dtype_of_added_payloads():
    roots = [unit(name, program=PARAMETER_SERVER, root=root, message=0) for name, root in (("a", 0), ("b", 1))]
    added = [unit("c", Cast16(), ENCODED_ALLREDUCE, message=0), unit("d", EXACT, ENCODED_ALLREDUCE, message=0)]
    assert [keys for keys, _ in shown([*roots, *added, unit("e", message=0)])] == [(name,) for name in "abcde"]


def test_parts_share_a_message_only_if_the_plan_says_so():
    parts = [unit("a", start=start) for start in (0, 100, 200)]
    assert len(shown(parts)) == 3
    together = [dataclasses.replace(part, message=4) for part in parts]
    assert shown(together) == [(("a[0:100]", "a[100:200]", "a[200:300]"), 0)]


def test_channels_are_those_of_the_plan_and_else_taken_in_turn():
    units = [unit("a"), unit("b", channel=0), unit("c", channel=2), unit("d", program=ALLGATHER)]
    assert shown(units, channels=3) == [(("a",), 0), (("b",), 0), (("c",), 2), (("d",), 0)]
    same = [unit("a", channel=1), unit("b", channel=1, message=0), unit("c", channel=1)]
    assert shown(same, channels=2) == [(("a", "c"), 1), (("b",), 1)]
    low_rank = [unit("a", PowerSGD(rank=2).fit((10, 10)), POWERSGD, channel=0)]
    assert shown([unit("b"), *low_rank], channels=2) == [(("b",), 0), (("a",), 0)]


def test_neighbours_in_place_are_averaged_in_the_messages_of_the_plan():
    dense = [
        unit(name, EXACT, ALLREDUCE, message=number) for name, number in zip("abcd", (None, None, 1, 1), strict=True)
    ]
    assert [keys for keys, _ in shown(dense)] == [("a", "b"), ("c", "d")]


# -------------------------------------------------------------------- plans that contradict themselves


@pytest.mark.parametrize(
    ("units", "text"),
    [
        ([unit("a", launch=0), unit("b")], "b: launch must be given for all units or for none; a has one"),
        (
            [unit("a", start=0, launch=0), unit("a", start=100, launch=1)],
            r"a\[100:200\]: launch must be 0, which a\[0:100\] has, got 1",
        ),
        (
            [unit("a", launch=0, message=3), unit("b", launch=1, message=3)],
            "b: launch must be 0, the launch of its message",
        ),
        ([unit("a", message=3, channel=1), unit("b", message=3)], "b: channel must be 1, the channel of its message 3"),
        ([unit("a", channel=2)], "a: channel must be less than channels, which is 2, got 2"),
        (
            [unit("a", EXACT, ALLREDUCE, channel=1)],
            "a: channel must be None or 0 for what no compressor encodes, got 1",
        ),
        ([unit("a", PowerSGD(rows=10), POWERSGD, channel=1)], "a: channel must be None or 0"),
    ],
)
def test_contradictions_are_named(units, text):
    with pytest.raises(PlanError, match=text):
        Plan(tuple(units), channels=2)


def test_everything_that_contradicts_itself_is_listed():
    with pytest.raises(PlanError) as caught:
        Plan((unit("a", channel=5), unit("b", channel=6), unit("c", launch=1)))
    assert [line.strip().partition(":")[0] for line in str(caught.value).splitlines()[1:]] == ["a", "a", "b"]


@pytest.mark.parametrize("field", ["launch", "message", "channel"])
@pytest.mark.parametrize("value", [-1, True, 1.0, "1"])
def test_numbers_of_a_unit_are_ints_from_0_up(field, value):
    with pytest.raises(PlanError, match=f"plan: a: {field} must be None or an int from 0"):
        unit("a", **{field: value})


def test_a_channel_is_less_than_the_largest_number_of_channels():
    with pytest.raises(PlanError, match="plan: a: channel must be None or an int from 0 to 63, got 64"):
        unit("a", channel=64)


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("frontend", "ddp", "frontend must be None or a Frontend, got 'ddp'"),
        ("start_step", -1, "start_step must be an int from 0 up, got -1"),
        ("start_step", True, "start_step must be an int from 0 up, got True"),
        ("prediction", {}, "prediction must be None or a Prediction"),
    ],
)
def test_settings_of_a_plan_are_checked(field, value, text):
    with pytest.raises(PlanError, match=text):
        Plan((), **{field: value})


def model(**dtypes: torch.dtype) -> list[tuple[str, nn.Parameter]]:
    """Parameters of 100 real numbers."""
    return [(name, nn.Parameter(torch.zeros(100 >> dtype.is_complex, dtype=dtype))) for name, dtype in dtypes.items()]


def test_a_launch_has_one_dtype():
    plan = Plan((unit("a", launch=0), unit("b", launch=1), unit("c", launch=0)))
    plan.check(model(a=torch.float32, b=torch.bfloat16, c=torch.float32), 2)
    plan.check(model(a=torch.float32, b=torch.bfloat16, c=torch.complex64), 2)  # in real numbers
    text = r"c: launch 0 has torch\.float32, of a, and the parameter is torch\.bfloat16"
    with pytest.raises(PlanError, match=text):
        plan.check(model(a=torch.float32, b=torch.float32, c=torch.bfloat16), 2)


# -------------------------------------------------------------------- changed plans


def test_plans_with_launches_are_for_the_module():
    plan = Plan((unit("a", launch=0, message=2), unit("b", launch=1)), channels=2, prediction=PREDICTION)
    with pytest.raises(PlanError, match=r"frontend must be None or Frontend\.MODULE"):
        dataclasses.replace(plan, frontend=Frontend.DDP)
    hooked = plan.for_frontend(Frontend.DDP)
    assert (hooked.frontend, hooked.has_launches, hooked.prediction) == (Frontend.DDP, False, None)
    assert [each.message for each in hooked.units] == [2, None]
    back = hooked.for_frontend(Frontend.MODULE)
    assert (back.units, back.frontend) == (hooked.units, Frontend.MODULE)
    assert plan.for_frontend(None) is plan


def test_a_plan_for_another_end_of_the_mean_has_other_programs():
    exact = dataclasses.replace(unit("b", launch=1), compressor=Identity(), program=ALLREDUCE)
    plan = Plan((unit("a", launch=0, message=2), exact), channels=2, prediction=PREDICTION)
    sharded = plan.for_frontend(Frontend.FSDP)
    assert [each.program for each in sharded.units] == [SHARDS, REDUCE_SCATTER]
    assert (sharded.span, sharded.has_launches, sharded.prediction) == (SHARD, False, None)
    back = sharded.for_frontend(Frontend.HSDP)
    assert [each.program for each in back.units] == [ALLTOALL, ALLREDUCE]
    assert back.span == MEAN


def test_a_changed_plan_has_no_prediction():
    named = [("a", nn.Parameter(torch.zeros(64, 64))), ("b", nn.Parameter(torch.zeros(4)))]
    made = sync.uniform_plan(named, QUANT, program=PARAMETER_SERVER, world_size=2)
    plan = dataclasses.replace(made, prediction=PREDICTION)
    unchanged = (plan.parted(4096), plan.spread_roots(2), plan.fitted(named)[0], plan.with_units(plan.units))
    assert [each.prediction for each in unchanged] == [PREDICTION] * 4
    changed = (plan.parted(1000), plan.spread_roots(1), plan.fitted(named[:1])[0])
    assert [each.prediction for each in changed] == [None] * 3


def test_parts_keep_their_launch_and_are_messages_by_themselves():
    plan = Plan((unit("a", launch=3, message=1, channel=1), unit("b", launch=3)), channels=2).parted(50)
    assert {(each.launch, each.message, each.channel) for each in plan.units} == {(3, None, None)}
    assert [channel for _, channel in shown(list(plan.units), channels=2)] == [0, 1, 0, 1, 0, 1]


def test_what_a_plan_with_launches_lacks_is_launched_last():
    plan = Plan((unit("a", launch=0), unit("b", launch=4)))
    parameters = model(a=torch.float32, b=torch.float32, c=torch.bfloat16, d=torch.float32, e=torch.bfloat16)
    fitted, changes = plan.fitted(parameters)
    fitted.check(parameters, 2)
    assert {each.parameter: each.launch for each in fitted.units} == {"a": 0, "b": 4, "c": 5, "d": 6, "e": 5}
    assert changes == [f"{name}: averaged exactly" for name in "cde"]
