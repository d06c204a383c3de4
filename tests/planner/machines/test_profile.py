"""Profiles: prices from measured curves, notes on what was not measured, refusals, and their format."""

from __future__ import annotations

import copy
import dataclasses
import json
from typing import Any

import numpy as np
import pytest
import torch

import gckernels
from gckernels.planner.machines.curves import CodecModel, Coefficients, CollectiveCurve, CopyCurve, Curve
from gckernels.planner.machines.files import profile_from_json
from gckernels.planner.machines.machine import MachineError, Overheads, Shared
from gckernels.planner.machines.profile import MIN_MARGIN, Profile, Stamp
from gckernels.planner.timeline.pricing import Pricer, Units
from gckernels.sync import Topology
from gckernels.sync.programs import ALLGATHER, POWERSGD, Level, Place
from gckernels.sync.programs.stages import MessageKind, StageKind

GATHER = Curve((1e3, 1e5, 1e7), (1e-4, 3e-4, 2e-2), (5e-5, 1e-4, 4e-3), error=0.03)
PER_ELEMENT = Coefficients(
    1e-5, 2e-6, 1e-9, far_element_s=5e-10, source_unit_s=1e-6, source_element_s=2e-9, side_s=1e-8, knee=1e6
)
STEPS = ("AllReduce", "AllGather", "AllToAll")
STAMP = Stamp(("a", "b"), "cpu", "gloo", "2.11", "0.1", "2026-01-01T00:00:00", 60.0)


def model(spec: str, work: StageKind, error: float | None = 0.05) -> CodecModel:
    return CodecModel(gckernels.from_spec(spec), work, Place.DEVICE, PER_ELEMENT, 0.9, 128, 1 << 24, 2, error)


PROFILE = Profile(
    name="two ranks",
    topology=Topology(2),
    computes_on=Shared.CORES,
    cores=1.0,
    overheads=Overheads(1e-5, 2e-6, 2e-5, 5e-6),
    collectives=(
        CollectiveCurve("AllGather", Level.FLAT, Place.DEVICE, GATHER),
        CollectiveCurve("AllReduce", Level.FLAT, Place.DEVICE, dataclasses.replace(GATHER, error=0.25)),
    ),
    codecs=(
        model("EFSignSGD", StageKind.ENCODE),
        model("EFSignSGD", StageKind.DECODE, error=None),
        model("PowerSGD(rank=2)", StageKind.PROJECT),
        model("PowerSGD(rank=2)", StageKind.RECONSTRUCT),
        model("Identity", StageKind.ENCODE),
        model("Identity", StageKind.DECODE),
    ),
    copies=(CopyCurve(Shared.CORES, Curve((1e3, 1e6), (1e-6, 1e-4), (1e-6, 1e-4))),),
    sharing={Level.FLAT: 0.8},
    taken={"collective": 1.5, "exchange": 1.5},
    left_out=("Hop flat: time",),
    stamp=STAMP,
)


def priced(nbytes: float, profile: Profile = PROFILE, level: Level = Level.FLAT) -> tuple[float, dict[Shared, float]]:
    price = profile.collective("AllGather", level, Place.DEVICE, np.array([nbytes]))
    return float(price.alone_s[0]), {key: float(value[0]) for key, value in price.work_s.items()}


def codec_s(work: StageKind, spec: str, units: float, elements: float, sources: int = 1) -> float:
    method = gckernels.from_spec(spec)
    price = PROFILE.codec(work, method, Place.DEVICE, np.array([units]), np.array([elements]), sources)
    return float(price.alone_s[0])


# -------------------------------------------------------------------- collectives


def test_curves_are_exact_at_their_points_and_never_fall():
    sizes = np.linspace(1, 3e7, 2000)
    assert np.array_equal(GATHER.wall(np.array(GATHER.nbytes)), GATHER.wall_s)
    assert np.array_equal(GATHER.cores(np.array(GATHER.nbytes)), GATHER.cores_s)
    assert (np.diff(GATHER.wall(sizes)) >= 0).all()
    assert GATHER.wall(np.array([50.5e3]))[0] == pytest.approx(2e-4)  # halfway between two points


def test_small_collectives_take_the_latency_and_none_take_nothing():
    assert GATHER.wall(np.array([0.0, 1.0, 1e3])).tolist() == [0.0, 1e-4, 1e-4]


