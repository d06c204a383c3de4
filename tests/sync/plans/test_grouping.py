"""Grouping decides which units share a bucket, and which share a message."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from gckernels import BlockQuant, Cast16, Identity, PowerSGD
from gckernels.compressor import Compressor
from gckernels.sync import Plan, Topology, UnitPlan
from gckernels.sync.plans.buckets import cut_buckets
from gckernels.sync.plans.grouping import MessageSpec, PlacedUnit, group_units, message_kind, whole_bucket
from gckernels.sync.programs import (
    ALLGATHER,
    ALLREDUCE,
    ALLTOALL,
    ENCODED_ALLREDUCE,
    PARAMETER_SERVER,
    POWERSGD,
    Program,
)
from gckernels.sync.programs.stages import MessageKind

QUANT, EXACT, LOW_RANK = BlockQuant(), Identity(), PowerSGD(rank=2).fit((10, 10))


def unit(name: str, method: Compressor, program: Program, **settings) -> UnitPlan:
    return UnitPlan(name, 100, method, program, False, **settings)


def placed(*units: UnitPlan) -> list[PlacedUnit]:
    """Units placed one after the other."""
    return [PlacedUnit(each, 100 * index) for index, each in enumerate(units)]


def shown(messages: tuple[MessageSpec, ...]) -> list[tuple[MessageKind, tuple[str, ...], int]]:
    return [(message.kind, message.keys, message.channel) for message in messages]


IN_PLACE, ENCODED, FACTORS = MessageKind.IN_PLACE, MessageKind.ENCODED, MessageKind.LOW_RANK


def test_units_of_one_program_and_root_travel_together():
    units = placed(
        unit("a", QUANT, ALLTOALL),
        unit("b", EXACT, ALLTOALL),
        unit("c", QUANT, ALLGATHER),
        unit("d", QUANT, PARAMETER_SERVER, root=1),
        unit("e", QUANT, PARAMETER_SERVER, root=2),
        unit("f", QUANT, ALLTOALL),
    )
    assert shown(group_units(units)) == [
        *((ENCODED, ("a", "b", "f"), 0), (ENCODED, ("c",), 0), (ENCODED, ("d",), 0), (ENCODED, ("e",), 0))
    ]
    assert [channel for *_, channel in shown(group_units(units, channels=3))] == [0, 1, 2, 0]


def test_payloads_that_are_added_have_one_dtype():
    half, single = unit("a", Cast16(), ENCODED_ALLREDUCE), unit("b", EXACT, ENCODED_ALLREDUCE)
    assert shown(group_units(placed(half, single))) == [(ENCODED, ("a",), 0), (ENCODED, ("b",), 0)]
    gathered = placed(*(dataclasses.replace(each, program=ALLGATHER) for each in (half, single)))
    assert shown(group_units(gathered)) == [(ENCODED, ("a", "b"), 0)]


def test_parts_of_a_parameter_are_messages_by_themselves():
    units = placed(*(unit("a", QUANT, ALLTOALL, start=start) for start in (0, 100, 200)))
    assert shown(group_units(units, channels=2)) == [
        *((ENCODED, ("a[0:100]",), 0), (ENCODED, ("a[100:200]",), 1), (ENCODED, ("a[200:300]",), 0))
    ]


def test_neighbours_that_are_averaged_in_place_are_one_stretch():
    units = placed(
        unit("a", EXACT, ALLREDUCE),
        unit("b", EXACT, ALLREDUCE),
        unit("c", QUANT, ALLTOALL),
        unit("d", EXACT, ALLREDUCE),
    )
    units.append(PlacedUnit(UnitPlan("e", 0, EXACT, ALLREDUCE, False), 400))
    first, second, encoded = group_units(units[::-1], channels=2)
    assert (first.kind, first.keys, first.start, first.stop) == (IN_PLACE, ("a", "b"), 0, 200)
    assert (second.kind, second.keys, second.start, second.stop) == (IN_PLACE, ("d",), 300, 400)
    assert (encoded.kind, encoded.keys, encoded.channel) == (ENCODED, ("c",), 0)
    everything = whole_bucket(units, 400)
    assert (everything.kind, len(everything.units), everything.stop) == (IN_PLACE, 5, 400)


@pytest.mark.parametrize(
    ("units", "kind"),
    [
        ([unit("a", QUANT, ALLTOALL)], ENCODED),
        ([unit("a", EXACT, ALLREDUCE)], IN_PLACE),
        ([unit("a", LOW_RANK, POWERSGD)], FACTORS),
        ([unit("a", EXACT, POWERSGD)], FACTORS),
        ([unit("a", EXACT, ENCODED_ALLREDUCE)], ENCODED),
        ([unit("a", EXACT, ENCODED_ALLREDUCE), unit("b", PowerSGD(one_sided=True), ENCODED_ALLREDUCE)], FACTORS),
    ],
)
def test_kinds_of_messages(units, kind):
    assert message_kind(units) == kind


def test_a_message_knows_its_stages():
    (message,) = group_units(placed(unit("a", QUANT, ALLTOALL)))
    assert [spec.name for spec in message.stages(Topology(4))] == [
        "Encode",
        "AllToAll",
        "Recode",
        "AllGather",
        "Decode",
    ]
    (message,) = group_units(placed(unit("a", LOW_RANK, POWERSGD), unit("b", EXACT, POWERSGD)), channels=2)
    assert (message.kind, message.channel, len(message.stages(Topology(4)))) == (FACTORS, 0, 5)


# -------------------------------------------------------------------- buckets


def test_buckets_are_filled_from_the_last_unit_to_the_first():
    plan = Plan(tuple(unit(name, QUANT, ALLTOALL) for name in "abcde"))
    buckets = cut_buckets(plan, dict.fromkeys("abcde", torch.float32), 800)
    assert [[each.plan.key for each in bucket.units] for bucket in buckets] == [["e", "d"], ["c", "b"], ["a"]]
    assert [[each.start for each in bucket.units] for bucket in buckets] == [[0, 100], [0, 100], [0]]
    assert [bucket.numel for bucket in buckets] == [200, 200, 100]


def test_parts_and_dtypes_decide_buckets():
    parts = [unit("a", QUANT, ALLTOALL, start=start) for start in (100, 0)]
    plan = Plan((*parts, unit("b", QUANT, ALLTOALL), unit("c", QUANT, ALLTOALL), unit("d", QUANT, ALLTOALL)))
    dtypes = {"a": torch.float32, "b": torch.complex64, "c": torch.bfloat16, "d": torch.bfloat16}
    buckets = cut_buckets(plan, dtypes, 400)
    keys = [[each.plan.key for each in bucket.units] for bucket in buckets]
    assert keys == [["d", "c"], ["b"], ["a[0:100]", "a[100:200]"]]
    assert [bucket.dtype for bucket in buckets] == [torch.bfloat16, torch.float32, torch.float32]
    assert [len(bucket.groups) for bucket in buckets] == [2, 1, 1]
