"""``gckernels profile`` says with its exit code whether plans can be made of what it has measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from test_caveats import write_profile

from command_files import run_text
from gckernels.planner.machines.files import profile_from_json
from gckernels.planner.profiling import measure


@pytest.fixture
def alone(monkeypatch):
    """A function that sets the profile that rank 0 measures, without other ranks."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(dist, "init_process_group", lambda backend: None)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    return lambda profile: monkeypatch.setattr(measure, "profile", lambda *arguments, **options: profile)


def measured(folder, *specs, worse=()):
    return profile_from_json(json.loads(Path(write_profile(folder, *specs, worse=worse)).read_text()))


def test_good_prices_are_good(alone, tmp_path, capsys):
    alone(measured(tmp_path, "Cast16"))
    code, shown, _ = run_text(capsys, "profile", "-o", str(tmp_path / "profile.json"))
    assert code == 0 and "predictions are expected to be off by" in shown


@pytest.mark.parametrize("lacks", ["collectives", "codecs", "copies"])
def test_prices_that_every_plan_needs_must_be_there(alone, tmp_path, capsys, lacks):
    """A disturbed machine may leave time for none of them. The profile is written, with what it has."""
    alone(replace(measured(tmp_path, "Cast16"), left_out=("AllReduce flat: no time",), **{lacks: ()}))
    code, shown, errors = run_text(capsys, "profile", "-o", str(tmp_path / "profile.json"))
    assert code == 3 and "it lacks prices that every plan needs" in errors and "--seconds" in errors
    assert "not measured, no time: AllReduce flat" in shown and (tmp_path / "profile.json").exists()
    assert ("predictions are expected" in shown) == (lacks == "copies")


def test_prices_that_disagree_are_named(alone, tmp_path, capsys):
    alone(measured(tmp_path, worse=["Cast16"]))
    code, _, errors = run_text(capsys, "profile")
    assert code == 3 and "plans do not use" in errors and "Cast16" in errors