def test_large_collectives_go_on_with_the_last_slope():
    slope = (2e-2 - 3e-4) / (1e7 - 1e5)
    assert GATHER.wall(np.array([3e7]))[0] == pytest.approx(2e-2 + 2e7 * slope)
    alone = Curve((4e6,), (1e-2,), (0.0,))
    assert alone.wall(np.array([8e6]))[0] == pytest.approx(2e-2)  # one point tells no latency


@pytest.mark.parametrize("disturbed", [2, 4, 5])
def test_one_disturbed_size_hardly_changes_the_slope(disturbed):
    nbytes = tuple(2.0**power for power in range(10, 16))
    wall_s = [1e-3, 1e-3, *(each * 1e-6 for each in nbytes[2:])]
    wall_s[disturbed] *= 1.3
    beyond = Curve(nbytes, tuple(wall_s), (0.0,) * len(nbytes)).wall(np.array([1e7]))[0]
    assert beyond == pytest.approx(
        10.0, rel=0.2
    )  # the slope of the last piece alone would be wrong by 30 to 60 percent


def test_sizes_at_the_latency_tell_no_slope():
    curve = Curve((1e3, 1e4, 1e5, 1e6), (1e-3, 1.1e-3, 1.2e-3, 1e-2), (0.0,) * 4)
    assert np.diff(curve.wall(np.array([1e6, 2e6])))[0] == pytest.approx(8.8e-3 / 9e5 * 1e6)


def test_a_collective_works_on_its_link_beyond_its_latency():
    _, work = priced(50.5e3)
    assert work[Shared.INTER] == pytest.approx(0.8 * 50.5e3 * 2e-9)  # at the rate of the largest size
    steep = dataclasses.replace(GATHER, wall_s=(1e-4, 1e-3, 2e-2))
    assert steep.wire(np.array([1e5]))[0] == pytest.approx(1e-3 - 1e-4)
    assert work[Shared.CORES] == pytest.approx(1.5 * 7.5e-5)


def test_many_small_collectives_load_the_link_as_a_large_one_does():
    """Calls of a train hide the latency of each other, so that latency is no rest for the link."""
    sizes = np.geomspace(1.0, 3e7, 200)
    wall, wire = GATHER.wall(sizes), GATHER.wire(sizes)
    fastest_s = min(seconds / size for size, seconds in zip(GATHER.nbytes, GATHER.wall_s, strict=True))
    assert (wire >= np.minimum(sizes * fastest_s, wall)).all() and (wire <= wall).all()
    assert priced(1e3)[1][Shared.INTER] == pytest.approx(0.8 * 1e3 * fastest_s)
    assert (GATHER.wire(np.array([0.0])) == 0.0).all()


def test_no_collective_works_more_than_its_cores_can():
    alone, work = priced(1e7, dataclasses.replace(PROFILE, cores=0.1))
    assert work[Shared.CORES] == pytest.approx(1.5 * 0.1 * alone)  # backward loses more than the cores do


def test_the_link_of_one_machine_is_inside_of_it():
    assert Shared.INTRA in priced(1e5, dataclasses.replace(PROFILE, topology=Topology(1, 2)))[1]


def test_a_level_of_one_rank_costs_nothing():
    assert priced(1e5, level=Level.INTRA) == (0.0, {})


def test_levels_of_the_same_ranks_cost_the_same():
    assert priced(1e5, level=Level.INTER) == priced(1e5)


def test_a_device_is_taken_by_collectives_only_as_measured():
    on_device = dataclasses.replace(PROFILE, computes_on=Shared.DEVICE, taken={})
    assert priced(1e5, on_device)[1][Shared.DEVICE] == 0.0
    alone, work = priced(1e5, dataclasses.replace(on_device, taken={"collective": 0.25}))
    assert work[Shared.DEVICE] == pytest.approx(0.25 * alone)  # exchanges, too, without a measurement of their own


def test_exchanges_take_what_was_measured_beside_one_and_otherwise_their_processor_time():
    def taken(step: str, profile: Profile) -> float:
        return float(profile.collective(step, Level.FLAT, Place.DEVICE, np.array([1e5])).work_s[Shared.CORES][0])

    curves = tuple(CollectiveCurve(each, Level.FLAT, Place.DEVICE, GATHER) for each in STEPS)
    usable = dataclasses.replace(PROFILE, collectives=curves, taken={"collective": 1.5})
    measured = dataclasses.replace(usable, taken={"collective": 1.5, "exchange": 0.5})
    assert [taken(each, usable) for each in STEPS] == pytest.approx([1.5e-4, 1e-4, 1e-4])
    assert taken("AllReduce", measured) == pytest.approx(1.5 * 1e-4)
    assert taken("AllGather", measured) == taken("AllToAll", measured) == pytest.approx(0.5 * 1e-4)


