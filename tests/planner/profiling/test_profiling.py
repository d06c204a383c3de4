"""Measured profiles on real ranks: all ranks get the same, within a budget that rank 0 decides."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

import gckernels
from gckernels.planner import profile
from gckernels.planner.commands.profile import summary
from gckernels.planner.machines.files import profile_from_json
from gckernels.planner.profiling import parts as profile_parts
from gckernels.planner.profiling.measure import _methods, measure_profile
from gckernels.planner.profiling.measurements.codecs import Case, cases_of
from gckernels.planner.profiling.measurements.collectives import levels_of, wire_nbytes
from gckernels.planner.profiling.measurements.memory import Arena, gradients
from gckernels.planner.profiling.measurements.session import KI, MeasurementExtent
from gckernels.sync import Topology
from gckernels.sync.accuracy.accuracy import candidates_by_default
from gckernels.sync.programs import AllGather, AllReduce, AllToAll, Hop, Level
from gckernels.sync.programs.stages import StageKind
from ranks import run_ranks, values_of

CPU = torch.device("cpu")
SMALL = MeasurementExtent(
    largest_nbytes=16 * KI,
    trains=1,
    rounds=1,
    elements=(4 * KI, 8 * KI, 16 * KI),
    many=((4, 16 * KI),),
    far_caches=1 / 32,
)
METHODS = ("EFSignSGD", "PowerSGD(rank=1)", "Identity")
EFSIGN, IDENTITY = str(gckernels.EFSignSGD()), "encode and decode of Identity()"


def measured(world_size: int, machines: int, seconds: float, tick_s: float) -> tuple[str, list[str]]:
    """A profile as JSON, and the parts that were measured, on a clock that advances with every look at it."""
    parts: list[str] = []
    now_s = 0.0

    def clock() -> float:
        nonlocal now_s
        now_s += tick_s
        return now_s

    found = measure_profile(
        dist.group.WORLD,
        CPU,
        Topology(machines, world_size // machines),
        [gckernels.from_spec(spec) for spec in METHODS],
        seconds,
        SMALL,
        lambda share, name: parts.append(name),
        clock,
    )
    return json.dumps(found.to_json()), parts


def test_all_ranks_get_the_same_profile_of_everything():
    (text, parts), *others = values_of(run_ranks(2, measured, 2, 2, 1e6, 0.0))
    assert all(other == (text, parts) for other in others)
    found = profile_from_json(json.loads(text))
    assert {each.step for each in found.collectives} == {
        "AllReduce",
        "AllGather",
        "AllToAll",
        "Hop",
        "ReduceScatter",
        "Broadcast",
        "Gather",
        "Reduce",
    }
    works = {(each.compressor.name, each.work) for each in found.codecs}
    assert works == {
        ("EFSignSGD", StageKind.ENCODE),
        ("EFSignSGD", StageKind.DECODE),
        ("EFSignSGD", StageKind.RECODE),
        ("PowerSGD", StageKind.PROJECT),
        ("PowerSGD", StageKind.RECONSTRUCT),
        ("EFSignSGD", StageKind.ADD),
        ("Identity", StageKind.ENCODE),
        ("Identity", StageKind.DECODE),
        ("Identity", StageKind.ADD),
    }
    assert not [each for each in found.left_out if "no time" in each]
    assert found.sharing.keys() == {Level.FLAT}
    assert found.taken.keys() <= {"collective", "exchange"}  # on a loaded machine rounds disagree
    assert max(vars(found.overheads).values()) > 0  # other processes can hide some of them
    assert 0 < found.memory_nbytes < 2**50  # ranks of one host share its memory
    assert found.topology == Topology(2) and len(found.stamp.hosts) == 2
    assert "AllGather flat" in summary(found)


def measured_with_one_usual() -> tuple[str, list[str]]:
    with mock.patch.object(profile_parts, "_USUAL", 2):
        return measured(2, 2, 1e6, 0.0)


def test_further_compressors_are_measured_behind_everything_that_most_plans_need():
    (text, parts), other = values_of(run_ranks(2, measured_with_one_usual))
    assert (text, parts) == other
    first = [part for part in parts if not part.endswith("at another moment")]
    assert first.index(IDENTITY) == 4  # behind overheads, averages, gathering and copies
    assert [part.partition(" of ")[0] for part in first[-3:]] == ["project and reconstruct", "add", "add"]
    works = {(each.compressor.name, each.work) for each in profile_from_json(json.loads(text)).codecs}
    assert ("PowerSGD", StageKind.PROJECT) in works and ("Identity", StageKind.DECODE) in works


def test_by_default_all_compressors_are_measured_that_plans_may_use_by_default():
    assert set(_methods(None)) == {gckernels.Identity(), *candidates_by_default()}


@pytest.mark.slow
def test_levels_of_machines_are_measured():
    (text, _), *_ = values_of(run_ranks(4, measured, 4, 2, 1e6, 0.0))
    found = profile_from_json(json.loads(text))
    assert {each.level for each in found.collectives} == set(Level)
    assert found.sharing.keys() == set(Level)


def test_a_spent_budget_ends_all_ranks_and_tells_what_is_missing():
    """Rank 0 looks at its clock once for each decision; here that takes a third of the budget."""
    outcomes = values_of(run_ranks(2, measured, 2, 2, 3.0, 1.0))
    (text, parts), (other_text, other_parts) = outcomes
    assert (text, parts) == (other_text, other_parts)
    found = profile_from_json(json.loads(text))
    needed = ["overheads of the engine", "AllReduce flat", "AllGather flat", "copies, cores", IDENTITY]
    others = [part for part in parts if "PowerSGD" not in part and "another moment" not in part]
    assert others == [*needed, f"encode and decode of {EFSIGN}"]
    assert "AllToAll flat: no time" in found.left_out
    assert {each.step for each in found.collectives} == {"AllReduce", "AllGather"} and len(found.copies) == 1
    assert {each.compressor.name for each in found.codecs} == {"Identity", "EFSignSGD", "PowerSGD"}


def refused() -> list[str]:
    messages = []
    rank = dist.get_rank()
    calls: list[dict[str, Any]] = [
        {"seconds": 0.5},
        {"seconds": float("nan")},
        {"compressors": ["Gone"]},
        {"topology": (3, 1)},
        {"seconds": 2.0 + rank},
    ]
    for arguments in calls:
        with pytest.raises((TypeError, ValueError, RuntimeError)) as caught:
            profile(**arguments)
        messages.append(str(caught.value))
    return messages


def test_wrong_arguments_are_refused_by_all_ranks():
    for messages in values_of(run_ranks(2, refused)):
        expected = (
            "seconds must be a number from 1 up",
            "seconds must be",
            "Gone",
            "topology is for 3",
            "same settings",
        )
        assert all(part in message for part, message in zip(expected, messages, strict=True)), messages


def test_profiles_need_a_process_group():
    with pytest.raises(RuntimeError, match="init_process_group"):
        profile()


# -------------------------------------------------------------------- parts


def test_bytes_on_the_wire_are_those_of_programs():
    ranks = Topology(4)
    assert wire_nbytes(AllReduce(), 4096, ranks) == 2 * 3 / 4 * 4096
    assert wire_nbytes(AllGather(), 4096, ranks) == 3 * 4096
    assert wire_nbytes(AllToAll(), 4096, ranks) == 3 / 4 * 4096
    assert wire_nbytes(Hop(), 4096, ranks) == 4096


def test_flat_topologies_have_one_level():
    assert levels_of(Topology(4)) == levels_of(Topology(1, 4)) == (Level.FLAT,)
    assert set(levels_of(Topology(2, 2))) == set(Level)


def test_cases_have_whole_matrices():
    for case in (Case(1, 4096), Case(16, 1 << 20), Case(128, 1 << 20, stretch=64), Case(3, 10_000)):
        rows, columns = case.shape
        assert rows * columns == case.numel and case.units * case.numel <= case.elements


@pytest.mark.parametrize("world_size", [2, 3, 4, 16])
def test_recodings_merge_several_payloads(world_size):
    """A program recodes what several ranks have sent. Two numbers of payloads tell the price of each."""
    session: Any = SimpleNamespace(extent=MeasurementExtent(), topology=Topology(world_size))
    sources = {case.sources for case in cases_of(session, StageKind.RECODE)}
    assert len(sources) == 2 and world_size in sources and min(sources) > 1


def test_gradients_have_heavy_tails_and_scales():
    values = gradients(1 << 18, CPU)
    spread = values.view(-1, 1 << 14).abs().mean(dim=1)
    assert spread.max() > 4 * spread.min()
    inside = values[: 1 << 14]
    assert (inside.pow(4).mean() / inside.pow(2).mean().pow(2)).item() > 6.0  # 3 of a normal distribution
    assert torch.equal(values, gradients(1 << 18, CPU))


def test_buffers_are_far_from_each_other():
    arena = Arena(CPU, 1 << 12, 1 << 16)
    starts = arena.starts(1 << 10, 4)
    assert len(starts) == 4 and min(np.diff(starts)) >= 1 << 10
    assert starts[-1] + (1 << 10) <= arena.numel
    assert arena.starts(arena.numel, 4) == [0]
