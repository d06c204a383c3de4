"""Tests of the samples of cases."""

from __future__ import annotations

from sampling import sampled


def test_every_test_keeps_a_case_and_large_ones_their_share():
    names = {f"file.py::large[{number}]" for number in range(1000)} | {"file.py::small[a]", "file.py::single"}
    kept = sampled(sorted(names), 10)
    assert kept < names and kept == sampled(sorted(names, reverse=True), 10)
    assert "file.py::small[a]" in kept and "file.py::single" in kept and 50 < len(kept) < 200
    assert sampled(names, 1) == names
