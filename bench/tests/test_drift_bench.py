"""Tests of the measurement of changing links, without links."""

from __future__ import annotations

import argparse

from bench.sync import drift


def test_cells_have_the_rate_before_the_change():
    given = {"networks": ["2", "2x2"], "models": ["transformer_1m"], "changes": ["throttle", "free", "cut"]}
    given |= {"rate": "1gbit", "slow_rate": "100mbit", "before": 1, "steps": 2, "rounds": 5, "budget_s": 1}
    cells = drift.cells_of(argparse.Namespace(**given))
    assert [(cell.columns["network"], cell.columns["change"], cell.network.rate) for cell in cells] == [
        (network, change, rate)
        for network in ("2", "2x2")
        for change, rate in (("throttle", "1gbit"), ("free", "100mbit"), ("cut", "1gbit"))
    ]


def test_rates_change_by_the_factor():
    assert drift.rate_after("1gbit", "throttle") == drift.rate_after("10mbit", "free") == "100000kbit"


def test_the_course_after_a_change():
    before = drift.Trained([1.0, 2.0, 3.0], [], [])
    after = drift.Trained([float(step) for step in range(40)], [7, 21], ["slower", "a new plan"])
    course = drift._course(before, after)
    assert (course["before_s"], course["longest_s"], course["settled_after"]) == ("2.000000", "39.0000", 21)
    assert course["decisions"] == "slower / a new plan"
    assert course["curve"].split()[:2] == ["0.5000", "2.5000"] and len(course["curve"].split()) == drift.PARTS
    assert drift._course(before, drift.Trained([1.0], [], []))["settled_after"] == 0
