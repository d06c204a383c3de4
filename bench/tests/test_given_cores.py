"""The part of the cores that a host gives to others."""

import os

import pytest

from bench.lib import cores


def test_a_host_that_takes_a_core_for_a_second_of_two_takes_half_of_one(tmp_path, monkeypatch):
    counters, now_s, ticks = tmp_path / "stat", [10.0], os.sysconf("SC_CLK_TCK")
    monkeypatch.setattr(cores, "_COUNTERS", counters)
    monkeypatch.setattr(cores.time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(cores.os, "cpu_count", lambda: 4)
    counters.write_text(f"cpu  1 2 3 4 5 6 7 {3 * ticks} 0 0\ncpu0 1 2 3 4 5 6 7 8 0 0\n")
    since = cores.Stolen()
    now_s[0] += 2.0
    counters.write_text(f"cpu  9 9 9 9 9 9 9 {4 * ticks} 0 0\n")
    assert since.part() == pytest.approx(1 / (4 * 2))


def test_a_machine_that_counts_nothing_has_nothing_stolen(tmp_path, monkeypatch):
    counters = tmp_path / "stat"
    counters.write_text("cpu  1 2 3 4\n")
    monkeypatch.setattr(cores, "_COUNTERS", counters)
    assert cores.Stolen().part() == 0.0
