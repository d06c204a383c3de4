"""``gckernels profile`` says what was disturbed while it measured."""

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


def test_prices_that_disagree_are_named(alone, tmp_path, capsys):
    alone(replace(measured(tmp_path, worse=["Cast16"]), left_out=("AllToAll flat: no time",)))
    code, shown, errors = run_text(capsys, "profile", "-o", str(tmp_path / "profile.json"))
    assert code == 0 and "disturbed: Cast16" in errors and "encode: error 30%" in errors and "--seconds" in errors
    assert "not measured, no time: AllToAll flat" in shown and (tmp_path / "profile.json").exists()
