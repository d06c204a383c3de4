"""Test of the benchmark of building: every program is measured."""

from __future__ import annotations

from bench.sync import build_time


def test_every_program_is_measured(monkeypatch):
    written = []
    for name, value in {"LAYERS": 1, "HIDDEN": (16,), "REPETITIONS": 1}.items():
        monkeypatch.setattr(build_time, name, value)
    monkeypatch.setattr(build_time, "merge_csv", lambda name, device, rows, key: written.extend(rows))
    build_time.main()
    assert [row["units"] for row in written] == [12] * len(build_time.SETTINGS)