# -------------------------------------------------------------------- codecs


def test_codecs_cost_what_their_coefficients_say():
    assert codec_s(StageKind.ENCODE, "EFSignSGD", 3, 5e5) == pytest.approx(1e-5 + 3 * 2e-6 + 5e5 * 1e-9)
    far = codec_s(StageKind.ENCODE, "EFSignSGD", 3, 4e6)
    assert far == pytest.approx(1e-5 + 3 * 2e-6 + 4e6 * 1e-9 + 3e6 * 5e-10)
    one, two = (codec_s(StageKind.DECODE, "EFSignSGD", 3, 5e5, sources) for sources in (1, 2))
    assert two - one == pytest.approx(3 * 1e-6 + 5e5 * 2e-9)
    assert codec_s(StageKind.ENCODE, "EFSignSGD", 0, 0) == 0.0


def test_recoding_that_was_not_measured_is_decoding_and_encoding():
    parts = codec_s(StageKind.DECODE, "EFSignSGD", 3, 5e5, 2) + codec_s(StageKind.ENCODE, "EFSignSGD", 3, 5e5)
    PROFILE.assumptions.clear()
    assert codec_s(StageKind.RECODE, "EFSignSGD", 3, 5e5, 2) == pytest.approx(parts)
    assert list(PROFILE.assumptions) == [f"{gckernels.EFSignSGD()} recode was not measured: decode and encode"]


def test_fitted_methods_find_the_method_before_fitting():
    square = codec_s(StageKind.PROJECT, "PowerSGD(rank=2, rows=100)", 2, 2e4)
    assert square == pytest.approx(1e-5 + 2 * 2e-6 + 2e4 * 1e-9 + 400 * 1e-8)
    with pytest.raises(MachineError, match=r"rank=3.* was not measured"):
        codec_s(StageKind.PROJECT, "PowerSGD(rank=3, rows=100)", 2, 2e4)


def test_every_stage_of_a_program_has_a_price():
    usable = dataclasses.replace(PROFILE, collectives=tuple(map(accurate, PROFILE.collectives)))
    pricer = Pricer(usable)
    gathered = pricer.stages(
        MessageKind.ENCODED, ALLGATHER, [Units.of(gckernels.EFSignSGD(), [[4096, 100]])], torch.float32
    )
    matrix, vector = gckernels.PowerSGD(rank=2).fit((100, 100)), gckernels.Identity()
    groups = [Units.of(matrix, [[10_000]]), Units.of(vector, [[100]])]
    low_rank = pricer.stages(MessageKind.LOW_RANK, POWERSGD, groups, torch.float32)
    assert all((each.price.alone_s > PROFILE.overheads.stage_s).all() for each in (*gathered, *low_rank))
    assert len(gathered) == 3 and len(low_rank) == 5


def accurate(measured: CollectiveCurve) -> CollectiveCurve:
    return dataclasses.replace(measured, curve=dataclasses.replace(measured.curve, error=0.01))


# -------------------------------------------------------------------- notes and refusals


def test_prices_beyond_the_measured_sizes_are_noted():
    PROFILE.assumptions.clear()
    priced(1e7), codec_s(StageKind.DECODE, "EFSignSGD", 128, 1 << 24, 2)
    assert not PROFILE.assumptions
    priced(1.1e7), priced(1e9), codec_s(StageKind.DECODE, "EFSignSGD", 129, (1 << 24) + 1, 3)
    noted = {reason.partition(" beyond ")[2]: times for reason, times in PROFILE.assumptions.items()}
    assert noted == {"10000000 bytes": 2, "16777216 elements": 1, "128 units": 1, "2 sources": 1}


def test_prices_say_how_wrong_they_may_be_and_bad_measurements_are_named():
    price = PROFILE.collective("AllReduce", Level.FLAT, Place.DEVICE, np.array([1e5]))
    assert price.unsure_s == pytest.approx(0.25 * price.alone_s)
    doubtful = dataclasses.replace(PROFILE, codecs=(model("Identity", StageKind.ENCODE, error=0.12),))
    assert PROFILE.bad == ("AllReduce flat: error 25%",)
    assert PROFILE.doubtful == ()
    assert len(doubtful.doubtful) == 1 and "12%" in doubtful.doubtful[0]


