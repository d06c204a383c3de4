"""Profiles that are kept: found again where they would do, measured again where they would not."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import gckernels
from gckernels.sync import Topology
from gckernels.sync.planner.machines.curves import CodecModel, Coefficients, CollectiveCurve, CopyCurve, Curve
from gckernels.sync.planner.machines.machine import Overheads, Shared
from gckernels.sync.planner.machines.profile import REFUSED_ERROR, Profile, Stamp
from gckernels.sync.planner.machines.profile_json import profile_to_json
from gckernels.sync.profiling import request
from gckernels.sync.profiling.profile_cache import find, is_complete, with_profile
from gckernels.sync.profiling.request import measured_or_kept
from gckernels.sync.programs import Level, Place
from gckernels.sync.programs.stages import StageKind
from ranks import run_ranks, values_of

CURVE = Curve((1e3, 1e6), (1e-4, 1e-2), (1e-4, 1e-3), error=0.05)
NOISY = replace(CURVE, error=REFUSED_ERROR + 0.05)
IDENTITY, CAST, SIGN = map(gckernels.from_spec, ("Identity", "Cast16", "EFSignSGD"))


def models(*methods: gckernels.Compressor, error: float = 0.05) -> tuple[CodecModel, ...]:
    works = (StageKind.ENCODE, StageKind.DECODE)
    price = Coefficients(1e-5, 1e-6, 1e-9)
    return tuple(
        CodecModel(method, work, Place.DEVICE, price, 1.0, 128, 1 << 24, 2, error)
        for method in methods
        for work in works
    )


def gathers(curve: Curve = CURVE) -> tuple[CollectiveCurve, ...]:
    return tuple(CollectiveCurve(step, Level.FLAT, Place.DEVICE, curve) for step in ("AllReduce", "AllGather"))


WHOLE = Profile(
    name="two ranks",
    topology=Topology(2),
    computes_on=Shared.CORES,
    cores=1.0,
    overheads=Overheads(),
    collectives=gathers(),
    codecs=models(IDENTITY, CAST),
    copies=(CopyCurve(Shared.CORES, CURVE),),
    sharing={},
    taken={},
    left_out=(),
    stamp=Stamp(("a", "a"), "cpu", "gloo", "2.11", "0.1", "", 10.0),
)


# -------------------------------------------------------------------- on ranks


def kept(cache: str, calls: Sequence[tuple[float, Profile]]) -> list[str]:
    """For each call, which measurement has made the profile that it returns.

    Args:
        cache: the folder.
        calls: the budget of each call, and the profile that a measurement would give.
    """
    found = []
    with mock.patch.dict(os.environ, GCKERNELS_CACHE=cache):
        for number, (seconds, measured) in enumerate(calls):
            made = replace(measured, stamp=replace(WHOLE.stamp, date=str(number)))
            with mock.patch.object(request, "measure_profile", lambda *_, made=made: made):
                found.append(measured_or_kept(seconds, ["Identity", "Cast16"]).stamp.date)
    return found


def kept_by_ranks(cache: Path, *calls: tuple[float, Profile]) -> list[str]:
    first, *others = values_of(run_ranks(2, kept, str(cache), calls))
    assert all(other == first for other in others)
    return first


def test_a_profile_is_found_again_unless_more_seconds_are_asked_for(tmp_path: Path):
    assert kept_by_ranks(tmp_path, (2.0, WHOLE), (1.0, WHOLE), (3.0, WHOLE), (2.0, WHOLE)) == ["0", "0", "2", "2"]


def test_a_profile_without_prices_that_plans_need_is_not_found_again(tmp_path: Path):
    """One such profile would spoil every later run."""
    noisy = replace(WHOLE, copies=(CopyCurve(Shared.CORES, NOISY),))
    assert kept_by_ranks(tmp_path, (2.0, noisy), (2.0, WHOLE), (2.0, noisy)) == ["0", "1", "1"]


def test_kept_profiles_of_no_use_are_passed_over(tmp_path: Path):
    """Neither a damaged one nor one from before it was known to lack prices hides the others."""
    assert kept_by_ranks(tmp_path, (2.0, WHOLE)) == ["0"]
    (file,) = tmp_path.glob("profiles-*")
    specs = ["Identity()", "Cast16()"]
    text = with_profile(file.read_text(), 60.0, specs, profile_to_json(replace(WHOLE, copies=())))
    file.write_text(with_profile(text, 90.0, specs, {}))
    assert kept_by_ranks(tmp_path, (2.0, WHOLE), (60.0, WHOLE)) == ["0", "1"]


def test_a_damaged_file_is_written_again(tmp_path: Path):
    kept_by_ranks(tmp_path, (2.0, WHOLE))
    (file,) = tmp_path.glob("profiles-*")
    file.write_text("{")
    again = replace(WHOLE, name="again")
    assert kept_by_ranks(tmp_path, (2.0, again), (2.0, WHOLE)) == ["0", "0"]


# -------------------------------------------------------------------- completeness


@pytest.mark.parametrize(
    "lacking",
    [
        {"copies": ()},
        {"copies": (CopyCurve(Shared.CORES, NOISY),)},
        {"collectives": gathers()[:1]},
        {"collectives": gathers(NOISY)},
        {"codecs": models(CAST)},
        {"codecs": models(CAST) + models(IDENTITY, error=0.25)},
        {"codecs": models(IDENTITY) + models(CAST, error=0.25)},
    ],
)
def test_profiles_lack_what_was_left_out_or_disagrees(lacking: dict[str, Any]):
    assert is_complete(WHOLE, [IDENTITY, CAST])
    assert not is_complete(replace(WHOLE, **lacking), [IDENTITY, CAST])


def test_compressors_without_time_or_that_nobody_asks_for_are_not_lacking():
    assert is_complete(WHOLE, [IDENTITY, CAST, SIGN])
    assert is_complete(replace(WHOLE, codecs=models(IDENTITY) + models(CAST, error=0.25)), [IDENTITY])


# -------------------------------------------------------------------- the file


def test_a_kept_profile_of_more_seconds_and_compressors_will_do():
    file = with_profile("", 10.0, ["A", "B"], {"of": 10})
    file = with_profile(file, 60.0, ["A", "B", "C"], {"of": 60})
    assert list(map(json.loads, find(file, 10.0, ["A"]))) == [{"of": 60}, {"of": 10}]
    assert list(map(json.loads, find(file, 60.0, ["C", "A"]))) == [{"of": 60}]
    assert find(file, 60.5, ["A"]) == find(file, 10.0, ["D"]) == []
    again = with_profile(file, 60.0, ["C", "B", "A"], {"of": 61})
    assert list(map(json.loads, find(again, 60.0, []))) == [{"of": 61}]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[",
        "null",
        '{"profiles": [1]}',
        '{"profiles": [{"seconds": 1}]}',
        '{"profiles": [{"seconds": 1, "compressors": [[1]], "profile": {}}]}',
        '{"profiles": [{"seconds": 1, "compressors": ["A", 1], "profile": {}}]}',
        '{"profiles": [{"seconds": NaN, "compressors": ["A"], "profile": 2}]}',
    ],
)
def test_a_damaged_file_of_profiles_holds_nothing(text: str):
    assert find(text, 1.0, []) == []
    assert list(map(json.loads, find(with_profile(text, 2.0, ["A"], {"of": 2}), 1.0, ["A"]))) == [{"of": 2}]