def test_what_was_not_measured_is_refused():
    with pytest.raises(MachineError, match="Hop of level flat was not measured"):
        PROFILE.collective("Hop", Level.FLAT, Place.DEVICE, np.array([1e5]))
    with pytest.raises(MachineError, match=r"encode of BlockQuant.* was not measured"):
        codec_s(StageKind.ENCODE, "BlockQuant", 1, 100)
    with pytest.raises(MachineError, match="to-host were not measured"):
        PROFILE.copy(Shared.TO_HOST, np.array([1e5]))


def test_the_margin_is_the_larger_median_of_errors():
    assert PROFILE.margin == 0.14  # the middle of 3 % and 25 %
    assert dataclasses.replace(PROFILE, collectives=PROFILE.collectives[:1]).margin == 0.05  # codecs
    bad = [model("Cast16", StageKind.ENCODE, error=0.4)] * 3
    assert dataclasses.replace(PROFILE, collectives=(), codecs=(*PROFILE.codecs, *bad)).margin == 0.05
    assert dataclasses.replace(PROFILE, collectives=(), codecs=tuple(bad)).margin == 0.4
    assert dataclasses.replace(PROFILE, codecs=(), collectives=()).margin == MIN_MARGIN


@pytest.mark.parametrize(
    "points",
    [
        ((), (), ()),
        ((1.0, 2.0), (1.0,), (1.0, 1.0)),
        ((2.0, 1.0), (1.0, 1.0), (0.0, 0.0)),
        ((1.0, 2.0), (2.0, 1.0), (0.0, 0.0)),
        ((1.0,), (float("nan"),), (0.0,)),
        ((1.0,), (1.0,), (-1.0,)),
    ],
)
def test_curves_that_are_none_are_refused(points):
    with pytest.raises(MachineError):
        Curve(*points)


# -------------------------------------------------------------------- format


def test_profiles_survive_json():
    again = profile_from_json(json.loads(json.dumps(PROFILE.to_json())))
    assert again == PROFILE
    assert again.collective("AllGather", Level.FLAT, Place.DEVICE, np.array([1e6])).alone_s == priced(1e6)[0]


def damaged(change: Any) -> Any:
    record = copy.deepcopy(PROFILE.to_json())
    change(record)
    return record


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda record: record.update(version=2), "version must be the integer 1, got 2"),
        (lambda record: record.update(format="plan"), "format must be one of gckernels profile, got 'plan'"),
        (lambda record: record.pop("codecs"), "got none with codecs"),
        (lambda record: record.update(extra=1), "no other keys .* one with 'extra'"),
        (lambda record: record.update(cores=0), "cores"),
        (lambda record: record.update(cores=True), "cores must be a finite number"),
        (lambda record: record.update(computes_on="inter"), "computes_on"),
        (lambda record: record.update(left_out="none"), "left_out must be a list"),
        (lambda record: record["topology"].update(machines=0), "machines"),
        (lambda record: record["overheads"].update(stage_s=-1.0), "stage_s"),
        (lambda record: record["sharing"].update(flat=2.0), r"sharing\.flat must be"),
        (
            lambda record: record["sharing"].update(up=0.5),
            "sharing must be .* no other keys than flat, .* one with 'up'",
        ),
        (lambda record: record["taken"].update(copy=0.5), "taken"),
        (lambda record: record["collectives"][0].update(step="Gossip"), "step must be one of"),
        (lambda record: record["collectives"][0].update(wall_s=[1.0]), "as many"),
        (lambda record: record["collectives"][0].update(nbytes="many"), r"collectives\[0\].nbytes must be a list"),
        (lambda record: record["collectives"].append([]), r"collectives\[2\] must be an object"),
        (lambda record: record["codecs"][0].update(compressor="Gone(bits=3)"), "a compressor of this release"),
        (lambda record: record["codecs"][0].update(unit_s=None), "unit_s must be a finite number"),
        (lambda record: record["stamp"].update(hosts=[1]), r"hosts\[0\] must be a text"),
    ],
)
def test_damaged_profiles_are_refused(change, message):
    with pytest.raises(MachineError, match=message):
        profile_from_json(damaged(change))


@pytest.mark.parametrize("given", [None, [], "profile", 3, {"format": {"a": 1}}])
def test_other_json_is_refused(given):
    with pytest.raises(MachineError, match=r"must be .*format"):
        profile_from_json(given)
